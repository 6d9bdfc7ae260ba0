"""Mixed precision: compute in 16 bits, keep parameters in 32, and scale the loss.

A `Policy` says which dtypes a function computes in. Parameters (the master weights) stay in float32, so that rounding
does not lose small updates. They are converted where they are used. bfloat16 has the range of float32. The range of
float16 is small: gradients below 6e-8 become 0. A `LossScale` prevents this. It multiplies the loss, and so all
gradients, by a large number, and divides the gradients by it when they are float32 again. It finds the largest number
that does not overflow: the number grows from time to time, and halves whenever a gradient is not finite. All ranks then
skip that step.

>>> import minidiff as md
>>> def loss(w, x):
...     return ((w * x) ** 2).mean()
>>> w, x = numpy.float32([1.0, 2.0]), numpy.full((8, 2), 1e-4, numpy.float32)
>>> half = Policy('float16')
>>> print(md.grad(half.apply(loss))(w, x))
[0. 0.]
>>> loss_scale = LossScale(2.0**15)
>>> value, gradients = loss_scale.value_and_grad(half.apply(loss))(w, x)
>>> print(numpy.round(1e8 * gradients, 2), numpy.round(1e8 * md.grad(loss)(w, x), 2))
[1. 2.] [1. 2.]

A policy also chooses the dtype in which ranks sum gradients. In the body of a `shard_map`, the psum of a weight's
gradient is the transpose of the weight's `pbroadcast`, and has its dtype. With `reductions='float32'` the weight is
converted to the compute dtype after the pbroadcast; with `reductions='bfloat16'` before it, so half of the bytes are
sent.

Parts of a network that lose too much in 16 bits ask the policy for a dtype of their own, with `cast_for`: a router, or
the residual stream. `ranges` says which lines of a program overflow or underflow in a dtype.

Where memory is short, `with_masters` keeps the parameters in 16 bits, and the master weights in the optimizer's state.

Source: Micikevicius et al., "Mixed precision training", 2018; the names are those of DeepMind's `jmp`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.api.derivatives import value_and_grad, vjp
from minidiff.api.recording import stage_flat
from minidiff.compiler.jit import jit
from minidiff.compiler.simplify import rewrite_bodies
from minidiff.core.interpreter import Evaluate, current_interpreter, current_scope, running
from minidiff.core.ranks import vary_along
from minidiff.core.tape import Equation, Tape, with_equations
from minidiff.core.tracer import Tracer, Value, states_of
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.debug import CheckFinite, is_inexact
from minidiff.errors.location import current_location
from minidiff.errors.other_libraries import finish_module
from minidiff.ops.base import convert
from minidiff.ops.einsum import einsum_p
from minidiff.ops.elementwise import maximum, minimum, where
from minidiff.ops.linalg import matmul_p
from minidiff.ops.shape import reshape_p
from minidiff.optim import GradientTransformation, apply_updates
from minidiff.values.dtypes import accumulator_dtype, check_real_float, dtype_name, finfo, is_real_float, limits_of
from minidiff.values.settings import override, setting

__all__ = [
    "LossScale", "MasterState", "Policy", "Ranges", "all_finite", "cast_for", "ranges", "select", "widen",
    "with_masters",
]  # fmt: skip

# ---------------------------------------------------------------- policies


@dataclass(repr=False, eq=False)
class Policy:
    """The dtypes of a function's computation, its parameters, its sums over ranks, and its results.

    Dtypes are as in NumPy, or names: `'bfloat16'` needs the package ml_dtypes. Complex numbers and integers are not
    converted. `Policy('tf32')` computes in float32, and rounds the operands of matrix products to 11 significant bits,
    forward and backward, as NVIDIA's matrix units do.

    Args:
        compute: the dtype to compute in.
        params: the dtype of parameters; None is `compute`, or float32 if that has 16 bits.
        reductions: the dtype of sums over ranks; None is as for `params`.
        output: the dtype of results; None is as for `params`.
        router: the dtype of routers, for `cast_for`; None is that of the values.
        residual: the dtype of the residual stream, for `cast_for`; None is that of the values.

    Raises:
        TypeError: for a dtype that is not real and floating-point.

    >>> policy = Policy('float16')
    >>> policy
    Policy(compute=f16, params=f32, reductions=f32, output=f32)
    >>> policy.cast_to_compute({'w': numpy.ones(2), 'n': 3})
    {'n': 3, 'w': array([1., 1.], dtype=float16)}
    """

    compute: Any
    params: Any = None
    reductions: Any = None
    output: Any = None
    _: KW_ONLY
    router: Any = None
    residual: Any = None

    def __post_init__(self) -> None:
        tf32 = isinstance(self.compute, str) and self.compute == "tf32"
        self.compute = check_real_float("Policy: compute must be a dtype", "float32" if tf32 else self.compute)
        defaults = dict.fromkeys(("params", "reductions", "output"), accumulator_dtype(self.compute))
        for name, chosen in vars(self).items():
            dtype = defaults.get(name) if chosen is None else chosen
            vars(self)[name] = None if dtype is None else check_real_float(f"Policy: {name} must be a dtype", dtype)
        self.tf32 = tf32

    def cast_to_compute(self, values: Any) -> Any:
        """Convert the floating-point leaves of a tree to the dtype to compute in."""
        return _cast(values, self.compute)

    def cast_to_params(self, values: Any) -> Any:
        """Convert the floating-point leaves of a tree to the dtype of parameters."""
        return _cast(values, self.params)

    def cast_to_output(self, values: Any) -> Any:
        """Convert the floating-point leaves of a tree to the dtype of results."""
        return _cast(values, self.output)

    def apply(self, f: Callable) -> Callable:
        """Make `f` compute under the policy: convert its arguments and its results.

        In 16 bits `f` is always traced, even on plain arrays, since NumPy's sums of bfloat16 would round at each step.
        For 'tf32' it is recorded, as by `jit`, and products on its tape are rounded.

        Args:
            f: a function of trees of arrays.

        Returns:
            A function like f.

        >>> import minidiff as md
        >>> md.make_tape(Policy('float16').apply(lambda x: x.sum()))(numpy.ones(3, numpy.float32))
        lambda a:f32[3]:
          b:f16[3] = convert(a, dtype=f16)
          c:f16[] = sum(b, axes=(0,))
          d:f32[] = convert(c, dtype=f32)
          return d
        """

        @functools.wraps(f)
        def run(*args: Any, **kwargs: Any) -> Any:
            def compute(args: Any, kwargs: Any) -> Any:
                with self.in_force():
                    return self.cast_to_output(f(*self.cast_to_compute(args), **self.cast_to_compute(kwargs)))

            args, kwargs = _vary_alike(_cast((args, kwargs), self.reductions))
            if self.tf32:
                tape, _, structure = stage_flat(lambda both: compute(*both), ((args, kwargs),), "Policy.apply")
                return tree.unflatten(structure, _round_products(tape).apply(*tree.leaves((args, kwargs))))
            plain = not all(isinstance(x, Tracer) for x in tree.leaves((args, kwargs)))
            return vjp(compute, args, kwargs)[0] if plain and self.compute.itemsize == 2 else compute(args, kwargs)

        return run

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """`with policy.in_force():` let `cast_for` follow the policy, as in a function to which it is applied."""
        with override(_in_force, self):
            yield

    def __repr__(self) -> str:
        dtypes = {name: dtype_name(dtype) for name, dtype in vars(self).items() if isinstance(dtype, numpy.dtype)}
        dtypes["compute"] = "tf32" if self.tf32 else dtypes["compute"]
        return f"Policy({', '.join(f'{name}={dtype}' for name, dtype in dtypes.items())})"


_in_force: ContextVar[Policy | None] = setting("policy", None)


def cast_for(part: str, values: Any) -> Any:
    """Convert the floating-point leaves of a tree as the policy of the running function says for a part of a network.

    Without a policy, or if the policy names no dtype for the part, the values stay unchanged. The layers of
    `spmd.parallel` ask for these.

    Args:
        part: 'router', 'residual' or 'compute'.
        values: a tree of arrays.

    Returns:
        A tree like `values`.

    Raises:
        ValueError: for another part.

    >>> policy = Policy('float16', residual='float32')
    >>> policy.apply(lambda x: [str(cast_for(part, x).dtype) for part in ('residual', 'router')] and x)(numpy.ones(2))
    array([1., 1.], dtype=float32)

    Source: Fedus, Zoph and Shazeer, "Switch transformers", section 2.4, selective precision.
    """
    if part not in ("router", "residual", "compute"):
        raise ValueError(f"cast_for: the part must be 'router', 'residual' or 'compute', got {part!r}")
    dtype = vars(_in_force.get() or object).get(part)
    return values if dtype is None else _cast(values, dtype)


def widen(values: Any) -> Any:
    """Convert 16-bit floats in a tree to float32, so that they do not overflow or lose digits; leave other leaves.

    Args:
        values: a tree of arrays.

    Returns:
        A tree like `values`.

    >>> widen(numpy.ones(2, numpy.float16)).dtype, widen(numpy.ones(2)).dtype
    (dtype('float32'), dtype('float64'))
    """
    return tree.map(lambda x: convert(x, accumulator_dtype(typeof(x).dtype)), values)


def _cast(values: Any, dtype: numpy.dtype) -> Any:
    return tree.map(lambda x: convert(x, dtype) if is_real_float(typeof(x).dtype) else x, values)


def _round_products(tape: Tape) -> Tape:
    """Let the matrix products of float32 operands on a tape, and in its bodies, round these operands as TF32."""
    equations: list[Equation] = []
    for eqn in rewrite_bodies(tape, lambda _, body: _round_products(body)).equations:
        if eqn.primitive in (matmul_p, einsum_p) and all(typeof(x).dtype == numpy.float32 for x in eqn.inputs):
            inputs, params = list(eqn.inputs), {**eqn.params, "precision": "tf32"}
            if eqn.primitive is matmul_p:
                types, outs = [*map(typeof, inputs)], [v.type for v in eqn.outputs]
                labels = matmul_p.sharding(types, outs, {})
                for k, (t, dims) in enumerate(zip(types, labels.operands)):
                    if None in dims:  # sizes of 1, which broadcast
                        shape = tuple(n for n, label in zip(t.shape, dims) if label is not None)
                        inputs[k] = Var(ShapedArray(shape, t.dtype, t.states))
                        equations.append(Equation(reshape_p, [eqn.inputs[k]], {"shape": shape}, [inputs[k]]))
                letters: dict[Any, str] = {"row": "R", "sum": "S", "column": "C", None: ""}
                letters |= dict(enumerate("abcdefghijklmnopq"))
                left, right, out = ("".join(letters[d] for d in dims) for dims in (*labels.operands, *labels.results))
                params["subscripts"] = f"{left},{right}->{out}"
            eqn = Equation(einsum_p, inputs, params, eqn.outputs, eqn.source)
        equations.append(eqn)
    return with_equations(tape, equations)


def _vary_alike(values: Any) -> Any:
    """Cast, in a `shard_map` body, all floating-point leaves to vary along the axes along which one does."""
    if current_scope() is None:
        return values
    axes = frozenset().union(*[states_of(x).varying for x in tree.leaves(values)])
    return tree.map(lambda x: vary_along(x, axes) if is_real_float(typeof(x).dtype) else x, values)


# ---------------------------------------------------------------- master weights


class MasterState(NamedTuple):
    """The state of `with_masters`: the master weights, and the state of the optimizer that updates these.

    >>> with_masters(GradientTransformation(lambda params: (), None)).init(numpy.ones(2, numpy.float16))
    MasterState(masters=array([1., 1.], dtype=float32), state=())
    """

    masters: Any
    state: Any


def with_masters(optimizer: GradientTransformation) -> GradientTransformation:
    """Let an optimizer update float32 copies of 16-bit parameters, the master weights.

    Parameters and gradients then have 16 bits, and small updates are not lost, since the state adds them up. A
    parameter takes 2 bytes, its gradient 2, and the state with Adam 12: the master weight and two averages.

    Args:
        optimizer: the optimizer of the master weights.

    Returns:
        A `GradientTransformation`. Its `init` also takes the float32 parameters that were rounded. Its updates turn
        parameters into rounded master weights.

    Raises:
        ValueError: by `update`, without the parameters.

    >>> import minidiff as md
    >>> w, tenth = numpy.ones(2, numpy.float16), numpy.full(2, 1e-4, numpy.float16)
    >>> for optimizer in (md.optim.sgd(1.0), with_masters(md.optim.sgd(1.0))):
    ...     params, state = w, optimizer.init(w)
    ...     for _ in range(10):
    ...         updates, state = optimizer.update(tenth, state, params)
    ...         params = md.optim.apply_updates(params, updates)
    ...     print(params)
    [1. 1.]
    [0.999 0.999]

    Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", section 3.1.
    """

    def init(params: Any) -> MasterState:
        masters = widen(params)
        return MasterState(masters, optimizer.init(masters))

    def update(gradients: Any, state: MasterState, params: Any = None, **extra: Any) -> tuple[Any, MasterState]:
        if params is None:
            raise ValueError("update: with_masters needs the parameters: pass update(gradients, state, params)")
        updates, inner = optimizer.update(widen(gradients), state.state, state.masters, **extra)
        masters = apply_updates(state.masters, updates)
        changes = tree.map(lambda m, p: m - convert(p, typeof(m).dtype), masters, params)
        return changes, MasterState(masters, inner)

    return GradientTransformation(init, update)


# ---------------------------------------------------------------- loss scaling


class _Scale(NamedTuple):
    """The fields of a `LossScale`: a named tuple cannot check its own."""

    scale: Value = numpy.float32(2.0**15)
    good_steps: Value = numpy.int64(0)
    period: Value = numpy.int64(1000)
    factor: Value = numpy.float32(2.0)


class LossScale(_Scale):
    """A number that multiplies the loss, and adapts (dynamic loss scaling).

    After `period` steps with finite gradients, `scale` is multiplied by `factor`, up to the largest number of its
    dtype. When gradients are not finite, `scale` is divided by `factor`, down to 1. It is a tree of numbers, to pass to
    `jit` and to save with a run. The overflow is expected; silence NumPy's warning with `numpy.errstate(all='ignore')`.

    Args:
        scale: the number.
        good_steps: the number of steps with finite gradients since the scale last changed.
        period: the number of such steps after which it grows, at least 1.
        factor: the factor by which it changes, at least 1.

    Raises:
        ValueError: for a scale that is not positive and finite, and for a period or a factor below 1.

    >>> scale = LossScale(8.0, period=2)
    >>> for finite in (True, True, False):
    ...     scale = scale.adjust(finite)
    ...     print(scale.scale)
    8.0
    16.0
    8.0
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> LossScale:
        scale = super().__new__(cls, *args, **kwargs)
        _check_number("scale is a positive number, such as 2.0**15", scale.scale, lambda x: x > 0)
        _check_number("period is a number of steps, 1 or more", scale.period, lambda x: x >= 1)
        _check_number("factor is 1 or more", scale.factor, lambda x: x >= 1)
        integer = isinstance(scale.scale, (int, numpy.integer))
        return scale._replace(scale=numpy.float32(scale.scale)) if integer else scale

    def value_and_grad(self, f: Callable) -> Callable:
        """`value_and_grad` of `f` in its first argument, the parameters, without underflow in between.

        Args:
            f: a function of the parameters, a tree, and other arguments; it returns a number.

        Returns:
            A function with the arguments of f that returns the pair of its value and gradients.
        """

        def scaled(params: Any, *args: Any) -> Value:
            value = f(params, *args)
            return value * convert(self.scale, typeof(value).dtype)

        def run(params: Any, *args: Any) -> tuple[Value, Any]:
            value, gradients = value_and_grad(scaled)(params, *args)
            return self.unscale(value), self.unscale(gradients)

        return run

    def unscale(self, values: Any) -> Any:
        """Divide a tree of gradients by the scale."""
        return tree.map(lambda g: g * convert(1 / self.scale, typeof(g).dtype), values)

    def adjust(self, finite: Value) -> LossScale:
        """Return the scale for the next step, given whether the gradients of this one were finite.

        Args:
            finite: whether all gradients were finite, as `all_finite` returns it.

        Returns:
            A `LossScale`.
        """
        good = where(finite, self.good_steps + 1, 0)
        grows = good >= self.period
        dtype = typeof(self.scale).dtype
        largest = dtype.type(finfo(dtype).max)
        now = minimum(self.scale, largest)  # so that it comes back from infinity
        larger = minimum(now, largest / self.factor) * self.factor
        scale = where(finite, where(grows, larger, now), maximum(now / self.factor, 1))
        return self._replace(scale=convert(scale, dtype), good_steps=where(grows, 0, good))


