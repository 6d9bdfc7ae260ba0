"""The work of operations by their types: floating-point operations, bytes read and written, and memory allocated.

`COSTS` has a rule for each operation; none looks at values, so arrays are not needed. Elementwise operations count one
operation for each number of the result (`STEPS` has those made of several), a matrix product two for each term. Views,
casts of states and labels cost nothing, collectives only their sums. An operation that runs bodies costs as much as its
bodies: see `spmd.predict`, which follows them.

>>> from minidiff.core.types import ShapedArray
>>> from minidiff.ops.linalg import matmul_p
>>> a, b = ShapedArray((8, 16), "float32"), ShapedArray((16, 4), "float32")
>>> work_of(matmul_p, [a, b], [ShapedArray((8, 4), "float32")], {})
Work(flops=1024, bytes=896, product=ProductSize(batch=1, rows=8, columns=4, terms=16))

`WORKSPACE` has the memory that NumPy's implementations allocate in addition to their results, as the report of memory
counts it (`spmd.memory`).

Source: G. H. Golub, C. F. Van Loan, "Matrix computations", 2013 (factorizations); the operation counts of XLA's
`HloCostAnalysis` (all others).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from minidiff.core.primitive import Primitive
from minidiff.core.tape import Equation
from minidiff.core.types import ShapedArray, typeof
from minidiff.ops.base import Promoting
from minidiff.ops.einsum import matrix_axes
from minidiff.values.dtypes import runs_wide


class ProductSize(NamedTuple):
    """The sizes of a matrix product: `batch` products of [rows, terms] with [terms, columns]."""

    batch: int
    rows: int
    columns: int
    terms: int

    @property
    def flops(self) -> int:
        return 2 * math.prod(self)


class Work(NamedTuple):
    """The floating-point operations of an operation, the bytes it reads and writes, and its product if it is one."""

    flops: int
    bytes: int
    product: ProductSize | None = None


Types = Sequence[ShapedArray]
Rule = Callable[[Types, Types, dict], Work]


def _moved(inputs: Types, outputs: Types) -> int:
    return sum(t.nbytes for t in (*inputs, *outputs))


def _count(flops: Callable[[Types, Types, dict], float]) -> Rule:
    """Make a rule from a count of operations; all operands are read once, and all results written."""
    return lambda inputs, outputs, params: Work(int(flops(inputs, outputs, params)), _moved(inputs, outputs))


def _free(inputs: Types, outputs: Types, params: dict) -> Work:
    return Work(0, 0)


def _product(sizes: Callable[[Types, Types, dict], ProductSize]) -> Rule:
    def rule(inputs: Types, outputs: Types, params: dict) -> Work:
        product = sizes(inputs, outputs, params)
        return Work(product.flops, _moved(inputs, outputs), product)

    return rule


def _matmul(inputs: Types, outputs: Types, params: dict) -> ProductSize:
    a, b = inputs[:2]
    rows, columns = (a.shape[-2] if a.ndim > 1 else 1), (b.shape[-1] if b.ndim > 1 else 1)
    terms = a.shape[-1]
    batch = outputs[0].size // max(rows * columns, 1)
    if b.ndim <= 2:  # one matrix for all: the rows of all batches are those of one product
        rows, batch = rows * batch, 1
    return ProductSize(batch, rows, columns, terms)


def _einsum(inputs: Types, outputs: Types, params: dict) -> ProductSize:
    x_axes, y_axes, batch_ndim, row_ndim, _ = matrix_axes(params["subscripts"])
    x, y = [inputs[0].shape[a] for a in x_axes], [inputs[1].shape[a] for a in y_axes]
    rows, columns = x[batch_ndim : batch_ndim + row_ndim], y[len(x) - row_ndim :]
    return ProductSize(*map(math.prod, (x[:batch_ndim], rows, columns, x[batch_ndim + row_ndim :])))


def _convolve(inputs: Types, outputs: Types, params: dict) -> ProductSize:
    size = outputs[0].size
    return ProductSize(1, size, 1, min(math.prod(t.shape[-params.get("ndim", 1) :]) for t in inputs))


def _sliced(inputs: Types, outputs: Types, params: dict) -> Work:
    """Return the work of a slice: it is read and written, and the rest of the operand is not touched."""
    return Work(0, 2 * sum(t.nbytes for t in outputs) + sum(t.nbytes for t in inputs[1:]))


def _written(inputs: Types, outputs: Types, params: dict) -> Work:
    """Return the work of writing values into a copy of the operand; each addition or comparison is one operation."""
    values = sum(t.nbytes for t in inputs[1:])
    return Work(inputs[1].size if len(inputs) > 1 else 0, 2 * outputs[0].nbytes + 2 * values)


def _set(inputs: Types, outputs: Types, params: dict) -> Work:
    return _written(inputs, outputs, params)._replace(flops=0)


def _in_place(inputs: Types, outputs: Types, params: dict) -> Work:
    """Return the work of an addition in place, by the compiler: only the added elements are read and written."""
    values = sum(t.nbytes for t in inputs[1:])
    return Work(inputs[1].size if len(inputs) > 1 else 0, 3 * values)


def _unsliced(inputs: Types, outputs: Types, params: dict) -> Work:
    """Return the work of writing zeros, and the operand into them."""
    return Work(0, outputs[0].nbytes + 2 * inputs[0].nbytes)


_reads = _count(lambda inputs, outputs, params: inputs[0].size)  # an operation for each number read
_copies = _count(lambda inputs, outputs, params: 0)


def _several(each: float) -> Rule:
    return _count(lambda inputs, outputs, params: each * inputs[0].size)


def _transform(inputs: Types, outputs: Types, params: dict) -> float:
    """Return 5 N log2 N for complex numbers, half as many for real ones."""
    t = max((*inputs, *outputs), key=lambda t: t.size)
    axes = params.get("axes", (-1,))
    n = math.prod(t.shape[a] for a in axes)
    half = 1 if all(t.dtype.kind == "c" for t in (*inputs, *outputs)) else 0.5
    return half * 5 * t.size * math.log2(max(n, 2))


def _sorted(inputs: Types, outputs: Types, params: dict) -> float:
    """Return the comparisons of a merge sort."""
    return inputs[0].size * math.log2(max(inputs[0].shape[-1:] or (2,)) + 1)


def _searched(inputs: Types, outputs: Types, params: dict) -> float:
    """Return the comparisons of a binary search for each result."""
    return outputs[0].size * math.log2(max(inputs[0].size, 1) + 1)


def _of_matrix(cubes: float) -> Rule:
    """Make a rule of `cubes` * rows * columns * the smaller of the two, for each matrix."""

    def flops(inputs: Types, outputs: Types, params: dict) -> float:
        t = inputs[0]
        if t.ndim < 2:
            return t.size
        return cubes * t.size * min(t.shape[-2:])

    return _count(flops)


def _solve(inputs: Types, outputs: Types, params: dict) -> float:
    a, b = inputs[:2]
    columns = b.size * a.shape[-1] // max(a.size, 1) if a.size else 0
    return a.size * (2 / 3 * a.shape[-1] + 2 * max(columns, 1))


#: Operations for each number, of elementwise functions that are made of several: as XLA counts the same expressions.
STEPS = {"gelu_tanh": 9, "gelu_erf": 5, "silu": 4, "sigmoid": 4, "mish": 6, "relu": 1, "logaddexp": 5, "square": 1}
STEPS |= {"gate": 3, "soft_sign": 3, "log_gamma_draw": 300, "poisson_draw": 200}  # with the hash, and a few attempts
STEPS |= {"logaddexp2": 5, "sinc": 4, "ndtri": 20, "i0": 20, "hypot": 4, "gcd": 10, "lcm": 12, "stop_gradient": 0}

_BY_RULE: dict[Rule, str] = {
    _free: "windows name recompute schedule while_loop fill axis_index progress debug_print pure_callback reshard "
    "filled ended",
    _copies: "concatenate stack convert checked_convert roll permute split embed_diagonal diagonal sequential_map "
    "to_disk",
    _sliced: "slice dynamic_slice gather",
    _written: "scatter_add scatter_max scatter_min",
    _set: "dynamic_update update scatter_set",
    _unsliced: "unslice dynamic_unslice",
    _in_place: "add_along add_at add_at_indices",
    _several(2): "round unwrap",
    _several(4): "var logsumexp",
    _several(5): "softmax log_softmax",
    _several(40): "random_bits",  # the rounds of Threefry
    _count(_transform): "fft ifft hfft ihfft rfft irfft",
    _count(_sorted): "argsort argpartition lexsort",
    _count(_searched): "searchsorted digitize isin",
    _product(_matmul): "matmul",
    _product(_einsum): "einsum",
    _product(_convolve): "convolve",
    _count(_solve): "solve",
    _count(lambda inputs, outputs, params: 2 * outputs[0].size * inputs[0].shape[-1]): "lu_solve",
    _count(lambda inputs, outputs, params: outputs[0].size * inputs[0].shape[-1]): "solve_triangular",
    _count(lambda inputs, outputs, params: 4 * outputs[0].size * inputs[0].shape[-2]): "solve_banded",
    _of_matrix(1 / 3): "cholesky",
    _of_matrix(2 / 3): "lu det slogdet",
    _of_matrix(2): "inv inverse_or_nan lu_inv lu_inverse_or_nan",
    _of_matrix(4): "qr eigvalsh svdvals full_rank",
    _of_matrix(9): "eigh matrix_function",
    _of_matrix(10): "eigvals roots",
    _of_matrix(22): "svd pinv minors polar",
    _of_matrix(25): "eig solve_sylvester sqrtm",
    _of_matrix(30): "expm cosm sinm logm",  # products and a quotient of Padé's approximant, squarings
    _of_matrix(240): "expm_frechet cosm_frechet sinm_frechet logm_frechet",  # of matrices of twice the size
    _reads: "sum prod max min mean all any argmax argmin nanargmax nanargmin unwindows cumsum cumprod recurrence "
    "lu_det lu_slogdet differences_of_values split_equal_values join_equal_values "
    "basis_of_equal_values quotient_or_nan corner_of_singular_values",
}

#: The rule of each operation, by name; elementwise operations have one in common.
COSTS: dict[str, Rule] = {name: rule for rule, names in _BY_RULE.items() for name in names.split()}


def _elementwise(primitive: Primitive) -> Rule:
    steps = STEPS.get(primitive.name, 1)
    return lambda inputs, outputs, params: Work(steps * outputs[0].size, _moved(inputs, outputs))


#: Collectives that add or compare the values of ranks; their messages are priced by the links of a machine.
_REDUCTIONS = ("psum", "pprod", "pmax", "pmin", "psum_scatter", "reduce", "pscan")


def cost_rule(primitive: Primitive) -> Rule:
    """Return the rule by which an operation is priced. Raises TypeError for one that has none, or that runs bodies."""
    if primitive.on_ranks:
        return _reads if primitive.name in _REDUCTIONS else _free
    if rule := COSTS.get(primitive.name):
        return rule
    if isinstance(primitive, Promoting):
        return _elementwise(primitive)
    if primitive.is_view:
        return _free
    raise TypeError(f"the operation {primitive} has no cost: add a rule for it to spmd.prices.work.COSTS")


def work_of(primitive: Primitive, inputs: Types, outputs: Types, params: dict, in_place: bool = False) -> Work:
    """Return the work of an operation on operands of these types. Raises TypeError for one without a cost.

    With `in_place`, an operation that changes some elements of its first operand writes only those, as compiled
    programs do; and nothing, if it sets the elements at one index.
    """
    rule = cost_rule(primitive)
    if in_place and rule in (_written, _set):
        # One element: the operation that computes the value writes it there.
        rule = _free if rule is _set and all(t.size == 1 for t in inputs[2:]) else _in_place
    return rule(inputs, outputs, params)


def work_of_equation(eqn: Equation) -> Work:
    """Return the work of an equation that runs no body."""
    return work_of(eqn.primitive, [*map(typeof, eqn.inputs)], [v.type for v in eqn.outputs], eqn.params)


# ---------------------------------------------------------------- memory

#: Name of an operation -> the bytes it allocates in addition to its result, for n elements of s bytes in its largest
#: operand and m in its results. Most operations, and compiled loops, allocate nothing, or a buffer of some kilobytes.
WORKSPACE: dict[str, Callable[[int, int, int], float]] = {
    **dict.fromkeys(("erf", "erfc"), lambda n, s, m: 32 * n),  # Python's numbers
    "gelu_erf": lambda n, s, m: (32 + 2 * s) * n,
    **dict.fromkeys(("gelu_tanh", "silu"), lambda n, s, m: 3 * s * n),
    **dict.fromkeys(("mish", "sigmoid", "sinc"), lambda n, s, m: 2 * s * n),
    **dict.fromkeys(("softmax", "log_softmax", "difference"), lambda n, s, m: (s + 1) * n),  # with a mask
    "logsumexp": lambda n, s, m: (2 * s + 1) * n,
    "var": lambda n, s, m: s * (n + m),  # the mean, and the distances from it
    "soft_sign": lambda n, s, m: s * n,
    "direction": lambda n, s, m: 2 * n,  # masks of what is infinite, and of zeros
    "recurrence": lambda n, s, m: 2 * s * n,  # a product of the factors, and a term
    **dict.fromkeys(("exponent", "fraction"), lambda n, s, m: max(4, s) * n),  # the other result of frexp
    "scatter_add": lambda n, s, m: 8 * (n + m) * (n >= 500),  # the places of all elements, and those of the added ones
    "matrix_function": lambda n, s, m: 4.33 * s * n,  # of the value: eigenvectors, their products, eigenvalues
    **dict.fromkeys(("fft", "ifft"), lambda n, s, m: 16 * n),  # the operand as complex numbers
}


def workspace(primitive: Primitive, operands: Sequence[ShapedArray], results: Sequence[ShapedArray]) -> int:
    """Return the bytes that an operation allocates in addition to its results, for operands and results of these types.

    In 16 bits, NumPy computes on copies of the operands in float32.

    >>> import numpy
    >>> from minidiff.nn import gelu_tanh_p
    >>> x = ShapedArray((1000,), numpy.dtype(float))
    >>> workspace(gelu_tanh_p, [x], [x])
    24000
    """
    if not operands:
        return 0
    wide = 2 * sum(t.nbytes for t in (*operands, *results)) if runs_wide(primitive, operands) else 0
    largest = max(operands, key=lambda t: t.size)
    rows = primitive.name != "scatter_add" or len(operands) <= results[0].ndim  # places of single elements are given
    count = WORKSPACE.get(primitive.name) if rows else None
    size = largest.dtype.itemsize * (2 if wide else 1)
    return wide + (int(count(largest.size, size, sum(t.size for t in results))) if count else 0)
