"""Operations on sharded arrays: how their results are split, and what that takes of communication."""

import minidiff as md
import minidiff.numpy as np
from spmd import P

A, B = np.sin(np.arange(24.0)).reshape(4, 6), np.cos(np.arange(24.0)).reshape(4, 6)
C = np.cos(np.arange(6 * 8.0)).reshape(6, 8)

#: Functions of A and of B, for specs of these: the spec of the result, and what is communicated.
PROPAGATED = [
    # number by number
    (np.add, (P("i"), P("i")), P("i"), {}),
    (np.add, (P("i"), P("j")), P("i"), {"all_gather_invariant": 1}),
    (np.add, (P("i"), P("i", "j")), P("i", "j"), {}),
    (lambda x, y: x * y[0], (P(None, "j"), P("i", "j")), P(None, "j"), {"broadcast": 1}),
    (lambda x: x + A, (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.clip(x, 0, 1), (P(("i", "j")),), P(("i", "j")), {}),
    # reductions
    (lambda x: x.sum(axis=0), (P("i"),), P(), {"psum": 1}),
    (lambda x: x.sum(axis=0), (P("i", "j"),), P("j"), {"psum": 1}),
    (lambda x: x.sum(), (P("i", "j"),), P(), {"psum": 1}),
    (lambda x: x.mean(axis=(0, 1), keepdims=True), (P("i", "j"),), P(), {"psum": 1}),
    (lambda x: x.max(axis=1, keepdims=True), (P("i", "j"),), P("i"), {"pmax": 1}),
    (lambda x: x.prod(axis=1), (P("i", "j"),), P("i"), {"all_gather_invariant": 1}),
    (lambda x: (x > 0).any(axis=0), (P("i"),), P(), {"pmax": 1}),
    (lambda x: (x > 0).all(axis=0), (P("i"),), P(), {"pmin": 1}),
    (lambda x: x.var(axis=0), (P("i"),), P(), {"psum": 2}),
    (lambda x: x.argmax(axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.cumsum(x, axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.sort(x, axis=1), (P("i"),), P("i"), {}),
    (lambda x: md.nn.softmax(x, axis=0), (P("i"),), P("i"), {"pmax": 1, "psum": 1}),
    # dimensions elsewhere
    (lambda x: x.T, (P("i", "j"),), P("j", "i"), {}),
    (lambda x: x.swapaxes(0, 1), (P(("j", "i")),), P(None, ("j", "i")), {}),
    (lambda x: np.moveaxis(x[None], 1, 0), (P("i"),), P("i"), {}),
    (lambda x: x.reshape(2, 2, 6), (P("i", "j"),), P("i", None, "j"), {}),
    (lambda x: x.reshape(4, 2, 3), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: x.ravel(), (P("i"),), P("i"), {}),
    (lambda x: x.ravel(), (P("i", "j"),), P(("i", "j")), {"all_to_all": 1}),
    (lambda x: np.broadcast_to(x, (3, 4, 6)), (P("i", "j"),), P(None, "i", "j"), {}),
    (lambda x: np.concatenate([x, x], axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.stack([x, 2 * x]), (P("i", "j"),), P(None, "i", "j"), {}),
    (lambda x: np.split(x, 2, axis=1)[1], (P("i"),), P("i"), {}),
    (lambda x: x[:, 2], (P("i"),), P("i"), {}),
    (lambda x: x[2], (P("i", "j"),), P("j"), {"broadcast": 1}),
    (lambda x: x[:, [0, 2, 2]], (P("i"),), P("i"), {}),
    # products
    (lambda x: x @ C, (P("i"),), P("i"), {}),
    (lambda x: x @ C, (P(None, "i"),), P(), {"psum": 1}),
    (lambda x: x @ C[:, 0], (P("i", "j"),), P("i"), {"psum": 1}),
    (lambda x: (x > 0) @ (C > 0), (P(None, "i"),), P(), {"pmax": 1}),
    (lambda x: C.T @ x.T, (P("i"),), P(None, "i"), {}),
    (lambda x, y: x.T @ y, (P("i"), P("i")), P(), {"psum": 1}),
    (lambda x, y: x @ y.T, (P("i"), P("j")), P("i", "j"), {}),
    (lambda x, y: np.einsum("ik,jk->ij", x, y), (P("i", "j"), P(None, "j")), P("i"), {"psum": 1}),
    (lambda x, y: np.tensordot(x, y, axes=([0], [0])), (P("i", "j"), P("i")), P("j"), {"psum": 1}),
    (lambda x, y: np.outer(x[:, 0], y[0]), (P("i"), P(None, "j")), P("i", "j"), {}),
    # along dimensions that are not split, and one array of a stack by itself
    (lambda x: np.fft.rfft(x, axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.unwrap(x, axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.searchsorted(np.sort(C[0]), x), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.interp(x, np.sort(A[0]), C[0, :6]), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.stack(list(x.T)), (P("i"),), P(None, "i"), {}),
    (lambda x: np.diagonal(x[:, :4].reshape(4, 2, 2), 0, 1, 2), (P("i"),), P("i"), {}),
    (lambda x: np.linalg.inv(x[:, :4].reshape(4, 2, 2) + 2 * np.eye(2)), (P("i"),), P("i"), {}),
    (lambda x, y: np.linalg.solve(x[:, :4].reshape(4, 2, 2), y[:, :2, None]), (P("i"), P("i")), P("i"), {}),
    # along a dimension that is split: another one is split instead
    (lambda x: np.sort(x, axis=0), (P("i"),), P(None, "i"), {"all_to_all": 2}),
    (lambda x: np.fft.fft(x, axis=0), (P("i"),), P(None, "i"), {"all_to_all": 1}),
    (lambda x: np.concatenate([x, A]), (P("i"),), P(None, "i"), {"all_to_all": 1}),
    (lambda x: x.reshape(2, 2, 6).argmax(axis=0), (P("i"),), P(), {"all_gather_invariant": 2}),
    (lambda x: np.roll(x, 1, axis=0), (P("i", "j"),), P("i", "j"), {"ppermute": 1}),
    (lambda x: (1j * x).max(axis=0), (P("i"),), P("i"), {"all_to_all": 1}),
    # a few places of a dimension that is split
    (lambda x: x[-1], (P(("j", "i")),), P(), {"broadcast": 1}),
    (lambda x: x[1, 4], (P("i", "j"),), P(), {"broadcast": 2}),
    # slices of a dimension that is split: in step with the blocks, from their end, of one, of several of them
    (lambda x: x[::2, 1::3], (P("i", "j"),), P("i", "j"), {}),
    (lambda x: x[::-1], (P("i", "j"),), P("i", "j"), {"ppermute": 1}),
    (lambda x: x[::-1, 5::-2], (P(("j", "i")),), P(("j", "i")), {"ppermute": 1}),
    (lambda x: x[2::-2, ::-1], (P("i", "j"),), P("i", "j"), {"ppermute": 2}),
    (lambda x: x[:2], (P("i", "j"),), P("i", "j"), {"ppermute": 1}),
    (lambda x: x[1:3], (P(("i", "j")),), P(), {"all_gather_invariant": 1}),
    (lambda x: x[2:0:-1, None, 3:1:-1], (P("i", "j"),), P(), {"all_gather_invariant": 2}),
    (lambda x: x[1:], (P(("i", "j")),), P(), {"all_gather_invariant": 1}),
    (lambda x: x[1:1], (P("i"),), P(), {"broadcast": 1}),
    (lambda x: x[np.array([-4])], (P("i"),), P(), {"psum": 1}),
    (lambda x: x[[3, 0], [1, -1]], (P("i", "j"),), P(), {"psum": 1}),
    (lambda x: (x > 0)[[3]], (P("i"),), P(), {"pmax": 1}),
    (lambda x: x[np.arange(40) % 4], (P("i"),), P(None, "i"), {"all_to_all": 1}),  # less than to add up
    # updates
    (lambda x: np.at(x)[1].set(0.0), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[:, 1::2].set(C[:4, :3]), (P("i"),), P("i"), {}),
    (lambda x: np.at(x)[1:3, ::-2].set(C[:2, :3]), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[None, 3, ..., 1:1].set(7.0), (P("i"),), P("i"), {}),
    (lambda x: np.at(x)[[3, 0, 3]].set(C[:3, :6]), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[[3, 0], [1, -1]].set([5.0, 6.0]), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[[3, 0, 3]].add(C[:3, :6]), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[x > 0.5].set(0.0), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[[0, 1, 1]].max(C[:3, :6]), (P(None, "j"),), P(None, "j"), {}),
    (lambda x, y: np.at(x)[1].set(y[2]), (P("i"), P("i")), P("i"), {"broadcast": 1}),
    # no rule, or no dimension that stays: gathered
    (lambda x: np.linalg.inv(x[:, :4] + np.eye(4)), (P("i"),), P(), {"all_gather_invariant": 1}),
    (lambda x: np.roll(x, 1), (P("i"),), P("i"), {"ppermute": 1}),
]