def _check_number(expected: str, x: Any, is_right: Callable[[Any], Any]) -> None:
    """Raise ValueError for a number that is not real, finite and right; a traced one has no value yet."""
    plain = isinstance(x, (int, float, complex, numpy.generic, numpy.ndarray))
    if plain and (numpy.iscomplexobj(x) or not (numpy.isfinite(x) & is_right(x)).all()):
        raise ValueError(f"LossScale: {expected}, got {x}")


@jit  # so that sums over ranks are fused
def _count_not_finite(values: Any) -> Value:
    dtype = numpy.float32  # as in `global_norm`: the two psums are fused in a compiled step
    return sum(numpy.sum(~numpy.isfinite(x), dtype=dtype) for x in tree.leaves(values))


def all_finite(values: Any) -> Value:
    """Return whether all numbers in a tree of arrays are finite.

    For sharded arrays it communicates a psum of one number, as `global_norm` does, and all ranks get the same result.
    In the body of a `shard_map` the result is for this rank's values. Gradients of invariant parameters are the same on
    all ranks; for others write `pmin(all_finite(gradients), axis_name)`.

    Args:
        values: a tree of arrays.

    Returns:
        A boolean.

    >>> bool(all_finite({'w': numpy.array([1.0, numpy.inf])}))
    False
    """
    return _count_not_finite(values) == 0


