"""NumPy's namespace, differentiable: `import minidiff.numpy as np`.

The functions *are* NumPy's. On plain arrays nothing comes between; on traced values NumPy hands the
call over to `minidiff` (`__array_ufunc__`, `__array_function__`). So code written for NumPy is
differentiated as it stands. Replaced are only the functions that NumPy cannot hand over.

>>> import minidiff as md, minidiff.numpy as np
>>> float(md.grad(lambda x: np.array([x, 2 * x]).sum())(1.0))
3.0
"""

import numpy as _numpy

from minidiff.numpy import construct as _construct

_replaced = {"array": _construct.array, "asarray": _construct.asarray}

__all__ = list(_numpy.__all__)

globals().update({name: _replaced.get(name, getattr(_numpy, name)) for name in __all__})
