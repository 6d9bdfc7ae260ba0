"""Step 1: nine operations, and the operators of tracers."""

import numpy as np

from .tracer import Operation, Tracer, casts, typeof


def _without(shape, axes):
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def _with_new(x, shape, axes):
    if x != _without(shape, axes):
        raise TypeError(
            f"new axes {axes} in the shape {x} do not make {shape}: broadcast_to does "
            "not stretch an axis"
        )
    return shape


add = Operation("add", np.add, np.broadcast_shapes)
multiply = Operation("multiply", np.multiply, np.broadcast_shapes)
sin = Operation("sin", np.sin, np.broadcast_shapes)
cos = Operation("cos", np.cos, np.broadcast_shapes)
positive = Operation(
    "positive", lambda x: np.where(x > 0, 1.0, 0.0), np.broadcast_shapes
)
matmul = Operation("matmul", np.matmul, lambda x, y: (x[0], y[1]))
transpose = Operation("transpose", np.transpose, lambda x: x[::-1])
sum = Operation("sum", lambda x, axes: np.sum(x, axis=axes), _without)
# the inverse direction: new axes, at these positions, along which values are repeated
broadcast_to = Operation(
    "broadcast_to",
    lambda x, shape, axes: np.broadcast_to(np.expand_dims(x, axes), shape),
    _with_new,
)


def total(x):
    return sum(x, axes=tuple(range(len(typeof(x).shape))))


def relu(x):
    return x * positive(x)


def same_shape(op, args, params):
    """Give tracers of fewer dimensions new leading axes, where an elementwise operation
    needs equal shapes.
    """
    if op.shape is not np.broadcast_shapes:
        return args
    shape = np.broadcast_shapes(*(typeof(x).shape for x in args))

    def fit(x):
        # HOLE 1.4 [2 points]
        # Pass a tracer of another shape than `shape` through `broadcast_to(x,
        # shape=..., axes=...)`, where `axes` are the positions of its new, leading
        # axes. Return it, or x as it is: arrays and numbers stay as they are, because
        # NumPy broadcasts them anyway.
        if not isinstance(x, Tracer) or x.shape == shape:
            return x
        return broadcast_to(
            x, shape=shape, axes=tuple(range(len(shape) - len(x.shape)))
        )
        # END

    return [fit(x) for x in args]


casts.append(same_shape)

# HOLE 1.5 [1 point]
# Give Tracer its operators: __add__, __radd__, __mul__, __rmul__, __sub__, __rsub__ and
# __matmul__, written with the operations above. (A lambda is a method, too; `add`
# itself is none: Python would not give it x.)
Tracer.__add__ = Tracer.__radd__ = lambda x, y: add(x, y)
Tracer.__mul__ = Tracer.__rmul__ = lambda x, y: multiply(x, y)
Tracer.__sub__ = lambda x, y: add(x, multiply(-1.0, y))
Tracer.__rsub__ = lambda x, y: add(y, multiply(-1.0, x))
Tracer.__matmul__ = lambda x, y: matmul(x, y)
# END
Tracer.__rmatmul__ = lambda x, y: matmul(y, x)