def select(condition: Value, on_true: Any, on_false: Any) -> Any:
    """Choose between two trees, leaf by leaf, to skip a step.

    Args:
        condition: a boolean, which may be traced.
        on_true: the tree of the result where the condition is True.
        on_false: a tree like it, of the result where the condition is False.

    Returns:
        A tree like both.

    >>> select(False, {'w': 1.0}, {'w': 2.0})
    {'w': np.float64(2.0)}
    """
    return tree.map(lambda x, y: where(condition, x, y), on_true, on_false)


# ---------------------------------------------------------------- ranges


class Range(NamedTuple):
    """A row of `Ranges`."""

    source: str
    operation: str
    numbers: int
    largest: float
    overflow: float
    underflow: float


class Ranges(tuple[Range, ...]):
    """A report of `ranges`, which prints as a table: a row for each operation of each line, in the program's order.

    A row has the `source` line, the `operation`, how many `numbers` it made, the `largest` of these, and the shares
    of them that would become infinite (`overflow`) or 0 (`underflow`) in the dtype.

    >>> import minidiff as md
    >>> [row.overflow for row in ranges(lambda x: x * 1e5)(numpy.array([0.5, 1.0]))]
    [0.5]
    """

    def __repr__(self) -> str:
        rows = [
            f"{r.overflow:8.1%}  {r.underflow:9.1%}  {r.largest:7.0e}  {r.operation:<12}  {r.source}".rstrip()
            for r in self
        ]
        return "\n".join(["overflow  underflow  largest  operation     line", *rows])


