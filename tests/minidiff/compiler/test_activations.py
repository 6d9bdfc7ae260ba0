"""Activations, losses and normalizations compile to fused loops, whose values are those of the same operations eagerly.

`count_kernels` counts what is left of a program on large arrays: loops, and operations that are NumPy's.
"""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff import nn
from minidiff.compiler import native
from minidiff.compiler.buffers import fused_p
from minidiff.core.types import ShapedArray

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs llvmlite")


@md.custom_jvp
def scaled(x):
    return 2.0 * np.tanh(x)


@scaled.defjvp
def _scaled_tangent(primals, tangents):
    (x,), (t,) = primals, tangents
    y = np.tanh(x)
    return 2.0 * y, 2.0 * (1 - y * y) * t


@md.custom_vjp
def clipped(x):
    return np.exp(-x * x)


clipped.defvjp(
    lambda x: (clipped(x), x),
    lambda x, ct: (np.clip(ct, -1.0, 1.0) * -2.0 * x * np.exp(-x * x),),
)

#: Functions of the elements of an array.
ELEMENTWISE = {
    **{name: getattr(nn, name) for name in (
        "relu", "gelu", "silu", "mish", "elu", "celu", "selu", "softplus", "log_sigmoid", "sigmoid", "leaky_relu",
        "relu6", "hard_sigmoid", "hard_silu", "hard_tanh", "soft_sign", "squareplus", "glu", "erf", "erfc",
    )},
    "gelu (erf)": lambda x: nn.gelu(x, approximate=False),
    "relu(2x+1)*3": lambda x: nn.relu(2 * x + 1) * 3,
    "custom_jvp": lambda x: scaled(x) + 1.0,
    "custom_vjp": lambda x: clipped(x) + 1.0,
    "a jitted function": lambda x: md.jit(nn.silu)(x) * 2.0,
}  # fmt: skip


def large_operations(tape, size):
    """The operations of a program with operands of at least this size, but views."""
    return [e for e in tape.equations if not e.primitive.shares_memory and any(
        getattr(a.type if hasattr(a, "type") else a, "size", 0) >= size for a in [*e.inputs, *e.outputs])]  # fmt: skip


def gradient(f):
    return lambda x, ct: md.vjp(f, x)[1](ct)[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_activation_is_one_loop(name, dtype):
    """A single operation that NumPy computes in one loop may stay with NumPy; the gradient of `glu` is two halves."""
    f, t = ELEMENTWISE[name], ShapedArray((64, 1024), numpy.dtype(dtype))
    out = md.eval_shape(f, t)
    for tape in (md.jit(f).program(t).tape, md.jit(gradient(f)).program(t, out).tape):
        operations = large_operations(tape, out.size)
        assert len(operations) == 1 or name == "glu"
        assert operations[0].primitive is fused_p or isinstance(operations[0].primitive.impl, numpy.ufunc)
