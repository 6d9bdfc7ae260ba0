# What type checkers and editors are told of `minidiff.numpy`: that it is NumPy, with NumPy's own types, and `at`.
from numpy import *  # noqa: F403

from minidiff.numpy.replaced import at as at
