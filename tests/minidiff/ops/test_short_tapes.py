"""Tapes have few operations: a product is one, what changes nothing is none, transposes are as short."""

from collections.abc import Callable

import numpy as np

import minidiff as md
import minidiff.numpy as mnp
from tests.checks.samples import each

X, Y, XS = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4), np.ones((7, 3))
LA = np.linalg


def equations(f: Callable, *args: object) -> list:
    return md.make_tape(f)(*args).equations


def transpose(f: Callable) -> Callable:
    return lambda ct: md.linear_transpose(f, X)(ct)


#: A function, its arguments, and the operations on its tape.
TAPES = [
    # products
    (lambda x, y: x @ y, (X, Y), "matmul"),
    (lambda x: x @ x, (X[0],), "matmul"),
    (lambda x: LA.matrix_power(x, 10), (np.eye(2),), "matmul matmul matmul matmul"),
    (md.vmap(lambda x: x @ Y), (XS,), "matmul"),
    (md.vmap(lambda x: X[0] @ x), (XS,), "matmul"),
    (lambda *xs: LA.multi_dot(xs), (np.ones((50, 2)), np.ones((2, 50)), np.ones((50, 1))), "matmul matmul"),
    # shapes
    (lambda x: np.split(x, 3, axis=1), (X,), "split"),
    (transpose(lambda x: tuple(np.split(x, 2))), ((X[:1], X[:1]),), "concatenate"),
    (lambda x: [*x], (X,), "unstack"),
    (lambda x: (x.reshape(2, 3), np.squeeze(x), np.atleast_2d(x), x.transpose(0, 1), np.split(x, 1)), (X,), ""),
    (lambda x: x[:, ...], (X,), ""),
    (lambda x: x[:, None], (X,), "reshape"),
    (transpose(lambda x: x[::-1, ::-1]), (X,), "slice"),
    (lambda x: np.pad(x, 1), (X,), "unslice"),
    (lambda x, v: x.at[1:, 0].set(v), (X, np.ones(1)), "update"),
    *((f, (X,), "") for f in (mnp.asarray, mnp.asanyarray)),
    *((f, (X,), "copy") for f in (mnp.ascontiguousarray, mnp.asfortranarray)),
    # reductions
    (lambda x: np.sum(x, axis=1, keepdims=True), (X,), "sum"),
    (np.var, (X,), "var"),
    (md.grad(lambda x: np.sum(x, axis=(0, 1))), (X,), "sum broadcast_to"),
    (lambda x: md.vjp(lambda x: np.sum(x, 0), x)[1](np.ones(3))[0], (X,), "sum broadcast_to"),
    (lambda x: md.vjp(lambda x: np.sum(x, 1, keepdims=True), x)[1](np.ones((2, 1)))[0], (X,), "sum broadcast_to"),
    (lambda x: md.vjp(lambda x: np.sum(x, 1), x)[1](x[:, 0])[0], (X,), "sum slice reshape broadcast_to"),
    # what is known from shapes
    (lambda x: x if np.array_equal(x, [1.0]) is False and not np.array_equiv(x, [1.0, 2.0]) else -x, (X,), ""),
    # transforms
    (transpose(np.fft.rfft), (np.ones((2, 2), complex),), "hfft"),
    (lambda ct: md.linear_transpose(np.fft.ifft2, ct)(ct), (np.ones((2, 2), complex),), "ifft"),
    (lambda ct: md.linear_transpose(np.fft.ifft, np.ones(4, complex))(ct), (np.ones(4, complex),), "ifft"),
]


@each("f, args, names", TAPES)
def test_tapes_are_short(f, args, names):
    assert sorted(e.primitive.name for e in equations(f, *args)) == sorted(names.split())


#: A function, its arguments, and the size of the largest result on its tape.
SIZES = [
    (lambda *xs: np.einsum("ij,jk,kl->il", *xs), (np.ones((50, 2)), np.ones((2, 50)), np.ones((50, 1))), 50 * 2),
    (md.vmap(lambda x: X @ x), (XS,), 7 * 3),
    (md.vmap(lambda b: LA.solve(np.eye(3), b)), (np.ones((5, 3)),), 5 * 3),  # one factorization for all
    # Weights shared by a stack get their derivative in one product: there is no stack of derivatives.
    (md.grad(lambda w: (np.ones((7, 2, 3)) @ w).sum()), (Y,), 7 * 2 * 4),
    (md.grad(lambda w: (w @ np.ones((7, 3, 2))).sum()), (Y.T,), 7 * 2 * 4),
]


@each("f, args, most", SIZES)
def test_results_on_tapes_are_small(f, args, most):
    assert max(v.type.size for e in equations(f, *args) for v in e.outputs) <= most


def test_the_gradient_of_rows_is_one_of_rows():
    names = [e.primitive.name for e in equations(md.grad(lambda x: sum(r[0] for r in x)), np.ones((50, 2)))]
    assert names.count("unslice") == 50


def test_tapes_write_slices_as_python_does():
    f = lambda x: (x[1:, None, ::-1, 0], x.at[1:, 0, 1].set(x[1:, 1, 1]))  # noqa: E731
    text = str(md.make_tape(f)(np.ones((2, 3, 4))))
    assert "slice(a, [1:, None, ::-1, 0])" in text and "update(a, c, [1:, 0, 1])" in text