def ranges(f: Callable, dtype: Any = "float16") -> Callable[..., Ranges]:
    """Return a function that runs `f` in the dtypes of its arguments, and says what would not fit in `dtype`.

    It records `f`, and runs the tape. Of the numbers that each operation of each line makes, it reports the share that
    are larger than the largest of the dtype, and that of those which the dtype would round to 0. A program on MPI ranks
    reports this rank's numbers.

    Args:
        f: a function of trees of arrays; for the backward pass, `md.grad(f)`.
        dtype: a dtype of real floating-point numbers; it may be one of `ml_dtypes`, by name.

    Returns:
        A function with the arguments of f that returns `Ranges`.

    Raises:
        RuntimeError: by the function, within one that is being transformed.

    >>> def loss(w, x):
    ...     hidden = x @ w
    ...     return (hidden ** 4).sum()
    >>> ranges(loss)(numpy.array([1.0, 20.0]), numpy.array([[1e-3, 0.0], [0.0, 1.0]]))
    overflow  underflow  largest  operation     line
        0.0%       0.0%    2e+01  matmul        line 2: hidden = x @ w
       50.0%      50.0%    2e+05  power         line 3: return (hidden ** 4).sum()
      100.0%       0.0%    2e+05  sum           line 3: return (hidden ** 4).sum()
    """
    limits = limits_of(dtype)
    largest, smallest = float(limits.max), float(limits.smallest_subnormal)

    class Count(CheckFinite):
        """An interpreter that counts numbers that do not fit, where `CheckFinite` looks for NaNs."""

        def check(self, name: str, args: Any, params: dict, out: Any) -> None:
            self.observe(name, out)

        def is_wrong(self, of_operands: int, of_result: int) -> bool:
            return False

        def observe(self, name: str, out: Any) -> None:
            source = current_location()
            line = f"{source or ''}" + " (backward)" * (source is not None and source.backward)
            for x in filter(is_inexact, out if isinstance(out, (list, tuple)) else [out]):
                size, row = abs(numpy.asarray(x)).astype(float).ravel(), counts.setdefault((line, name), [0, 0.0, 0, 0])
                row[0] += size.size
                row[1] = max(row[1], size.max(initial=0, where=size == size))
                row[2] += int((size > largest).sum())
                row[3] += int(((size > 0) & (size <= smallest / 2)).sum())

    counts: dict[tuple[str, str], list] = {}

    @functools.wraps(f)
    def report(*args: Any) -> Ranges:
        if not isinstance(current_interpreter(), Evaluate):
            raise RuntimeError("ranges must be the outermost transformation: write ranges(md.grad(f))(x)")
        counts.clear()
        tape, _, _ = stage_flat(f, args, "ranges")
        with running(Count()), numpy.errstate(all="ignore"):
            tape(*tree.leaves(args))
        rows = [(*key, n, float(size), over / n, under / n) for key, (n, size, over, under) in counts.items() if n]
        return Ranges(Range(*row) for row in rows)

    return report


finish_module(globals())
