"""Layouts of loops: the dimensions that a loop walks as one, and the regions in which each operand is one view.

A loop reads slices, rolled arrays, arrays in zeros, and concatenations where their elements are. Each of these consists
of pieces of arrays. The ends of pieces cut the loop into regions: `x + np.roll(x, 1)` is a loop over the first element
and one over the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff.compiler.ir import constant, type_of
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.types import Var, typeof
from minidiff.ops import indexing, rearranging, reduction
from minidiff.ops.base import sum_p
from minidiff.ops.shape import concatenate_p

Shape = tuple[int, ...]

#: The reductions that loops compute.
REDUCTIONS = (sum_p, reduction.max_p, reduction.min_p)

#: The most bytes of a row's values that a loop stores for later stages: they stay in the cache.
MAX_STORED_BYTES = 1 << 17

# ---------------------------------------------------------------- reads


class Piece(NamedTuple):
    """Elements of an operand, `inputs[operand][part]`: the first one is at `origin` in the loop's dimensions."""

    operand: int
    part: tuple
    origin: Shape
    shape: Shape


def _of_slice(eqn: Equation) -> list[Piece]:
    (v,) = eqn.outputs
    return [Piece(0, eqn.params["index"], (0,) * v.type.ndim, v.type.shape)]


def _of_roll(eqn: Equation) -> list[Piece]:
    shape = eqn.outputs[0].type.shape
    total = [0] * len(shape)
    for shift, axis in zip(eqn.params["shifts"], eqn.params["axes"]):
        total[axis] = (total[axis] + shift) % shape[axis]
    origins = itertools.product(*[(s, s - n) if s else (0,) for s, n in zip(total, shape)])
    return [Piece(0, (), origin, shape) for origin in origins]


def _in_zeros(eqn: Equation) -> list[Piece]:
    shape, index = eqn.params["shape"], eqn.params["index"]
    operand = typeof(eqn.inputs[0])
    if any(not isinstance(i, slice) or i.step not in (None, 1) for i in index):
        return []
    if 2 * operand.size < math.prod(shape):  # then it takes less time to add where there are no zeros
        return []
    starts = [i.indices(n)[0] for i, n in zip(index, shape)]
    return [Piece(0, (), (*starts, *[0] * (len(shape) - len(starts))), operand.shape)]


def _of_concatenation(eqn: Equation) -> list[Piece]:
    axis, (v,) = eqn.params["axis"], eqn.outputs
    shapes = [typeof(a).shape for a in eqn.inputs]
    starts = itertools.accumulate([s[axis] for s in shapes], initial=0)
    origins = [(0,) * axis + (n,) + (0,) * (v.type.ndim - axis - 1) for n in starts]
    return [Piece(k, (), origin, shape) for k, (origin, shape) in enumerate(zip(origins, shapes)) if math.prod(shape)]


#: The operations that loops read through, and their pieces. Elements of the result in no piece are zero.
PIECES: dict[Primitive, Callable[[Equation], list[Piece]]] = {
    indexing.slice_p: _of_slice,
    rearranging.roll_p: _of_roll,
    indexing.unslice_p: _in_zeros,
    concatenate_p: _of_concatenation,
}


def pieces_of(eqn: Equation) -> list[Piece]:
    """Return the pieces that the result of an equation consists of; none if a loop does not read through it."""
    if eqn.primitive not in PIECES or not eqn.outputs[0].type.size:
        return []
    dtypes = {typeof(a).dtype for a in [*eqn.inputs, *eqn.outputs]}
    return PIECES[eqn.primitive](eqn) if len(dtypes) == 1 else []


def operands_of(body: Tape) -> dict[Var, list[Piece]]:
    """Return the operands of a loop: inputs, which broadcast (their pieces have no origin), and results of reads."""
    place = {v: k for k, v in enumerate(body.inputs)}
    reads = {e.outputs[0]: e for e in body.equations if e.primitive in PIECES}
    used = {a for e in body.equations if e.primitive not in PIECES for a in e.inputs if isinstance(a, Var)}
    operands = {v: [Piece(k, (), (), v.type.shape)] for v, k in place.items() if v in used}
    for v, eqn in reads.items():
        operands[v] = [p._replace(operand=place[eqn.inputs[p.operand]]) for p in pieces_of(eqn)]
    return operands


# ---------------------------------------------------------------- dimensions and regions

#: The first element of a region, and the one after its last, in each dimension.
Region = tuple[tuple[int, int], ...]


class View(NamedTuple):
    """An array in the dimensions of a layout: where it begins, its sizes, and the dimensions that its view has."""

    origin: Shape
    sizes: Shape
    dims: tuple[int, ...]
    broadcasts: bool

    @property
    def shape(self) -> Shape:
        return tuple([self.sizes[d] for d in self.dims])

    def contains(self, region: Region) -> bool:
        places = zip(self.origin, self.sizes, region)
        return self.broadcasts or all(o <= first and last <= o + n for o, n, (first, last) in places)

    def select(self, region: Region) -> tuple[slice, ...]:
        """Return the index of a region's elements."""
        index = []
        for d in self.dims:
            first, last = region[d]
            index.append(slice(0, 1) if self.sizes[d] == 1 else slice(first - self.origin[d], last - self.origin[d]))
        return tuple(index)


