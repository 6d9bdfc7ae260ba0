"""SciPy's functions with derivatives: `special linalg stats signal integrate optimize sparse.linalg`.

Each module has names and arguments of SciPy's module of the same name, and computes with it. SciPy is optional
(`pip install '.[scipy]'`), and loads with the first of these modules. Without it, they raise ImportError.

>>> import minidiff as md
>>> round(float(md.grad(md.scipy.special.gammaln)(3.0)), 6)  # the digamma function
0.922784
"""

from typing import TYPE_CHECKING

from minidiff.errors.other_libraries import finish_module as _finish_module
from minidiff.errors.other_libraries import module_getattr as _module_getattr

__all__ = ["integrate", "linalg", "optimize", "signal", "sparse", "special", "stats"]

if TYPE_CHECKING:
    from minidiff.scipy import integrate, linalg, optimize, signal, sparse, special, stats
else:
    _load = _module_getattr(__name__, {name: f"{__name__}.{name}" for name in __all__})

    def __getattr__(name):
        try:
            return _load(name)
        except ModuleNotFoundError as error:
            if error.name != "scipy":
                raise
            raise ImportError(f"md.scipy.{name} needs the package scipy: `pip install scipy`") from None


_finish_module(globals())
