"""Python that programs call: `print_p` prints its operands, and `pure_callback` calls the user's function on arrays.

Printing is an effect, so passes that remove, merge or precompute operations leave it in place (see
`Primitive.has_effect`). It prints when the program runs, in program order, once for each element of a `vmap` and on
each rank of a `shard_map`. Under `vmap`, a branch that only some elements take prints for all of them: the others run
it on the operands of one that takes it.
"""

from __future__ import annotations

import builtins
import functools
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import name_of
from minidiff.inputs.arguments import as_named_value, as_values
from minidiff.ops.dimensions import gather
from minidiff.ops.shape import broadcast_to, expand_dims
from minidiff.values.aliasing import read_only_view
from minidiff.values.dtypes import is_scalar_constant, result_type

# ---------------------------------------------------------------- printing

#: Maps operands on all ranks of this process to the name of each rank and its local operands.
ByRank = Callable[[Sequence[Value]], Iterator[tuple[str, Sequence[Value]]]]


class Format(NamedTuple):
    """A format string, the structure of its arguments, and their non-array leaves."""

    text: str
    structure: tree.Structure
    fixed: tuple[tuple[int, Any], ...]  # non-array leaves, each with its position

    def __call__(self, operands: Iterable[Value]) -> str:
        leaves = list(operands)
        for place, x in self.fixed:
            leaves.insert(place, x)
        args, kwargs = tree.unflatten(self.structure, leaves)
        return self.text.format(*args, **kwargs)


class Print(Primitive):
    """The primitive that prints its operands, with the parameter `format`.

    Two more parameters are present where they are needed: `batches` says, for each `vmap` from the outermost, which
    operands have its axis in front; `by_rank` splits operands among the ranks of a `shard_map`.
    """

    multiple_results = True
    operands_agree = False
    has_effect = True

    def __init__(self) -> None:
        super().__init__("debug_print", _print, lambda *types, **params: [], sharding=gather)

    def jvp(self, primals, tangents, params):
        return self.bind(*primals, **params), []

    def batch(self, args, batched, params):
        return self.bind(*args, **{**params, "batches": (tuple(batched), *params.get("batches", ()))})

    def show_params(self, params):
        return repr(params["format"].text)


def _print(
    *operands: Value, format: Format, batches: Sequence[Sequence[bool]] = (), by_rank: ByRank | None = None
) -> list:
    for rank, local in [("", operands)] if by_rank is None else by_rank(operands):
        for element in batch_elements(local, batches):
            # One string with its newline, so that output of other processes does not come in between.
            builtins.print((f"{rank}: " if rank else "") + f"{format(element)}\n", end="", flush=True)
    return []


def batch_elements(operands: Sequence[Value], batches: Sequence[Sequence[bool]]) -> Iterator[Sequence[Value]]:
    """Yield the operands of each batch element; `batches` says which have each batch axis, from the outermost."""
    if not batches:
        yield operands
        return
    batched, *inner = batches
    for i in range(next(len(x) for x, is_batched in zip(operands, batched) if is_batched)):
        yield from batch_elements([x[i] if is_batched else x for x, is_batched in zip(operands, batched)], inner)


print_p = Print()