def cut(region: Region, most: int) -> Iterator[Region]:
    """Yield pieces of about `most` elements of a region, cut along its first dimension that has several."""
    sizes = [last - first for first, last in region]
    d = next((d for d, n in enumerate(sizes) if n > 1), 0)
    first, last = region[d]
    step = -(-most // math.prod(sizes[d + 1 :]))
    for start in range(first, last, step):
        yield (*region[:d], (start, min(start + step, last)), *region[d + 1 :])


class Layout:
    """The dimensions of a loop. Dimensions that all arrays walk alike are merged into one.

    The last two are rows and columns, which the kernel walks over. NumPy walks over those before.
    """

    def __init__(self, body: Tape):
        self.shape = shape = iteration_shape(body)
        self.operands = operands_of(body)
        reductions = [e for e in body.equations if e.primitive in REDUCTIONS]
        self.reduced = {e.outputs[0]: reduced_shape(shape, e.params["axes"]) for e in reductions}
        self.stages = stages_of(body)
        sums = {e.outputs[0] for e in reductions if e.primitive is sum_p}
        #: The results of reductions that are not sums of terms from pieces of a row.
        self.by_row = [v for v in self.reduced if v in self.stages.crossing or v not in sums]
        arrays = [*itertools.chain(*self.operands.values()), *[Piece(0, (), (), s) for s in self.reduced.values()]]
        strides = [_strides(p, shape, body) for p in arrays]
        starts = [d for d in range(len(shape)) if not all(_continues(d, p, shape, s) for p, s in zip(arrays, strides))]
        self.groups = list(zip(starts, [*starts[1:], len(shape)]))
        self.sizes = tuple([math.prod(shape[a:b]) for a, b in self.groups])
        self.views = {v: [self.view(p.shape, p.origin) for p in pieces] for v, pieces in self.operands.items()}
        self.cuts = [self._cuts(d) for d in range(self.ndim)]

    @property
    def ndim(self) -> int:
        return len(self.groups)

    def _cuts(self, d: int) -> list[int]:
        """Where regions begin and end along a dimension."""
        cut = [view for view in itertools.chain(*self.views.values()) if not view.broadcasts]
        ends = [end for view in cut for end in (view.origin[d], view.origin[d] + view.sizes[d])]
        return sorted({0, self.sizes[d], *[end for end in ends if 0 < end < self.sizes[d]]})

    @property
    def count(self) -> int:
        """The number of regions."""
        return math.prod([len(cuts) - 1 for cuts in self.cuts])

    def regions(self, most: int) -> Iterator[Region]:
        """Yield the regions, in pieces of about `most` elements."""
        for region in itertools.product(*map(itertools.pairwise, self.cuts)):
            is_row = math.prod(self.sizes[:-1]) == 1
            yield from cut(region, math.prod(self.sizes) if self.by_row and is_row else most)

    def view(self, shape: Shape, origin: Shape = ()) -> View:
        """Return an array of this shape in the loop's dimensions; it broadcasts if it has no origin."""
        padded = (1,) * (len(self.shape) - len(shape)) + shape
        sizes = tuple([math.prod(padded[a:b]) for a, b in self.groups])
        rows = self.ndim - 2
        dims = [d for d in range(self.ndim) if d < rows or (self.sizes[d] != 1 and (origin or sizes[d] != 1))]
        starts = tuple([origin[a] * math.prod(self.shape[a + 1 : b]) if origin else 0 for a, b in self.groups])
        return View(starts, sizes, tuple(dims), not origin)

    def dimensions_of(self, view: View) -> str:
        """Return the dimensions of a view that a kernel's loop runs over: "mn", rows and columns, or "m", rows."""
        return "".join(["mn"[d - self.ndim] for d in view.dims if d >= self.ndim - 2])


def _strides(piece: Piece, shape: Shape, body: Tape) -> Shape:
    """Return the strides of a piece in a loop of this shape, if its elements have one byte and are adjacent."""
    if not piece.origin:
        return numpy.broadcast_to(_adjacent(piece.shape), shape).strides
    return _adjacent(body.inputs[piece.operand].type.shape)[piece.part].strides


def _adjacent(shape: Shape) -> numpy.ndarray:
    """Return an array whose elements seem to be adjacent, of one byte, however large it is."""
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    return numpy.lib.stride_tricks.as_strided(numpy.empty(1, "i1"), shape, strides)


def _continues(d: int, piece: Piece, shape: Shape, strides: Shape) -> bool:
    """Return True if a walk over dimension `d` continues with equal steps where earlier dimensions change."""
    before = [k for k in range(d) if shape[k] != 1]
    if piece.origin and (piece.origin[d], piece.shape[d]) != (0, shape[d]):
        return False
    return d > 0 and (shape[d] == 1 or not before or strides[before[-1]] == strides[d] * shape[d])


def shape_of(eqn: Equation) -> Shape:
    """Return the shape of the elements that an equation is computed for."""
    return typeof(eqn.inputs[0]).shape if eqn.primitive in REDUCTIONS else eqn.outputs[0].type.shape


def iteration_shape(body: Tape) -> Shape:
    """Return the shape of the elements that a group's loop runs over."""
    return shape_of(body.equations[0])


def reduced_shape(shape: Shape, axes: Sequence[int]) -> Shape:
    """Return a shape with 1 in place of the sizes along these axes."""
    return tuple([1 if i in axes else n for i, n in enumerate(shape)])


def needs_layout(body: Tape) -> bool:
    """Return True if a group has reads or reductions. If not, its loop is a ufunc, which sees arrays as NumPy does."""
    return any(eqn.primitive in REDUCTIONS or eqn.primitive in PIECES for eqn in body.equations)


def find_layout(body: Tape) -> Layout | None:
    """Return the layout of a group with reads or reductions; None if there is none, or no array is cut."""
    layout = Layout(body)
    reads = any(eqn.primitive in PIECES for eqn in body.equations)
    if math.prod(layout.shape) == 1 or (reads and (layout.ndim, layout.count) == (1, 1)):  # each is one adjacent array
        return None
    views = {v: layout.view(s) for v, s in layout.reduced.items()}
    if any(v.sizes[:-2] != layout.sizes[:-2] and v.sizes[-2:] == layout.sizes[-2:] for v in views.values()):
        return None  # a reduction along NumPy's dimensions alone
    if layout.by_row:
        rows, stored = (*layout.sizes[:-1], 1), [v.type for v in layout.stages.crossing if v.type.shape == layout.shape]
        size = sum([t.dtype.itemsize for t in stored]) * layout.sizes[-1]
        if layout.count > 1 or size > MAX_STORED_BYTES or any(views[v].sizes != rows for v in layout.by_row):
            return None
    return layout


# ---------------------------------------------------------------- stages


class Stages:
    """The stages of a loop: reductions of each row, and what needs their results.

    A softmax goes over each row three times, while it is in the cache: for the largest number, for the sum of the
    powers, and to divide by that. At even places, `equations` has the operations on elements, and the reductions of
    these; at odd ones, those on one element a row, such as the root of a variance.
    """

    def __init__(self, equations: Sequence[Equation], shape: Shape):
        self.equations: list[list[Equation]] = []
        self.place: dict[Var, int] = {}  # where each value is computed
        ready: dict[Atom, int] = {}  # where it can be used first
        self.crossing: dict[Var, None] = {}  # the values that later stages use
        for eqn in equations:
            (v,) = eqn.outputs
            is_reduction = eqn.primitive in REDUCTIONS
            place = max([ready[a] for a in eqn.inputs if isinstance(a, Var) and a in ready], default=0)
            place += (place % 2 == 1) == (is_reduction or v.type.shape == shape)
            self.equations += [[] for _ in range(place + 1 - len(self.equations))]
            self.equations[place].append(eqn)
            self.place[v], ready[v] = place, place + is_reduction
            self.crossing |= {a: None for a in eqn.inputs if isinstance(a, Var) and self.place.get(a, place) != place}

    @property
    def count(self) -> int:
        return len(self.equations)


def stages_of(body: Tape) -> Stages:
    """Return the stages of a group; what it reads is there before."""
    return Stages([eqn for eqn in body.equations if eqn.primitive not in PIECES], iteration_shape(body))


class Parameter(NamedTuple):
    """An operand, a result, or a value that crosses stages: its name, dtype and dimensions, and how it is reduced."""

    name: str
    dtype: numpy.dtype
    dimensions: str
    reduction: Any = None

    @property
    def has_columns(self) -> bool:
        return "n" in self.dimensions

    @property
    def texts(self) -> dict[str, object]:
        """The texts that fill the templates in `loops.py`. `{add}a, {second}b{close}` reduces two numbers to one."""
        is_float, is_bool, type_ = self.dtype.kind == "f", self.dtype.kind == "b", type_of(self.dtype)
        texts: dict[str, object] = {
            "x": self.name,
            "type": type_,
            "memory": "i8" if is_bool else type_,  # a bool is a byte
            "size": self.dtype.itemsize,
        }
        if self.reduction in (None, sum_p):
            add, reorder = ("fadd", "reassoc ") if is_float else ("add", "")
            texts |= {"add": f"{add} {type_} ", "add_any": f"{add} {reorder}{type_} ", "second": "", "close": ""}
            zero: float = -0.0 if is_float else 0  # -0.0 + x is x, for 0.0 too
        else:
            call = f"call nsz {type_} {self.intrinsic}({type_} "
            texts |= {"add": call, "add_any": call, "second": f"{type_} ", "close": ")"}
            zero = self.reduction.infinity
        return texts | {"zero": constant(None, zero, self.dtype).text}

    @property
    def intrinsic(self) -> str:
        """LLVM's function that reduces two numbers to the larger or the smaller one."""
        name = "maximum" if self.reduction is reduction.max_p else "minimum"
        return f"@llvm.{name}.f{8 * self.dtype.itemsize}"
