"""Debugging aids: `debug_nans` finds what makes a NaN or an infinity; `disable_jit`; `print`.

While `debug_nans` is on, the bottom of the stack is another interpreter, which evaluates as `Evaluate` does and checks
each result. All fast paths (compiled programs, derivatives recorded as one equation) require `EVALUATE` itself, so
operations are applied one by one under this interpreter. It costs nothing when it is off.

At the bottom of the stack, derivative rules compute on plain arrays with NumPy, which bypasses the interpreter, so it
checks the results of rules. NumPy's `errstate` covers NumPy calls in the user's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy

from minidiff import tree
from minidiff.api.recording import jit_is_disabled
from minidiff.core.interpreter import BOTTOM, EVALUATE, Evaluate, current_interpreter, running
from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Tracer, Value, unwrap_weak
from minidiff.core.types import ShapedArray
from minidiff.errors import describe_operand
from minidiff.errors.location import current_location
from minidiff.errors.other_libraries import finish_module
from minidiff.ops.callback import CheckFormat, Format, print_p
from minidiff.values.dtypes import PLAIN, is_differentiable
from minidiff.values.lists import select
from minidiff.values.settings import override

__all__ = ["debug_nans", "disable_jit", "print"]

FINITE, INFINITE, NAN = 0, 1, 2


class CheckFinite(Evaluate):
    """Apply operations to NumPy arrays, and check the results."""

    keeps_sources = True

    def __init__(self, inf: bool = True):
        super().__init__(None)
        self.inf = inf

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        if primitive.is_higher_order or any(isinstance(x, Tracer) for x in args):  # checked per operation
            return super().process(primitive, args, params)
        with numpy.errstate(all="ignore"):
            out = super().process(primitive, args, params)
        self.check(str(primitive), args, params, out)
        return out

    def apply_rule(self, rule: Callable, primitive: Primitive, *args: Any) -> Any:
        """Apply a rule of an operation, and check what it returns."""
        if primitive.is_higher_order:
            return rule(*args)
        with numpy.errstate(all="ignore"):
            out = rule(*args)
        self.check(f"the derivative of {getattr(primitive, 'of', primitive)}", args[:-1], args[-1], out)
        return out

    def watch_sweep(self, sweep: Any) -> None:
        """Check the factors that derivative rules compute in the forward sweep of `grad`."""
        process = sweep.process

        def checked(primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
            if primitive.is_higher_order:
                return process(primitive, args, params)
            before = len(sweep.below.equations)
            with numpy.errstate(all="ignore"):
                out = process(primitive, args, params)
            factors = [a for eqn in sweep.below.equations[before:] for a in eqn.inputs]
            self.check(f"the derivative of {primitive}", sweep.split(args)[0], params, factors)
            return out

        sweep.process = checked

    def check(self, name: str, args: Any, params: dict, out: Any) -> None:
        """Raise FloatingPointError if results are worse than operands and parameters."""
        worst = worst_finiteness(out)
        if worst and self.is_wrong(worst_finiteness((args, params)), worst):
            raise error_for(name, args, worst)

    def observe(self, name: str, out: Any) -> None:
        """See the results of an operation in the body of a `shard_map`, of all ranks in this process."""

    def is_wrong(self, of_operands: int, of_result: int) -> bool:
        """Return whether there is a new NaN, or an infinity from finite operands only."""
        return of_result > of_operands and (of_result == NAN or self.inf)


def from_environment() -> None:
    """Check the results of all threads' operations if `MINIDIFF_DEBUG_NANS` is set."""
    if BOTTOM is not EVALUATE:
        BOTTOM.__class__ = CheckFinite
        vars(BOTTOM)["inf"] = True
        numpy.seterr(divide="raise", over="raise", invalid="raise")


def worst_finiteness(x: Any) -> int:
    """Return the worst state of nested values: NAN, INFINITE or FINITE (also non-numbers)."""
    if isinstance(x, (list, tuple)):
        return max(map(worst_finiteness, x), default=FINITE)
    if isinstance(x, dict):
        return worst_finiteness([*x.values()])
    return int(finiteness(x).max(initial=FINITE)) if is_inexact(x) else FINITE


def is_inexact(x: Any) -> bool:
    """Return whether x is a number or an array that may hold a NaN."""
    return isinstance(x, (float, complex)) or (
        isinstance(x, (numpy.ndarray, numpy.generic)) and is_differentiable(x.dtype)
    )


def finiteness(x: Any) -> numpy.ndarray:
    """NAN, INFINITE or FINITE for each number."""
    return numpy.add(~numpy.isfinite(x), numpy.isnan(x), dtype=numpy.uint8)


def error_for(name: str, args: Any, worst: int, where: str = "") -> FloatingPointError:
    """Return the error for a new NaN or infinity: the operands, the line and the ranks."""
    source = current_location()
    result = "a NaN, and no operand has one" if worst == NAN else "an infinity, and all operands are finite"
    way = "backward" if source is not None and source.backward else "forward"
    return FloatingPointError(
        f"{name} of {' and '.join(_show_operands(args))} produced {result}: in the {way} pass"
        + (f" of {source}" if source is not None else "")
        + (f", on {where}" if where else "")
    )