class CheckFormat(string.Formatter):
    """A formatter that raises for a missing argument, and for an unused one."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return ""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        return value

    def get_field(self, field_name: str, args: Sequence, kwargs: Mapping) -> tuple[Any, Any]:
        first = field_name.partition(".")[0].partition("[")[0]
        key = int(first) if first.isdigit() else first
        return self.get_value(key, args, kwargs), key

    def check_unused_args(self, used_args: set, args: Sequence, kwargs: Mapping) -> None:
        unused = [f"argument {i}" for i in range(len(args)) if i not in used_args]
        unused += [f"{name}=" for name in kwargs if name not in used_args]
        if unused:
            raise TypeError(f"debug.print: the format does not use {', '.join(unused)}: write a {{}} for each argument")


# ---------------------------------------------------------------- callbacks

METHODS = ("sequential", "expand_dims", "broadcast_all")


class Callback(NamedTuple):
    """A function of trees as one of leaves; its results are checked against types, and copied."""

    function: Callable
    structure: tree.Structure  # of the arguments
    results: tree.Structure

    def __call__(self, leaves: Sequence[Value], types: Sequence[ShapedArray]) -> list[numpy.ndarray]:
        views = [read_only_view(numpy.asarray(x))[()] for x in leaves]  # other operations read the arrays, too
        args, kwargs = tree.unflatten(self.structure, views)
        leaves, structure = tree.flatten(self.function(*args, **kwargs))
        if structure != self.results:
            raise TypeError(
                f"pure_callback: {name_of(self.function)} returned {structure}, but result_shape_dtypes says "
                f"{self.results}"
            )
        paths = tree.paths(structure, "the result")
        return [self._check(*result) for result in zip(paths, leaves, types)]

    def _check(self, path: str, x: Any, declared: ShapedArray) -> Value:
        name = name_of(self.function)
        if type(x) in (bool, int, float, complex) and result_type(declared.dtype, x) == declared.dtype:
            x = numpy.asarray(x, declared.dtype)  # a Python number takes any precision
        x = as_named_value(x, f"pure_callback: {path} of {name}")
        if (x.shape, x.dtype) != (declared.shape, declared.dtype):
            raise TypeError(
                f"pure_callback: {path} of {name} has type {typeof(x)}, but result_shape_dtypes says {declared}: "
                "return an array of that shape and dtype (with .astype, say), or declare the one that it returns"
            )
        return x


class PureCallback(Primitive):
    """The operation. `types` are those of the results of one call.

    `batches` says which operands have each leading batch axis, from the outermost; there is one call for each element.
    With another `vmap_method` than "sequential", `vmap` changes the operands and `types` instead. Each rank of a mesh
    always makes a call of its own, as it does where each rank is a process.
    """

    multiple_results = True

    def __init__(self) -> None:
        super().__init__("pure_callback", _call, sharding=gather)

    def typecheck(self, types, params):
        sizes, states = _sizes(types, params["batches"]), self.result_states(types, params)
        return [t.update(shape=(*sizes, *t.shape), states=states) for t in params["types"]]

    def jvp(self, primals, tangents, params):
        name = name_of(params["callback"].function)
        raise TypeError(
            f"pure_callback: {name} is Python code, which has no derivative. Give it a rule: call pure_callback in a "
            "function that is decorated with md.custom_jvp (forward and reverse mode) or md.custom_vjp; or, if its "
            "result is a constant, apply md.stop_gradient to the arguments"
        )

    def batch(self, args, batched, params):
        if params["vmap_method"] == "sequential":
            return self.batch_ranks(args, batched, params)
        size = next(x.shape[0] for x, is_batched in zip(args, batched) if is_batched)
        args = [x if is_batched else expand_dims(x, 0) for x, is_batched in zip(args, batched)]
        if params["vmap_method"] == "broadcast_all":
            args = [broadcast_to(x, (size, *x.shape[1:])) for x in args]
        types = tuple([t.update(shape=(size, *t.shape)) for t in params["types"]])
        return self.bind(*args, **{**params, "types": types})

    def batch_ranks(self, args, batched, params):
        return self.bind(*args, **{**params, "batches": (tuple(batched), *params["batches"])})

    def show_params(self, params):
        return name_of(params["callback"].function)


def _sizes(operands: Sequence[Any], batches: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    """Return the sizes of the batch axes."""
    sizes, shapes = [], [() if is_scalar_constant(x) else x.shape for x in operands]
    for batched in batches:
        sizes.append(next(shape[0] for shape, is_batched in zip(shapes, batched) if is_batched))
        shapes = [shape[1:] if is_batched else shape for shape, is_batched in zip(shapes, batched)]
    return tuple(sizes)


def _call(
    *operands: Value, callback: Callback, types: Sequence[ShapedArray], vmap_method: str, batches: Sequence
) -> list:
    """Call the function, once for each element of a batch."""
    results = [callback(element, types) for element in batch_elements(operands, batches)]
    sizes = _sizes(operands, batches)
    return [
        numpy.array([result[k] for result in results], t.dtype).reshape((*sizes, *t.shape))[()]
        for k, t in enumerate(types)
    ]


callback_p = PureCallback()


def pure_callback(
    callback: Callable, result_shape_dtypes: Any, *args: Any, vmap_method: str = "sequential", **kwargs: Any
) -> Any:
    """Call a Python function of plain arrays, even where values are traced.

    The function is called when the program runs, also under `jit` and in loops. In the body of a `shard_map` it is
    called once on each rank with that rank's blocks (once for all simulated ranks if no argument varies), and the
    result varies as the arguments do.

    Args:
        callback: A function of trees of NumPy arrays, which it must not write to. It must be pure: a compiled program
            may call it again, or not at all if nothing uses the result.
        result_shape_dtypes: A tree like the function's result, of `ShapedArray`s or of anything that has a `shape` and
            a `dtype`.
        args, kwargs: The arguments of the function: trees of arrays.
        vmap_method: "sequential": `vmap` calls the function once for each element. "expand_dims": once, with a leading
            batch axis on every argument, of size 1 for those that are not mapped. "broadcast_all": once, with all
            arguments broadcast to the whole batch. The last two return the results of all elements along a first axis.

    It has no derivative. Declare one with `custom_jvp` or `custom_vjp`, whose function calls it:

    >>> import math
    >>> import numpy as np
    >>> from minidiff import custom_jvp, grad, jit, typeof
    >>> @custom_jvp
    ... def gamma(x):
    ...     return pure_callback(math.gamma, typeof(x), x)
    >>> gamma.defjvps(lambda t, out, x: t * out * digamma(x))
    >>> def digamma(x):
    ...     return pure_callback(lambda x: math.log(x) - 0.5 / x, typeof(x), x)  # roughly
    >>> float(jit(gamma)(5.0)), round(float(grad(gamma)(5.0)), 1)
    (24.0, 36.2)

    Returns:
        The function's result: a tree of arrays.

    Raises:
        TypeError: If the function returns another structure, shape or dtype than declared, or closes over a traced
            value; or if a derivative is taken.
        ValueError: For another `vmap_method`.
    """
    if not callable(callback):
        raise TypeError(
            f"pure_callback: callback must be a function, got {type(callback).__name__}: write "
            "pure_callback(f, result_shape_dtypes, *args)"
        )
    if vmap_method not in METHODS:
        known = ", ".join(map(repr, METHODS))
        raise ValueError(f"pure_callback: vmap_method must be one of {known}, got {vmap_method!r}")
    advice = "pass it as an argument, pure_callback({f}, result_shape_dtypes, {name}, ...)"
    check_closure("pure_callback", callback, advice)
    declared, results = tree.flatten_with_paths(result_shape_dtypes, "result_shape_dtypes")
    types = tuple([_declared_type(path, x) for path, x in declared])
    leaves, structure = tree.flatten((args, kwargs))
    operands = as_values("pure_callback", leaves, lambda: tree.paths(structure, "(args, kwargs)"))
    called = Callback(callback, structure, results)
    outs = callback_p.bind(*operands, callback=called, types=types, vmap_method=vmap_method, batches=())
    return tree.unflatten(results, outs)


def check_closure(caller: str, f: Callable, advice: str) -> None:
    """Raise TypeError for a function that closes over a traced value, which it would meet when the program runs."""
    for name, x in _closed_over(f, set()):
        advice = advice.format(f=name_of(f), name=name)
        raise TypeError(f"{caller}: {name_of(f)} closes over {name}, a traced value of type {typeof(x)}: {advice}")


def _closed_over(f: Any, seen: set[int]) -> Iterator[tuple[str, Tracer]]:
    """Yield the traced values that a function closes over, with their names, and those of the functions it calls."""
    values: list[tuple[str, Any]] = []
    if isinstance(f, functools.partial):
        values = [(name_of(f), x) for x in (f.func, *f.args, *f.keywords.values())]
    elif isinstance(f, FunctionType):
        cells = zip(f.__code__.co_freevars, f.__closure__ or ())
        values = [(name, cell.cell_contents) for name, cell in cells if cell != CellType()]  # CellType(): no value yet
        values += [("a default", x) for x in f.__defaults__ or ()]
    for name, value in values:
        for x in tree.leaves(value):
            if isinstance(x, Tracer):
                yield name, x
            elif id(x) not in seen:
                seen.add(id(x))
                yield from _closed_over(x, seen)


def _declared_type(path: str, x: Any) -> ShapedArray:
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(
            f"pure_callback: {path} must have a shape and a dtype, got {type(x).__name__}: write "
            "md.ShapedArray(shape, dtype), or md.typeof(x) for a result like x"
        )
    return ShapedArray(tuple(x.shape), numpy.dtype(x.dtype))
