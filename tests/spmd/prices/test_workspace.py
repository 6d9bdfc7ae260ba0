"""Temporaries of operations: each operation once, the table compared with tracemalloc."""

import re
import tracemalloc

import numpy as np

import minidiff as md
from minidiff.core.types import ShapedArray, Var, typeof
from spmd.prices.work import workspace
from tests.table import TABLE

N = 1 << 14  # of a batch, for arrays of a megabyte
BUFFERS = 3 * (1 << 16)  # bytes that NumPy's loops use, of operands whose memory order differs

#: What is not here: it depends on memory order, on values, on the length of an axis, or on the NumPy that runs.
LAPACK = "minors pinv qr svd svdvals solve inv eigh eigvalsh eig eigvals cholesky lstsq roots log_abs_det"
LOOPS = "sequential_map unwrap convolve i0 i0_1 sinc_1 polygamma log_stdtr log_gammaincc log_betaincc"  # many steps
ORDERS = "einsum matmul gather scatter_add scatter_set scatter_max scatter_min argmax argmin nanargmax nanargmin"
OTHERS = "softmax log_softmax larger permute hfft irfft rfft ihfft mantissa imag reshape"
UNKNOWN = {*LAPACK.split(), *LOOPS.split(), *ORDERS.split(), *OTHERS.split()}


def measured(f, *args, **params):
    f(*args, **params)
    tracemalloc.start()
    out = f(*args, **params)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, out


def test_all_operations():
    seen, wrong = set(), {}
    for row in TABLE:
        f, active = row.closed()
        if not active or row.note.startswith("O"):
            continue
        if re.search(r"scipy\.(_?linalg|_?signal|stats)", getattr(row.function, "__module__", None) or ""):
            continue  # one matrix or signal of a stack after the other; and many steps
        try:
            batch = [np.ascontiguousarray(np.broadcast_to(x, (N, *np.shape(x)))) for x in active]
            tape = md.make_tape(md.vmap(f))(*[ShapedArray(x.shape, x.dtype) for x in batch])
        except Exception:  # it has no batching rule, or takes concrete values
            continue
        names = {eqn.primitive.name for eqn in tape.equations}
        if names <= seen | UNKNOWN or any(eqn.primitive.is_higher_order for eqn in tape.equations):
            continue
        values = dict(zip(tape.inputs, batch))
        for eqn in tape.equations:
            primitive, operands = eqn.primitive, [values[a] if isinstance(a, Var) else a for a in eqn.inputs]
            with np.errstate(all="ignore"):
                peak, out = measured(primitive.bind, *operands, **eqn.params)
            outs = out if primitive.multiple_results else [out]
            values.update(zip(eqn.outputs, outs))
            if primitive.name in seen | UNKNOWN or primitive.shares_memory:
                continue
            seen.add(primitive.name)
            types = [typeof(x) for x in operands]
            expected = sum(v.type.nbytes for v in eqn.outputs)
            expected += workspace(primitive, types, [v.type for v in eqn.outputs])
            if abs(peak - expected) > 0.05 * expected + BUFFERS:
                wrong[primitive.name] = expected, peak, types
    assert (wrong, len(seen) > 90) == ({}, True)
