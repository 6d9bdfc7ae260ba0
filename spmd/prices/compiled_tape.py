"""The tapes of programs: the one that `jit` compiles, and those of a `shard_map` on the data of one process."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy

from collectives.backends.base import Axes
from collectives.backends.one_rank import OneRank
from collectives.exact_sums import SimulatedRanks
from minidiff.api.recording import make_tape
from minidiff.compiler.jit import Jitted, Static, jit, records_programs
from minidiff.compiler.program import check_options
from minidiff.control_flow.bodies import Call
from minidiff.control_flow.loops import Scan
from minidiff.core.interpreter import EVALUATE, running, transforming
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Equation, Stage, Tape, evaluate_equation, read, with_equations
from minidiff.core.tracer import Tracer
from minidiff.core.types import ShapedArray, Var, operand_type, typeof
from minidiff.errors.tracebacks import hide_own_frames_of_lambda
from minidiff.values.settings import override
from spmd.mesh.mesh import Mesh
from spmd.shard_map.interpreter import SPMD, RankTracer, marks_of
from spmd.shard_map.lowering import Lowering, lower
from spmd.shard_map.operation import shard_map_p


def apply_to_tape(read: Callable[[Tape], Any], f: Callable | Tape, optimized: bool) -> Any:
    """Apply `read` to a tape, or to the tape of a function: return a function of its arguments (see `tape_of`)."""
    if isinstance(f, Tape):
        return read(f)
    return hide_own_frames_of_lambda(lambda *args: read(tape_of(f, optimized)(*args)))


def tape_of(f: Callable, optimized: bool = False) -> Callable[..., Tape]:
    """Return a function that returns the tape of the program that `f` runs.

    That of a jitted function is the one that it compiles, with its options. Any other function runs op by op, and the
    jitted ones that it calls as their programs; or with `optimized`, it is compiled.
    """
    if optimized or is_jitted(f):
        return rewritten(f)

    def record(*args: Any) -> Tape:
        with override(records_programs, True):
            return make_tape(f)(*args)

    return record


def is_jitted(f: Any) -> bool:
    """Return whether `f` is a jitted function, or one with bound arguments: a method, or a `functools.partial`."""
    return isinstance(_split_bound(f)[0], Jitted)


def has_kernels(f: Any) -> bool:
    """Return whether the loops of a program may be compiled to machine code: not those of `jit(f, kernels=False)`."""
    function = _split_bound(f)[0]
    return not isinstance(function, Jitted) or function.options.get("kernels", True)


def as_jitted(f: Callable, without: Sequence[str] = (), **settings: Any) -> tuple[Jitted, tuple, dict]:
    """Return `f` as a jitted function with these options and no donated arguments, and the arguments that it binds."""
    function, first, named = _split_bound(f)
    if not isinstance(function, Jitted):
        return jit(f, without=without, **settings), (), {}
    check_options(without, settings)
    options = {**function.options, **settings, "without": (*function.options["without"], *without)}
    return Jitted(function.f, function.static, options, Static()), first, named


def _split_bound(f: Any) -> tuple[Any, tuple, dict]:
    if isinstance(f, functools.partial):
        return f.func, f.args, f.keywords
    return (f.__func__, (f.__self__,), {}) if isinstance(f, types.MethodType) else (f, (), {})


def without_static(f: Callable, args: Sequence[Any]) -> list[Any]:
    """Drop static arguments, which are not on the tape, from the arguments of a function, or from a list like them."""
    fixed = f.static.among((*args,), {}, f.name) if isinstance(f, Jitted) else {}
    return [x for k, x in enumerate(args) if k not in fixed]


def rewritten(f: Callable, without: Sequence[str] = (), **settings: Any) -> Callable[..., Tape]:
    """Return a function that returns the tape that `jit` compiles for `f`: `rewritten(f)(*args)` is a Tape.

    A jitted function keeps its own options.

    Args:
        f: a function.
        without: names of rewrites to skip; `minidiff.compiler.program.rewrites()` has all names.
        settings: options of `jit`. `bucket_bytes` is the most that one all-reduce sums: by default a sixteenth of the
            gradients, from 256 KiB to 25 MiB.

    Raises:
        ValueError: for an unknown rewrite.
        TypeError: for an unknown setting.

    >>> import numpy as np
    >>> from collectives import psum
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> f = shard_map(lambda x: (psum(x, 'i'), psum(x * x, 'i')), mesh=mesh, in_specs=P('i'), out_specs=P())
    >>> print(rewritten(f)(np.arange(8.0)))
    lambda a:f64[8]:
      b:f64[2], c:f64[2] = shard_map(a, mesh=(i: 4), in_specs=(P('i'),), out_specs=(P(), P()))
        lambda d:f64[2]{i}:
          e:f64[2]{i} = multiply(d, d)
          f:f64[2], g:f64[2] = psum(d, e, 'i')
          return (f, g)
      return (b, c)
    >>> str(rewritten(f, without=("fuse psums",))(np.arange(8.0))).count("psum")
    2
    """
    jitted, first, named = as_jitted(f, without, **settings)
    return hide_own_frames_of_lambda(lambda *args: jitted.rewritten(*first, *args, **named))


def tapes_in(tape: Tape) -> Iterator[Tape]:
    """Yield a tape, and the bodies of its operations."""
    yield tape
    for eqn in tape.equations:
        for body in eqn.bodies:
            yield from tapes_in(body)


def meshes_of(tape: Tape) -> list[Mesh]:
    """Return the mesh of each shard_map on a tape."""
    return [eqn.params["mesh"] for t in tapes_in(tape) for eqn in t.equations if eqn.primitive is shard_map_p]


class RankOfMesh(OneRank, SimulatedRanks):
    """One rank of a mesh, for programs that are not run: with these coordinates, or with any."""

    name = "mpi"
    at_once = False

    def __init__(self, sizes: dict[str, int], coordinate: Callable[[int], int] | None = None):
        super().__init__(sizes)
        self.is_known = coordinate is not None
        self.coordinates = {a: coordinate(n) if coordinate else 0 for a, n in sizes.items()}

    def moves_nothing(self, primitive: Primitive, x: Any, varying: Axes, params: Mapping[str, Any]) -> bool:
        return primitive.is_view


def lower_body(params: dict, ranks: SimulatedRanks | None = None) -> Tape | None:
    """Return the compiled tape of a `shard_map` on the data of these ranks, or of any one; None if it runs op by op."""
    varying = [spec.split_axes for spec in params["in_specs"]]
    return _lower_on_ranks(params, params["body"], varying, ranks or RankOfMesh(params["mesh"].shape))


def lower_nested_bodies(params: dict, tape: Tape) -> Tape:
    """Compile the bodies of the operations on a tape in a `shard_map` that runs op by op, such as a loop's step."""
    rank = RankOfMesh(params["mesh"].shape)

    def compiled(body: Any) -> Any:
        if not isinstance(body, Tape):
            return body
        varying = [t.states.varying_or_unreduced for t in body.in_types]
        return _lower_on_ranks(params, body, varying, rank) or lower_nested_bodies(params, body)

    equations = [
        Equation(eqn.primitive, eqn.inputs, {k: compiled(x) for k, x in eqn.params.items()}, eqn.outputs, eqn.source)
        for eqn in tape.equations
    ]
    return with_equations(tape, equations)


