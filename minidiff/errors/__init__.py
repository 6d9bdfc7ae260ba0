"""The errors of traced programs: each names the values and their types, and says what to write instead.

Also text for readers: lists, names of functions, similar names, multi-line strings that show as printed.
"""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy

from minidiff.values.dtypes import array_name, is_scalar_constant


class TracerError(TypeError):
    """A traced value was used where a concrete one is required.

    >>> import minidiff as md
    >>> md.jit(lambda x: x if x > 0 else -x)(1.0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    minidiff.errors.TracerError: a Python condition needs a concrete value, ...
    """


class LeakedTracerError(TracerError):
    """A traced value was used after the transformation that created it ended.

    >>> import minidiff as md
    >>> leaked = []
    >>> gradient = md.grad(lambda x: leaked.append(x) or x**2)(1.0)
    >>> leaked[0] + 1  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    minidiff.errors.LeakedTracerError: a traced value of type f64[] was used outside ...
    """


class VarianceError(TypeError):
    """A value has a state along a mesh axis that is not allowed there.

    >>> import numpy, spmd
    >>> mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    >>> spmd.shard_map(sum, mesh, spmd.P("i"), spmd.P())(numpy.ones(4))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    minidiff.errors.VarianceError: the result has type f64[]{i}: it may differ from rank to rank ...

    Source: JEP 17111, "Efficient transposition of replication-inducing collectives" (the types).
    """


class VarianceWarning(UserWarning):
    """The types along a mesh axis agree, but probably do not say what the program means.

    Here each rank's loss is differentiated by a weight that all ranks share: the gradient is that of the sum.

    >>> import warnings, numpy, minidiff as md, spmd
    >>> mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    >>> body = lambda w, x: md.grad(lambda w: (w * x).sum())(w)
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     g = spmd.shard_map(body, mesh, in_specs=(spmd.P(), spmd.P("i")), out_specs=spmd.P())(1.0, numpy.ones(4))
    >>> float(g), caught[0].category.__name__
    (4.0, 'VarianceWarning')
    """


class KeyReuseWarning(UserWarning):
    """A key of `md.random` is used again: two draws from one key are not independent.

    >>> import warnings, minidiff as md
    >>> key = md.random.key(0)
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     total = md.random.normal(key, 3) + md.random.uniform(key, 3)
    >>> print(caught[0].message)  # doctest: +ELLIPSIS
    uniform uses a key again: normal used it at line 3: total = ...
    """


class UnboundAxisError(NameError):
    """A collective named an axis that no enclosing `shard_map` or `vmap` has.

    >>> from collectives import psum
    >>> psum(1.0, "i")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    minidiff.errors.UnboundAxisError: psum over 'i' was called outside a shard_map: ...
    """


# ---------------------------------------------------------------- tracers out of their transformation


def leak_message(x: Any) -> str:
    if not x.interpreter.ended:
        return (
            f"a traced value of type {x.type} was used outside the transformation it belongs to ({_origin(x)}), which "
            "is still running: in another thread, or in a task or callback outside of it. Compute with traced "
            "values in the thread of the transformation, and pass plain values to other threads, such as "
            "md.stop_gradient(x).item(); or call md.grad inside each thread."
        )
    return (
        f"a traced value of type {x.type} was used outside the transformation it belongs to ({_origin(x)}). "
        "It was stored somewhere (a global, a list, an attribute) while that transformation ran; "
        "return it from the function instead."
    )


#: The use of a concrete integer, as errors name it.
SIZE = "a size, an index of a list or range()"

#: The use of a concrete boolean in `if`, `while` and such.
CONDITION = "a Python condition"


def recorded_message(x: Any, use: str) -> str:
    """Explain why a value on a tape cannot be used as a concrete one, and what to write instead."""
    instead = (
        "Shapes are part of that program: compute sizes outside the function, or name the argument that they come "
        "from in static_argnums or static_argnames of jit. For range() write md.fori_loop, for a choice md.cond."
        if use == SIZE
        else f"{'Decorate the function with md.autograph, or choose' if use == CONDITION else 'Choose'} with md.cond "
        "or np.where instead, loop with md.fori_loop, call np.sin for math.sin; or decide outside the function, under "
        "jit by an argument that is named in static_argnums."
    )
    return (
        f"{use} needs a concrete value, but on this tape {x.type} is only a name: {x.interpreter.name} "
        f"records a program for values of this type, not for one value. {instead}"
    )


