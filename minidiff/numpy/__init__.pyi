# For type checkers and editors, `minidiff.numpy` is NumPy, with its types, and `at`.
from numpy import *  # noqa: F403

from minidiff.numpy.replaced import at as at