def _lower_on_ranks(params: dict, body: Tape, varying: Sequence, ranks: SimulatedRanks) -> Tape | None:
    """Compile a body in a `shard_map` whose inputs vary along these axes; return None if it runs op by op."""
    interpreter = SPMD(Mesh(ranks.sizes, ranks), params["check_rep"], explicit=not params["auto_pbroadcast"])
    axes = map(ranks.sort_axes, varying)
    operands = [(ShapedArray(ranks.data_shape(t.shape, a), t.dtype), a) for t, a in zip(body.in_types, axes)]
    return (lower(interpreter, body, operands, [marks_of(t.states) for t in body.in_types], {}) or [None])[0]


program_p = Call("program")


class OpByOp(Lowering):
    """Records the operations of a body on the data of the ranks in this process, with loops of any length.

    The indices of simulated ranks are known, and so are integers computed from them: the branches that ranks take.
    """

    unrolled = math.inf
    compiled = False  # whether the step of a loop is a program

    def axis_index(self, axes: Axes) -> tuple[Any, Axes]:
        is_known = getattr(self.mesh.ranks, "is_known", True)
        return self.mesh.ranks.axis_index(axes) if is_known else super().axis_index(axes)

    def process(self, primitive: Primitive, args: Sequence[Any], params: dict) -> Any:
        if isinstance(primitive, Scan):
            if self.compiled:
                params = {**params, "body": self.step_of(params["body"], params["length"])}
            with running(self):
                return primitive.evaluate(args, params)
        recorder, data = self.base, [self.operand(x)[0] for x in args]
        runs_here = not primitive.is_higher_order and (self.mesh.backend == "simulated" or not primitive.on_ranks)
        known = [not isinstance(x, Tracer) and typeof(x).dtype.kind in "biu" for x in data]
        if data and runs_here and all(known):
            self.base = EVALUATE
        try:
            return super().process(primitive, args, params)
        finally:
            self.base = recorder

    def step_of(self, body: Tape, runs: int) -> Any:
        """Return the step of a loop as one operation, whose body is its compiled program."""
        stage: Any = self.base
        cache: dict[tuple, Any] = {}

        def step(*values: Any) -> list:
            operands, states = [self.operand(x) for x in values], [getattr(x, "marked", None) for x in values]
            key = tuple((typeof(x), varying, s) for (x, varying), s in zip(operands, states))
            if key not in cache:
                cache[key] = lower(self, body, operands, states, {})
            if cache[key] is None:
                return body.apply(*values)
            program, places = cache[key]
            results = stage.record(program_p, [x for x, _ in operands], {"body": program, "runs": runs})
            return [RankTracer(self, x, *place) for x, place in zip(results, places)]

        step.out_types = body.out_types  # type: ignore[attr-defined]
        return step

    def communicate(self, primitive: Any, operands: Sequence[tuple], params: dict) -> Sequence[tuple]:
        kind = SPMD if self.base is EVALUATE else Lowering
        return kind.communicate(self, primitive, operands, params)


