"""Count the all-reduces of gradients: `python -m tests.benchmarks.all_reduces [--programs N]`.

For the JEP's examples, each network of `spmd.parallel` (with the layers of the tutorial's network, too) and random
programs: how often the gradient runs a psum, operation by operation ("eager") and as `jit` compiles it, with types and
without (`check_rep=False`). Where JAX is installed, its column has the psums of JAX's own trace of the same source:
the names that a program's module has imported stand for JAX's functions meanwhile. "-" is what JAX does not
differentiate or does not have, and programs with an operation of this library's own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy

import minidiff as md
import spmd
from spmd import P, PartitionSpec
from tests.programs import networks
from tests.programs.jep_examples import EXAMPLES
from tests.programs.rank import random_program

from . import libraries, measure

RANKS = 8
TUTORIAL_SIZES, TUTORIAL_BATCH = (784, 128, 128, 128, 128, 128, 8), 32
#: What is counted of a program, in the order of the columns.
COLUMNS = ("eager", "compiled", "untyped eager", "untyped compiled", "JAX")

COLLECTIVES = ("psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute")
COLLECTIVES += ("axis_index", "axis_size")

#: From a mesh and the options of `shard_map` to a function of arrays.
Build = Callable[..., Callable]


def programs() -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], Build, tuple]]:
    """Name, shape and axes of the mesh, how the function is built, and its arguments."""
    for name, example in EXAMPLES.items():
        yield f"JEP {name}", (RANKS,), ("i",), functools.partial(_jep, example), tuple(example.arguments(RANKS))
    for title, sizes, batch in (
        ("", networks.SIZES, networks.EXAMPLES),
        (", as in the tutorial", TUTORIAL_SIZES, TUTORIAL_BATCH),
    ):
        params, arrays = networks.example(sizes=sizes, examples=batch)
        for name, shape in networks.cases(RANKS):
            if name == "pipeline_parallel" and title:
                shape = (2,)  # which divides the number of its inner layers
            network = networks.PARALLELISMS[name]
            yield name + title, shape, network.axes, network.loss, (network.arranged(params), arrays)
    for attend in (spmd.parallel.ring_attention, spmd.parallel.attention_by_heads):
        qkv = tuple(numpy.random.default_rng(0).normal(size=(3, RANKS, RANKS, 2)))
        yield attend.__name__, (RANKS,), ("i",), functools.partial(_attention, attend), qkv
    rng = numpy.random.default_rng(0)
    experts = rng.normal(size=(RANKS, 3, 3)), rng.normal(size=(RANKS, 3))
    router, tokens = rng.normal(size=(3, RANKS)), rng.normal(size=(2 * RANKS, 3))
    yield "mixture_of_experts", (RANKS,), ("i",), _experts, (experts, router, tokens)
    layer = rng.normal(size=(4, RANKS)), rng.normal(size=RANKS), rng.normal(size=(RANKS, 4)), rng.normal(size=4)
    yield "column_parallel, row_parallel", (RANKS,), ("i",), _two_layers, (rng.normal(size=(3, 4)), *layer)


def _jep(example: Any, mesh: Any, **options: Any) -> Callable:
    return _mapped(example.body, mesh, example.in_specs, example.out_specs, **options)


def _attention(attend: Callable, mesh: Any, **options: Any) -> Callable:
    return _mapped(functools.partial(attend, axis="i"), mesh, P("i"), P("i"), **options)


def _experts(mesh: Any, **options: Any) -> Callable:
    def body(params, router, x):
        expert = lambda w, x: x @ w[0] + w[1]  # noqa: E731
        return spmd.parallel.mixture_of_experts(expert, params, router, x, capacity=2, axis="i")

    return _mapped(body, mesh, (P("i"), P(), P("i")), P("i"), **options)


def _two_layers(mesh: Any, **options: Any) -> Callable:
    def body(x, W, b, V, c):
        hidden = spmd.parallel.column_parallel(x, W, b)
        return spmd.parallel.row_parallel(hidden**2, V, c, "i")

    return _mapped(body, mesh, (P(), P(None, "i"), P("i"), P("i"), P()), P(), **options)


def _mapped(body: Callable, mesh: Any, in_specs: Any, out_specs: Any, **options: Any) -> Callable:
    return spmd.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


# ---------------------------------------------------------------- counting


def counted(shape: tuple[int, ...], axes: tuple[str, ...], build: Build, args: tuple) -> list[int | None]:
    """Return the number of psums that the gradient in all arguments runs, for each of `COLUMNS`."""
    mesh = spmd.make_mesh(shape, axes, backend="simulated")
    cotangent = numpy.ones(md.typeof(build(mesh)(*args)).shape)
    counts: list[int | None] = []
    for options in ({}, {"check_rep": False}):
        f = build(mesh, **options)
        gradient = lambda *xs, f=f: md.vjp(f, *xs)[1](cotangent)  # noqa: E731
        reports = spmd.communication(gradient)(*args), spmd.communication(spmd.rewritten(gradient)(*args))
        counts += [report.counts.get("psum", 0) for report in reports]
    return [*counts, jax_psums(shape, axes, build, args, cotangent)]


def jax_psums(
    shape: tuple[int, ...], axes: tuple[str, ...], build: Build, args: tuple, cotangent: numpy.ndarray
) -> int | None:
    """Return the number of psums in JAX's trace of the gradient; None without JAX, or where it cannot differentiate."""
    jax = libraries.jax(RANKS)
    if jax is None:
        return None
    mesh = jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    with as_jax() as names, contextlib.suppress(NotImplementedError, TypeError):
        # The default of a parameter was bound when its module was imported.
        again = {"checkpoint": names["gathering_again"]} if "checkpoint" in inspect.signature(build).parameters else {}
        f = build(mesh, **again)
        jaxpr = jax.make_jaxpr(lambda *xs: jax.vjp(f, *xs)[1](cotangent))(*args).jaxpr
        return libraries.in_jaxpr(jaxpr, _psum).total()
    return None


