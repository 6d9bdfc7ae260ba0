"""`sparsity`, `sparse_jacobian` and `sparse_hessian`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.api.derivatives import Chosen, grad
from minidiff.api.jacobians import Argnums, JacobianProducts
from minidiff.api.recording import stage_flat
from minidiff.api.vmap import vmap
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import name_of
from minidiff.errors.tracebacks import hide_own_frames
from minidiff.inputs.arguments import as_value, check_function
from minidiff.inputs.keywords import make_decorator
from minidiff.ops.shape import concatenate
from minidiff.ops.sparse import Triplets
from minidiff.sparse.coloring import Coloring, color, color_symmetric
from minidiff.sparse.pattern import Pattern, PatternWalk
from minidiff.values.dtypes import is_differentiable


@make_decorator
def sparsity(f: Callable, argnums: Argnums = 0) -> Callable:
    """Return a function that computes the sparsity pattern of the Jacobian of `f`.

    It has True for each element of the Jacobian that may differ from zero for some arguments of these types. It is read
    from the tape of `f`, in one walk, and nothing is differentiated. Of a branch that depends on the arguments, the
    patterns of both sides are united. An operation without a rule warns, and counts as dense.

    Args:
        f: a function of trees of arrays.
        argnums: the arguments to differentiate in, by position: an int, or a tuple of ints.

    Returns:
        A function of the arguments of `f`. Floating-point arguments may be arrays or types; integers must be values: an
        index tells which element is used. It returns what `sparse_jacobian` does, with True in place of values.

    Raises:
        TracerError: by that function, where `f` needs a concrete value.

    >>> import numpy as np
    >>> sparsity(lambda x: x[1:] * x[:-1])(np.ones(3)).toarray().astype(int)
    array([[1, 1, 0],
           [0, 1, 1]])
    """
    check_function("sparsity", f)
    colorings = _Colorings(Chosen("sparsity", f, argnums, False), color)

    def pattern(*args: Any, **kwargs: Any) -> Any:
        structure = colorings.structure(args, kwargs)
        count = len(structure.pattern.columns)
        return structure.result(numpy.arange(count), numpy.ones(count, bool))

    return pattern


@make_decorator
def sparse_jacobian(f: Callable, argnums: Argnums = 0, holomorphic: bool = False) -> Callable:
    """Return a function that computes the Jacobian of `f` as a sparse matrix.

    It multiplies the Jacobian by one vector for each color: the sum of columns that have no row in common, by forward
    mode, or of such rows, by reverse mode. The pattern and the colors are computed at the first call for arguments of
    these types (and these integers), and cached. `md.draw(sparse_jacobian(f))(x)` shows them.

    Args:
        f: a function of trees of arrays.
        argnums: the arguments to differentiate in, by position: an int, or a tuple of ints.
        holomorphic: `f` is a holomorphic function of complex arguments, with complex results.

    Returns:
        A function that returns the Jacobian in a tree as that of `jacfwd`. In place of each leaf of shape
        `(*out, *in)`, it has a `scipy.sparse.csr_array` with a row for each element of the result, in C order, and a
        column for each one of the argument; without SciPy, and for traced values, `Triplets`. Under MPI, each rank has
        the rows of its block of a result that is sharded, and the other rows are empty. The products send what the
        function sends, once for all colors.

    Raises:
        TypeError: by that function, for integer arguments or results, and for complex ones without `holomorphic`.
        TracerError: where `f` needs a concrete value.

    >>> import numpy as np
    >>> f = lambda x: x[1:] * x[:-1]
    >>> sparse_jacobian(f)(np.array([1.0, 2.0, 3.0])).toarray()
    array([[2., 1., 0.],
           [0., 3., 2.]])
    >>> sparse_jacobian(f).coloring(np.ones(1000)).count
    2

    Source: Curtis, Powell and Reid, "On the estimation of sparse Jacobian matrices" (1974); Coleman and Verma, "The
    efficient computation of sparse Jacobian matrices using automatic differentiation" (1998).
    """
    check_function("sparse_jacobian", f)
    chosen = Chosen("sparse_jacobian", f, argnums, False)
    return SparseJacobian(chosen, color, holomorphic)


@make_decorator
def sparse_hessian(f: Callable, argnums: int = 0, holomorphic: bool = False) -> Callable:
    """Return a function that computes the Hessian of a scalar function as a sparse matrix.

    It is the symmetric Jacobian of the gradient. Each element may be read from its column or its row, so a coloring in
    which no two colors alternate along four neighbors suffices.

    Args:
        f: a function of trees of arrays that returns a real scalar.
        argnums: the argument to differentiate in, by position.
        holomorphic: `f` is a holomorphic function of a complex argument.

    Returns:
        A function that returns the Hessian, in the form of `sparse_jacobian(grad(f))`.

    Raises:
        TypeError: by that function, for an integer argument, a complex one without `holomorphic`, or if the result is
            not a scalar.
        TracerError: where `f` needs a concrete value.

    >>> import numpy as np
    >>> rosenbrock = lambda x: (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()
    >>> hessian = sparse_hessian(rosenbrock)
    >>> hessian(np.ones(3)).toarray()
    array([[ 802., -400.,    0.],
           [-400., 1002., -400.],
           [   0., -400.,  200.]])
    >>> hessian.coloring(np.ones(1000)).count
    3

    Source: Gebremedhin, Tarafdar, Manne and Pothen, "New acyclic and star coloring algorithms with application to
    computing Hessians" (2007).
    """
    check_function("sparse_hessian", f)
    gradient = grad(f, argnums)
    gradient.__name__ = name_of(f)
    chosen = Chosen("sparse_hessian", gradient, argnums, False)
    return SparseJacobian(chosen, color_symmetric, holomorphic)


# ---------------------------------------------------------------- implementation


class _SparseStructure:
    """The pattern of a Jacobian, and how it is split into blocks of an output leaf and an input leaf."""

    def __init__(self, chosen: Chosen, structure: Any, out_structure: Any, in_sizes: list[int], out_sizes: list[int]):
        self.chosen, self.structure, self.out_structure = chosen, structure, out_structure
        self.in_ends, self.out_ends = ([0, *itertools.accumulate(sizes)] for sizes in (in_sizes, out_sizes))
        self.pattern: Pattern
        self.coloring: Coloring | None = None

    def color(self, method: Callable[[Pattern], Coloring]) -> Coloring:
        """Return the coloring, which is computed once."""
        if self.coloring is None:
            self.coloring = method(self.pattern)
        return self.coloring

    def result(self, elements: numpy.ndarray, values: Value) -> Any:
        """Return the tree of sparse matrices with these elements of the pattern."""
        rows, columns = self.pattern.rows[elements], self.pattern.columns[elements]
        blocks = [
            self.chosen.unflatten(
                self.structure, [self.block(rows, columns, values, *out, *of) for of in _pairs(self.in_ends)]
            )
            for out in _pairs(self.out_ends)
        ]
        return tree.unflatten(self.out_structure, blocks)

    def block(
        self, rows: numpy.ndarray, columns: numpy.ndarray, values: Value, top: int, bottom: int, left: int, right: int
    ) -> Any:
        shape = bottom - top, right - left
        if shape != (self.pattern.size, self.pattern.count):
            (among,) = numpy.nonzero((top <= rows) & (rows < bottom) & (left <= columns) & (columns < right))
            rows, columns, values = rows[among] - top, columns[among] - left, values[among]
        return _matrix(rows, columns, values, shape)


def _pairs(ends: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(ends))


def _matrix(rows: numpy.ndarray, columns: numpy.ndarray, values: Value, shape: tuple[int, int]) -> Any:
    try:
        from scipy.sparse import csr_array
    except ImportError:
        return Triplets(rows, columns, values, shape)
    if isinstance(values, Tracer) or values.dtype.itemsize == 2:  # SciPy has no 16-bit floats
        return Triplets(rows, columns, values, shape)
    starts = numpy.searchsorted(rows, numpy.arange(shape[0] + 1))
    return csr_array((values, columns, starts), shape=shape)


class _Colorings:
    """The programs of a function, by the types of its floating-point arguments and the values of the others."""

    def __init__(self, chosen: Chosen, method: Callable[[Pattern], Coloring], holomorphic: bool = False):
        self.chosen, self.method = chosen, method
        self.kinds = "cc" if holomorphic else "ff"  # of the dtypes of arguments and results
        self.cache: dict[Any, _SparseStructure] = {}

    def coloring(self, *args: Any, **kwargs: Any) -> Coloring:
        """Return the coloring of the Jacobian for arguments of these types."""
        return self.structure(args, kwargs).color(self.method)

    def structure(self, args: tuple, kwargs: dict) -> _SparseStructure:
        leaves, structure = tree.flatten((args, kwargs))
        leaves = [x if isinstance(x, (ShapedArray, Tracer)) else as_value(x) for x in leaves]
        types = [x if isinstance(x, ShapedArray) else typeof(x) for x in leaves]
        free = [is_differentiable(t.dtype) or isinstance(x, (ShapedArray, Tracer)) for x, t in zip(leaves, types)]
        values = tuple(None if is_free else numpy.asarray(x).tobytes() for x, is_free in zip(leaves, free))
        key = structure, tuple(types), values
        if key not in self.cache:
            self.cache[key] = self.analyze(args, leaves, structure, types, free)
        return self.cache[key]

    def analyze(
        self, args: tuple, leaves: list, structure: tree.Structure, types: list[ShapedArray], free: list[bool]
    ) -> _SparseStructure:
        chosen = self.chosen
        numbers = tree.unflatten(structure, list(range(len(leaves))))[0]
        of, of_structure = tree.flatten([numbers[n] for n in chosen.numbers])

        def of_free(*values: Value) -> Any:
            remaining = iter(values)
            args, kwargs = tree.unflatten(
                structure, [next(remaining) if is_free else x for x, is_free in zip(leaves, free)]
            )
            return chosen.f(*args, **kwargs)

        of_free.__name__ = chosen.name
        tape, _, out_structure = stage_flat(of_free, tuple(itertools.compress(types, free)), chosen.caller)
        program = _SparseStructure(
            chosen, of_structure, out_structure, [types[n].size for n in of], [t.size for t in tape.out_types]
        )
        starts = dict(zip(of, program.in_ends))
        walk = PatternWalk(program.in_ends[-1])
        inputs = [walk.inputs(starts.get(n), t) for n, t in enumerate(types) if free[n]]
        program.pattern = walk.stack(walk.follow(tape, inputs), tape.out_types)
        return program


class SparseJacobian(_Colorings):
    """A function that computes a Jacobian as a sparse matrix, by one product for each color."""

    @hide_own_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        structure = self.structure(args, kwargs)
        coloring = structure.color(self.method)
        at = JacobianProducts(self.chosen, args, kwargs, *self.kinds)
        by_column = _products(at.push_forward, coloring.columns, coloring.column_colors, at.in_types)
        by_row = _products(at.pull_back, coloring.rows, coloring.row_colors, at.out_types)
        values = concatenate([x.reshape(-1) for x, _ in (by_column, by_row)])
        is_column = coloring.read_from < coloring.column_colors
        places = numpy.where(
            is_column,
            _places(by_column, coloring.read_from, coloring.read_at, 0),
            _places(by_row, coloring.read_from - coloring.column_colors, coloring.read_at, by_column[0].size),
        )
        (here,) = numpy.nonzero(places >= 0)
        return structure.result(here, values[places[here]])


def _products(
    function: Callable, colors: numpy.ndarray, count: int, types: Sequence[ShapedArray]
) -> tuple[Value, numpy.ndarray]:
    """Return the products with the sum of the basis vectors of each color, as rows, and the numbers of their elements.

    A process holds the elements of its own blocks of sharded results.
    """
    if not count:
        return numpy.zeros((0, 0), types[0].dtype if types else float), _NO_ELEMENTS
    ends = [0, *itertools.accumulate(t.size for t in types)]
    seeds = numpy.arange(count)[:, None] == colors
    vectors = [seeds[:, i:j].astype(t.dtype).reshape(count, *t.shape) for t, (i, j) in zip(types, _pairs(ends))]
    outs = vmap(function)(*vectors)
    starts = itertools.accumulate((x.size // count for x in outs), initial=0)
    parts = [(values, start + numbers) for start, (values, numbers) in zip(starts, map(_elements_here, outs))]
    return concatenate([values for values, _ in parts], axis=1), numpy.concatenate([numbers for _, numbers in parts])


_NO_ELEMENTS = numpy.zeros(0, int)


def _elements_here(batch: Value) -> tuple[Value, numpy.ndarray]:
    sharding = typeof(batch).sharding
    here = None if sharding is None else sharding.elements_here(batch)
    return here or (batch.reshape(len(batch), -1), numpy.arange(batch.size // len(batch)))


def _places(products: tuple[Value, numpy.ndarray], colors: numpy.ndarray, elements: numpy.ndarray, start: int) -> Any:
    """Return where elements of these colors are among the flat products, which begin at `start`; -1 for none."""
    values, numbers = products
    place = numpy.full(max(elements.max(initial=0), numbers.max(initial=0)) + 1, NO_PLACE)
    place[numbers] = numpy.arange(len(numbers))
    places = place[elements]
    return numpy.where(places < 0, NO_PLACE, start + colors * values.shape[1] + places)


NO_PLACE = -1
