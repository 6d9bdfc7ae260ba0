"""Step 1: operations, the interpreter that gives them a meaning, and tracers."""

from collections import namedtuple
from contextlib import contextmanager

import numpy as np


class Type(namedtuple("Type", "shape varying", defaults=[(), frozenset()])):
    """A value's type, known before the program runs: its shape, and the mesh axes along
    which it varies (page 6).
    """

    def __str__(self):
        axes = "{" + ",".join(sorted(self.varying)) + "}" if self.varying else ""
        return f"f64[{','.join(map(str, self.shape))}]{axes}"


def typeof(x):
    """The type of an array, a number, a tracer; a type is its own."""
    return (
        x
        if isinstance(x, Type)
        else x.type
        if isinstance(x, Tracer)
        else Type(np.shape(x))
    )


class Evaluate:
    """The interpreter at the bottom: it has NumPy run an operation."""

    def process(self, op, args, params):
        # HOLE 1.1 [1 point]
        # Run `op` on these arrays: `op.run` is its NumPy function, `params` are keyword
        # arguments.
        return op.run(*args, **params)
        # END


interpreters = [Evaluate()]  # the last one is current


def current():
    return interpreters[-1]


@contextmanager
def using(interpreter):
    """Make an interpreter the current one for a `with` block."""
    # HOLE 1.2 [1 point]
    # Add it to the end of the list, `yield`, and take the last one off again, also if
    # the block raises an error. The same interpreter may be in the list twice.
    interpreters.append(interpreter)
    try:
        yield
    finally:
        interpreters.pop()
    # END


casts = []  # each maps (operation, operands, params) to operands that agree


class Operation:
    """A name, how NumPy runs it, and the shape of its result from the shapes of its
    operands.
    """

    def __init__(self, name, run, shape, many=False):
        self.name, self.run, self.shape = name, run, shape
        self.many = many  # it has a list of results
        # page 6 gives this a meaning, too
        self.varying = lambda *varying, **params: frozenset().union(*varying)

    def __call__(self, *args, **params):
        # HOLE 1.3 [1 point]
        # Pass the operands through every function in `casts`, then have the current
        # interpreter process the operation.
        for cast in casts:
            args = cast(self, args, params)
        return current().process(self, args, params)
        # END

    def __repr__(self):
        return self.name


class Tracer:
    """A value that an interpreter follows, where the program expects an array;
    `content` is what it keeps of it.
    """

    __array_ufunc__ = None  # NumPy's arrays leave `array + tracer` to the tracer

    def __init__(self, interpreter, type, content=None):
        self.interpreter, self.type, self.content = interpreter, type, content
        self.shape = type.shape
        # axis -> it, as a value that varies along the axis, too (page 6)
        self.varied = {}

    def __repr__(self):
        return f"<{self.type}>"


def owner(x):
    """The interpreter that follows x, or None for an array or a number."""
    return x.interpreter if isinstance(x, Tracer) else None