def record_op_by_op(eqn: Equation, ranks: SimulatedRanks, frees: Mapping[int, list], compiled_steps: bool) -> Tape:
    """Record the operations of a `shard_map` on the data of this process, as they run one by one.

    `frees` has the values of the body that Python frees after each of its equations.
    """
    params, body, stage = eqn.params, eqn.params["body"], Stage(None)
    stage.monitor.eager = True
    inside = OpByOp(Mesh(ranks.sizes, ranks), params["check_rep"], base=stage)
    inside.compiled = compiled_steps
    with transforming(inside), transforming(stage), running(inside):
        env: dict[Var, Any] = {}
        data: Any
        for v, a, spec in zip(body.inputs, eqn.inputs, params["in_specs"]):
            t = operand_type(a)
            if t.sharding is None:
                x: Any = stage.new_input(t)
                is_table = isinstance(a, numpy.ndarray) and a.dtype.kind in "biu" and spec.is_trivial
                with running(stage):
                    data, varying = ranks.place(a if is_table else x, spec.dims(t.ndim))
            else:
                varying = ranks.sort_axes(spec.split_axes)
                data = stage.new_input(ShapedArray(ranks.data_shape(v.type.shape, varying), t.dtype))
            env[v] = RankTracer(inside, data, varying, marks_of(v.type.states))
        for k, equation in enumerate(body.equations):
            evaluate_equation(equation, env)
            for v in frees[k]:
                del env[v]
        outs = [inside.operand(read(env, a)) for a in body.outputs]
        axes = [ranks.sort_axes(spec.split_axes) for spec in params["out_specs"]]
        with running(stage):
            return stage.tape([ranks.reshard_data(*out, to) for out, to in zip(outs, axes)])