def batched_message(x: Any, use: str) -> str:
    """Explain why a value under `vmap` cannot be used as a concrete one, and what to write instead."""
    instead = (
        "pass what all share with in_axes=None; for range() write md.fori_loop, for a choice md.cond"
        if use == SIZE
        else "choose each element with np.where or md.cond, loop with md.fori_loop, call np.sin for math.sin"
    )
    return f"{use} needs one concrete value, but under vmap this value ({x.type}) is many at once: {instead}"


def lost_derivative_message(x: Any, use: str) -> str:
    number = "item()" if x.size == 1 else "tolist()"
    return (
        f"{use} of a value that is being differentiated ({x.type}) would lose its derivative. For a plain "
        f"number, to print or to log, take md.stop_gradient(x).{number}; to build an array use minidiff.numpy.array or "
        "np.stack; instead of math.sin, np.sin"
    )


def _origin(x: Any) -> str:
    """Return the origin of a value: `grad of loss`, `grad of loss, in shard_map of body`."""
    interpreter = x.interpreter
    scope = x.interpreter.scope
    while interpreter is not None and interpreter.origin is None:
        interpreter = interpreter.outer
    names = [" of ".join(interpreter.origin)] if interpreter is not None else []
    if scope is not None and scope.function:
        names.append(f"shard_map of {scope.function}")
    return ", in ".join(names) or x.interpreter.name


# ---------------------------------------------------------------- operands that do not fit


class MisfitError(ValueError):
    """NumPy rejected the operands of an operation: its error, with their types."""

    def __init__(self, primitive: Any, args: Sequence[Any], reason: str = "their shapes cannot be broadcast together"):
        super().__init__(f"{primitive.name} of {' and '.join(map(describe_operand, args))}: {reason}")


def explains_itself(error: ValueError, primitive: Any) -> bool:
    """Return whether an operation's error says what it was about, or is the user's: of a body, or of a callback."""
    by_user = primitive.shape_rule is None or type(error) is not ValueError
    return by_user or str(error).startswith(primitive.name)


def describe_operand(x: Any) -> str:
    """Return an operand in error messages: its type, or else its class and value."""
    if is_scalar_constant(x) or isinstance(x, numpy.ndarray):
        array = numpy.asarray(x)
        return array_name(array.shape, array.dtype)
    return str(getattr(x, "type", x)) if hasattr(x, "dtype") else f"{type(x).__name__} {x!r:.40}"


# ---------------------------------------------------------------- mesh axes


def divergence_error(decision: str, t: Any, axes: Sequence[str], because: str = "") -> VarianceError:
    """Return the error that ranks would branch differently on a value of type `t`, which varies along `axes`."""
    shown = ", ".join(map(repr, axes))
    return VarianceError(
        f"{decision}, but {t} varies along {shown}{because}: the ranks would take different branches, and wait "
        f"for each other forever. Make them agree first (psum, pmax or pmin over {shown}), or choose each element "
        "with np.where"
    )


def list_items(items: Sequence[object]) -> str:
    """Return a list in a sentence: `a`, `a and b`, `a, b and c`."""
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last


def show_axes(axes: Collection[str]) -> str:
    """Mesh axes, written as the argument of a collective: `'i'`, or `('i', 'j')`."""
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else tuple(sorted(axes))
    return repr(axes[0] if len(axes) == 1 else axes)


# ---------------------------------------------------------------- text


class PrintedText(str):
    """A multi-line string whose `repr` is the text itself, for notebook output.

    >>> PrintedText('def f(x):\\n    return x')
    def f(x):
        return x
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def name_of(f: Any) -> str:
    """Return the name of a function in error messages."""
    return getattr(f, "__name__", "f")


def is_identifier(text: str) -> bool:
    """Return whether a program may assign a text as a name, and Python reads it as no other name.

    >>> [is_identifier(name) for name in ('loss', 'class', '__file__', 'a=1', 'ﬁt')]  # Python reads the last as 'fit'
    [True, False, False, False, False]
    """
    reserved = keyword.iskeyword(text) or (text.startswith("__") and text.endswith("__"))
    return text.isidentifier() and not reserved and unicodedata.normalize("NFKC", text) == text


def printable(text: str) -> str:
    """Escape what does not print, such as line breaks, so that a text fits into a comment.

    >>> printable('one\\ntwo')
    'one\\\\ntwo'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def did_you_mean(name: Any, known: Iterable[str], prefix: str = "") -> str:
    """Suggest a similar known name, after a prefix of all names, in an error message, if there is one.

    >>> did_you_mean('batches', ('batch', 'model'))
    ". Did you mean 'batch'?"
    """
    import difflib  # only errors need it

    known = tuple(known)
    matches = difflib.get_close_matches(str(name).lower(), {name.lower(): name for name in known}, 1)
    return "".join(f". Did you mean {prefix + name!r}?" for name in known if name.lower() in matches)