def _psum(eqn: Any) -> str | None:
    return "psum" if eqn.primitive.name in ("psum", "psum2", "psum_invariant") and eqn.params["axes"] else None


@contextlib.contextmanager
def as_jax() -> Iterator[dict[str, Any]]:
    """Programs run on JAX: in the modules that they are written in, imported names stand for JAX's."""
    names = _jax_names()
    submodules = [f"spmd.parallel.{info.name}" for info in pkgutil.iter_modules(spmd.parallel.__path__)]
    modules = ["tests.programs.jep_examples", "tests.programs.rank", __name__, *submodules]
    with contextlib.ExitStack() as stack:
        for module in map(importlib.import_module, modules):
            if imported := {k: v for k, v in names.items() if k in vars(module)}:
                stack.enter_context(mock.patch.multiple(module, **imported))
        yield names


def _jax_names() -> dict[str, Any]:
    import jax

    def spec(x: Any) -> Any:
        return jax.sharding.PartitionSpec(*x.entries) if isinstance(x, PartitionSpec) else x

    def shard_map(f: Callable, mesh: Any, in_specs: Any, out_specs: Any, check_rep: bool = True) -> Callable:
        in_specs, out_specs = (
            jax.tree.map(spec, s, is_leaf=lambda x: isinstance(x, PartitionSpec)) for s in (in_specs, out_specs)
        )
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_rep)

    def checkpoint(f: Callable, policy: Any = None) -> Callable:
        return jax.checkpoint(f, policy=policy)

    collective = _jax_collectives()
    return {
        **collective,
        "np": libraries.jax_numpy(),
        "md": SimpleNamespace(**{**vars(libraries.jax_names()), "checkpoint": checkpoint}),
        "spmd": SimpleNamespace(shard_map=shard_map, parallel=spmd.parallel, Mesh=spmd.Mesh, make_mesh=spmd.make_mesh),
        "collectives": SimpleNamespace(**collective),
        "P": jax.sharding.PartitionSpec,
        "one_hot": jax.nn.one_hot,
        "relu": jax.nn.relu,
        "softmax": jax.nn.softmax,
        "gathering_again": functools.partial(checkpoint, policy=lambda prim, *_, **__: str(prim) != "all_gather"),
    }


def _jax_collectives() -> dict[str, Callable]:
    import jax
    from jax import lax
    from jax._src.lax.parallel import all_gather_invariant  # not yet public

    def pscatter(x: Any, axis_name: Any, axis: int = 0, tiled: bool = False) -> Any:
        if not tiled:
            return lax.dynamic_index_in_dim(x, lax.axis_index(axis_name), axis, keepdims=False)
        size = x.shape[axis] // lax.axis_size(axis_name)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * size, size, axis)

    def shifted(x: Any, axis: str, by: int) -> Any:
        n = lax.axis_size(axis)
        return lax.ppermute(x, axis, [(i, (i + by) % n) for i in range(n)])

    def varying(collective: Callable) -> Callable:
        """JAX has a collective's operand vary along all axes or none; here, and there, the rest is cast."""

        def of_any(x: Any, axis_name: Any, **options: Any) -> Any:
            axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
            missing = tuple(a for a in axes if a not in jax.typeof(x).manual_axis_type.varying)
            return collective(lax.pcast(x, missing, to="varying") if missing else x, axis_name, **options)

        return of_any

    collective = {
        name: getattr(lax, name) if name.startswith("axis") else varying(getattr(lax, name)) for name in COLLECTIVES
    }
    collective |= {"all_gather_invariant": varying(all_gather_invariant), "pscatter": pscatter, "shifted": shifted}
    collective["pbroadcast"] = lambda x, axis: lax.pcast(x, axis, to="varying")
    return collective


# ---------------------------------------------------------------- the report


def line(name: str, counts: Sequence[Any]) -> str:
    return f"{name:62}" + "".join(f"{'-' if n is None else n:>18}" for n in counts)


def random_programs(count: int) -> Iterator[str]:
    """The sums over `count` programs, and in how many there is more with types than without, or than in JAX."""
    every = []
    for seed in range(count):
        program = random_program(seed)
        shape, axes = tuple(program.shape.values()), tuple(program.shape)
        every.append(counted(shape, axes, program.on_ranks, tuple(program.example(seed))))
    yield line(f"{count} random programs", [sum(filter(None, column)) for column in zip(*every)])
    traced = [row for row in every if row[-1] is not None]
    if traced:
        yield line(f"  the {len(traced)} that JAX differentiates", [sum(column) for column in zip(*traced)])
    for one, other in (("eager", "untyped eager"), ("compiled", "untyped compiled"), ("eager", "JAX")):
        i, j = COLUMNS.index(one), COLUMNS.index(other)
        differences = [row[i] - row[j] for row in every if row[j] is not None]
        more, fewer = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
        if differences:
            yield f"  {one} beside {other}: more in {more}, fewer in {fewer} of {len(differences)}"


def main() -> None:
    options = measure.options(__doc__, None, programs=1000)
    print(line("psums of the gradient", COLUMNS))
    for name, shape, axes, build, args in programs():
        print(line(f"{name}, {math.prod(shape)} ranks", counted(shape, axes, build, args)), flush=True)
    for text in random_programs(options.programs):
        print(text)


if __name__ == "__main__":
    main()
