"""The operators of arrays, declared to type checkers: `minidiff/ops/operators.py` attaches them to traced values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class ArrayOperators:
    """The base class of values that behave like an array."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def _operator(self, *operands: Any) -> Any: ...

        __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __floordiv__ = __mod__ = __divmod__ = _operator
        __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _operator
        __rdivmod__ = __pow__ = __rpow__ = __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = _operator
        __rand__ = __ror__ = __rxor__ = __rlshift__ = __rrshift__ = __lt__ = __le__ = __gt__ = __ge__ = _operator
        __neg__ = __pos__ = __abs__ = __invert__ = __round__ = __getitem__ = __iter__ = __contains__ = _operator
        __float__ = __int__ = __complex__ = __index__ = __bool__ = __len__ = __setitem__ = _operator
        __array__ = __array_ufunc__ = __array_function__ = __copy__ = __deepcopy__ = __reduce_ex__ = _operator