def _show_operands(args: Any) -> list[str]:
    """Return the operands as errors show them, without types and missing ones."""
    if isinstance(args, (list, tuple)):
        return [text for x in args for text in _show_operands(x)]
    return [] if args is None or isinstance(args, ShapedArray) else [describe_operand(args)]


def print(fmt: str, *args: Any, ordered: bool = False, **kwargs: Any) -> None:
    """Print `fmt.format(*args, **kwargs)` when the program runs, with traced values.

    Python's `print` runs once, while a function is recorded, when a traced value has only a type. This print is an
    operation of the program. Under `jit` it prints in each call; in a loop, in each step; under `vmap`, once for each
    element; in the body of a `shard_map`, on each rank, after the rank's name. Prints appear in the order of the
    program (under MPI, in order for each rank), and none is dropped. Under differentiation it prints the primal values,
    once.

    Args:
        fmt: a format string of Python.
        args, kwargs: trees of arrays and other objects, such as text.
        ordered: ignored; it is there for programs of JAX.

    Raises:
        TypeError: for an argument that `fmt` does not use.
        IndexError, KeyError: for a missing argument.

    >>> from minidiff import jit
    >>> @jit
    ... def f(x):
    ...     print('x = {x:.2f}, {}', 2 * x, x=x)
    ...     return x
    >>> y = f(1.0)
    x = 1.00, 2.0
    """
    CheckFormat().vformat(fmt, args, kwargs)
    leaves, structure = tree.flatten((args, kwargs))
    leaves = list(map(unwrap_weak, leaves))
    printed = [isinstance(x, Tracer) or type(x) in PLAIN for x in leaves]
    fixed = tuple((i, x) for i, (x, is_printed) in enumerate(zip(leaves, printed)) if not is_printed)
    print_p.bind(*select(leaves, printed), format=Format(fmt, structure, fixed))


@contextmanager
def debug_nans(*, inf: bool = True) -> Iterator[None]:
    """`with debug_nans():` raise FloatingPointError where a NaN or infinity appears.

    An operation makes a NaN if its result has one and no operand does. It makes an infinity if the result has one and
    all operands are finite. A constant (the `-inf` of a mask, say) is therefore not an error. The error names the
    operation, its operands' types, the forward or backward pass, the line of the program, and in the body of a
    `shard_map` the ranks. NumPy functions on plain arrays raise NumPy's own error.

    Meanwhile operations are applied one by one, even those of compiled programs. It applies to the current thread; the
    environment variable `MINIDIFF_DEBUG_NANS=1` applies it to all threads.

    Args:
        inf: whether infinities are errors, too.

    Raises:
        RuntimeError: inside a function that is being transformed, since the outer interpreters are already running.

    >>> import numpy as np
    >>> from minidiff import grad
    >>> with debug_nans():
    ...     grad(np.sqrt)(0.0)
    Traceback (most recent call last):
    FloatingPointError: the derivative of sqrt of f64[] and f64[] produced an infinity, and all operands are finite: ...
    """
    if not isinstance(current_interpreter(), Evaluate):
        raise RuntimeError(
            "debug_nans was entered inside a function that is being transformed: put it around the outermost call, "
            "as in with md.debug_nans(): md.grad(f)(x)"
        )
    of_infinities: Any = {"divide": "raise", "over": "raise"} if inf else {}
    with running(CheckFinite(inf)), numpy.errstate(invalid="raise", **of_infinities):
        yield


#: Evaluates as `EVALUATE` does, in its place while `jit` is disabled. Compiled programs run under `EVALUATE` alone, so
#: their calls need not ask whether it is.
OP_BY_OP = Evaluate(None)


@contextmanager
def disable_jit(disable: bool = True) -> Iterator[None]:
    """`with disable_jit():` run functions that `jit` compiles op by op, in Python.

    A jitted function is then the function itself: `print` and a debugger see concrete values, and breakpoints are
    reached in each call. Loops and branches (`scan`, `while_loop`, `fori_loop`, `cond`), `checkpoint`, and the body of
    a `shard_map` run as plain Python, too, unless another transformation records them. (In a typed `shard_map` a step
    or a branch may run once more on abstract values, to find the types of results.) Under `grad` and `vmap`, values are
    traced as without `jit`. `make_tape` records the steps of a `scan` one by one. It applies to the current
    thread.

    Args:
        disable: False turns `jit` on again, in a block within such a block.

    >>> import builtins
    >>> from minidiff import jit, scan
    >>> import numpy as np
    >>> @jit
    ... def total(x):
    ...     return scan(lambda s, x: (s + x, builtins.print(s)), 0.0, x)[0]
    >>> with disable_jit():
    ...     y = total(np.array([1.0, 2.0]))
    0.0
    1.0
    """
    bottom = (EVALUATE, OP_BY_OP) if disable else (OP_BY_OP, EVALUATE)
    current = current_interpreter()
    with override(jit_is_disabled, disable), running(bottom[1] if current is bottom[0] else current):
        yield


finish_module(globals())
