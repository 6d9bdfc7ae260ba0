"""Step 1: nine operations, and the operators of tracers."""

import numpy as np

from .tracer import Operation, Tracer, casts, typeof


def _common(*shapes, **params):
    return np.broadcast_shapes(*shapes)


def _with_new_axes(x, shape, axes):
    old = tuple(size for axis, size in enumerate(shape) if axis not in axes)
    if x != old:
        raise TypeError(f"broadcast_to puts in new axes, and {x} is not {old}: it does not stretch an axis of size 1")
    return shape


add = Operation("add", np.add, _common, elementwise=True)
multiply = Operation("multiply", np.multiply, _common, elementwise=True)
sin = Operation("sin", np.sin, _common, elementwise=True)
cos = Operation("cos", np.cos, _common, elementwise=True)
positive = Operation("positive", lambda x: np.where(x > 0, 1.0, 0.0), _common, elementwise=True)
matmul = Operation("matmul", np.matmul, lambda x, y: (x[0], y[1]))
transpose = Operation("transpose", np.transpose, lambda x: x[::-1])
sum = Operation(
    "sum",
    lambda x, axes: np.sum(x, axis=axes),
    lambda x, axes: tuple(size for axis, size in enumerate(x) if axis not in axes),
)
broadcast_to = Operation(  # the inverse direction: new axes, at these positions, along which values are repeated
    "broadcast_to",
    lambda x, shape, axes: np.broadcast_to(np.expand_dims(x, axes), shape),
    _with_new_axes,
)


def total(x):
    return sum(x, axes=tuple(range(len(typeof(x).shape))))


def relu(x):
    return x * positive(x)


def same_shape(op, args, params):
    """Give tracers of fewer dimensions new leading axes, where an elementwise operation needs equal shapes."""
    if not op.elementwise:
        return args
    # HOLE 1.4 [2 points]
    # The shape that all operands need is `np.broadcast_shapes` of theirs. Pass a tracer of another shape
    # through `broadcast_to(x, shape=..., axes=...)`, where `axes` are the positions of its new, leading axes.
    # Leave arrays and numbers as they are: NumPy broadcasts them anyway.
    shape = np.broadcast_shapes(*(typeof(x).shape for x in args))
    new = [tuple(range(len(shape) - len(typeof(x).shape))) for x in args]
    differ = [isinstance(x, Tracer) and x.shape != shape for x in args]
    return [broadcast_to(x, shape=shape, axes=a) if d else x for x, a, d in zip(args, new, differ)]
    # END


casts.append(same_shape)

# HOLE 1.5 [1 point]
# Give Tracer its operators: __add__, __radd__, __mul__, __rmul__, __neg__, __sub__, __rsub__ and __matmul__,
# written with the operations above. (A lambda is a method, too.)
Tracer.__add__ = Tracer.__radd__ = lambda x, y: add(x, y)
Tracer.__mul__ = Tracer.__rmul__ = lambda x, y: multiply(x, y)
Tracer.__neg__ = lambda x: multiply(-1.0, x)
Tracer.__sub__ = lambda x, y: add(x, multiply(-1.0, y))
Tracer.__rsub__ = lambda x, y: add(y, multiply(-1.0, x))
Tracer.__matmul__ = lambda x, y: matmul(x, y)
# END
Tracer.__rmatmul__ = lambda x, y: matmul(y, x)
Tracer.T = property(lambda x: transpose(x))
