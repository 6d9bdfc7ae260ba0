"""What helps to find mistakes: `debug_nans`, which finds the operation that makes a NaN or an infinity, and `print`.

While `debug_nans` is on, another interpreter is at the bottom of the stack: it evaluates as `Evaluate` does, and checks
each result. All that is there for speed (compiled programs, derivatives recorded whole) asks for `EVALUATE` itself, so
operations are applied one by one here, and when it is off it costs nothing.

Derivative rules compute with plain arrays where no transformation is around them. NumPy does that, not this
interpreter, so it checks what a rule returns. What the user's own NumPy makes, NumPy's `errstate` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy

from minidiff import core  # which imports this module, where the environment asks for it

FINITE, INFINITE, NAN = 0, 1, 2


class CheckFinite(core.Evaluate):
    """Operations are applied to NumPy arrays, and their results checked."""

    keeps_sources = True

    def __init__(self, inf: bool = True):
        super().__init__(None)
        self.inf = inf

    def process(self, primitive: core.Primitive, args: Sequence[core.Value], params: dict) -> core.Value:
        if primitive.is_higher_order or any(isinstance(x, core.Tracer) for x in args):  # those consist of operations
            return super().process(primitive, args, params)
        with numpy.errstate(all="ignore"):
            out = super().process(primitive, args, params)
        self.check(str(primitive), args, params, out)
        return out

    def watch(self, rule: Callable, primitive: core.Primitive, *args: Any) -> Any:
        """Apply a rule of an operation, and check what it returns."""
        if primitive.is_higher_order:
            return rule(*args)
        with numpy.errstate(all="ignore"):
            out = rule(*args)
        self.check(f"the derivative of {getattr(primitive, 'of', primitive)}", args[:-1], args[-1], out)
        return out

    def watch_sweep(self, sweep: Any) -> None:
        """Check what derivatives are recorded with: the factors that rules compute in the forward sweep of `grad`."""
        process = sweep.process

        def checked(primitive: core.Primitive, args: Sequence[core.Value], params: dict) -> core.Value:
            if primitive.is_higher_order:
                return process(primitive, args, params)
            before = len(sweep.equations)
            with numpy.errstate(all="ignore"):
                out = process(primitive, args, params)
            factors = [a for eqn in sweep.equations[before:] for a in eqn.inputs]
            self.check(f"the derivative of {primitive}", sweep.split(args)[0], params, factors)
            return out

        sweep.process = checked

    def check(self, name: str, args: Any, params: dict, out: Any) -> None:
        """Raise FloatingPointError where results are worse than operands and parameters."""
        made = worst(out)
        if made and self.is_wrong(worst((args, params)), made):
            raise error_for(name, args, made)

    def is_wrong(self, given: int, made: int) -> bool:
        """Whether there is a NaN where none was, or an infinity where all was finite."""
        return made > given and (made == NAN or self.inf)


def worst(x: Any) -> int:
    """The worst that values hold: NAN, INFINITE or FINITE. Whatever is not a number is finite."""
    if isinstance(x, (list, tuple)):
        return max(map(worst, x), default=FINITE)
    if isinstance(x, dict):
        return worst([*x.values()])
    return int(state(x).max(initial=FINITE)) if is_inexact(x) else FINITE


def is_inexact(x: Any) -> bool:
    """Whether x is a number or an array that may hold a NaN."""
    return isinstance(x, (float, complex)) or (
        isinstance(x, (numpy.ndarray, numpy.generic)) and core.is_differentiable(x.dtype)
    )


def state(x: Any) -> numpy.ndarray:
    """NAN, INFINITE or FINITE for each number."""
    return numpy.add(~numpy.isfinite(x), numpy.isnan(x), dtype=numpy.uint8)


def error_for(name: str, args: Any, made: int, where: str = "") -> FloatingPointError:
    """The error for an operation that made such a number: its operands, its line, and `where` it ran."""
    from minidiff.location import here

    source = here()
    what = "a NaN, and no operand has one" if made == NAN else "an infinity, and all operands are finite"
    way = "backward" if source is not None and source.backward else "forward"
    return FloatingPointError(
        f"{name} of {' and '.join(_shown(args))} made {what}: in the {way} pass"
        + (f" of {source}" if source is not None else "")
        + (f", on {where}" if where else "")
    )


def _shown(args: Any) -> list[str]:
    """The operands, as errors show them; those that are types alone, or missing, are left out."""
    if isinstance(args, (list, tuple)):
        return [text for x in args for text in _shown(x)]
    return [] if args is None or isinstance(args, core.ShapedArray) else [core.shown(args)]


def print(fmt: str, *args: Any, **kwargs: Any) -> None:
    """Print `fmt.format(*args, **kwargs)` when the program runs: traced arguments as their values.

    Python's `print` shows of a traced value what is known while a function is recorded; this is an operation of the
    program. Under `jit` it prints in each call; in a loop in each step; under `vmap` once for each element; in the body
    of a `shard_map` on each rank, after the rank's name. Prints come in the order of the program (under MPI, those of
    one rank do), and none is left out. Under derivatives the values are printed, once.

    Arguments are trees of arrays and of anything else, such as text. Raises TypeError for an argument that `fmt` does
    not use, IndexError or KeyError for one that is missing.

    >>> from minidiff import jit
    >>> @jit
    ... def f(x):
    ...     print('x = {x:.2f}, {}', 2 * x, x=x)
    ...     return x
    >>> y = f(1.0)
    x = 1.00, 2.0
    """
    from minidiff.ops.printing import debug_print  # above `core`, which may import this module

    debug_print(fmt, *args, **kwargs)


@contextmanager
def debug_nans(*, inf: bool = True) -> Iterator[None]:
    """`with debug_nans():` raise FloatingPointError at the operation that makes a NaN or an infinity.

    An operation makes a NaN if its result has one and no operand does, and an infinity if its operands are all finite:
    what enters as a constant (the `-inf` of a mask, say) is no error. `inf=False` leaves infinities alone. The error
    names the operation, its operands' types, whether it belongs to the forward or to the backward pass, the line of the
    program, and in the body of a `shard_map` the ranks. NumPy's own functions on plain arrays raise NumPy's error.

    Operations are applied one by one meanwhile, those of compiled programs too. It is on in the thread that enters it;
    the environment variable `MINIDIFF_DEBUG_NANS=1` turns it on in all. Raises RuntimeError inside a function that is
    being transformed: what surrounds that is running already.

    >>> import numpy as np
    >>> from minidiff import grad
    >>> with debug_nans():
    ...     grad(np.sqrt)(0.0)
    Traceback (most recent call last):
    FloatingPointError: the derivative of sqrt of f64[] and f64[] made an infinity, and all operands are finite: ...
    """
    if not isinstance(core.current_interpreter(), core.Evaluate):
        raise RuntimeError(
            "debug_nans was entered inside a function that is being transformed: write it around the outermost call, "
            "as in with md.debug_nans(): md.grad(f)(x)"
        )
    of_infinities = {"divide": "raise", "over": "raise"} if inf else {}
    with core.running(CheckFinite(inf)), numpy.errstate(invalid="raise", **of_infinities):
        yield
