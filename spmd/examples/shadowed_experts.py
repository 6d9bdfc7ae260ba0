"""Copies of hot experts: where many tokens go to one expert, its parameters travel to the tokens.

    mpirun -n 4 python -m spmd.examples.shadowed_experts

The program prints the tokens of each expert, the experts that are copied, beside the best choice of at most three, and,
without copies and with them, the rows that are computed and sent, the collectives of a gradient, and the loss.

FastMoE sends each token to its expert, in messages of the right length (`assigned_experts`). If most tokens go to one,
its rank computes while others wait. FasterMoE copies it to all ranks for a step (a *shadow*): a broadcast, whose
transpose, a `reduce`, returns the gradient. Experts are copied from the busiest one on, as long as steps get faster.

Source: He et al., "FastMoE: A fast mixture-of-expert training system"; He et al., "FasterMoE", sections 4 and 5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_size, pmean
from collectives.rooted import broadcast_varying
from spmd.examples.assigned_experts import assigned_experts
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P
from spmd.parallel import feed_forward

FEATURES, HIDDEN, BANDWIDTH, OPERATIONS = 8, 8, 1e8, 1e9  # numbers sent, and operations, in a second


def shadowed_experts(expert: Callable, params: Any, x: Any, assignment: Any, hot: Sequence[int], axis: str) -> Any:
    """Apply `assigned_experts`, where each rank computes the tokens of the experts in `hot` itself."""
    ranks, each = axis_size(axis), len(md.tree.leaves(params)[0])

    def with_copies(leaf: Any) -> Any:
        copies = [broadcast_varying(leaf[h % each], axis, root=h // each) for h in hot]
        return np.concatenate([leaf, np.stack(copies)]) if copies else leaf

    local = places(assignment, hot, ranks, each)
    return assigned_experts(expert, md.tree.map(with_copies, params), x, local, axis)


def places(assignment: Any, hot: Sequence[int], ranks: int, each: int) -> numpy.ndarray:
    """Return the tokens' experts, where each rank has `each` of its own and then copies of those in `hot`.

    >>> places([0, 1, 1, 0], hot=[1], ranks=2, each=1)
    array([0, 1, 3, 0])
    """
    assigned, total = numpy.asarray(assignment).reshape(ranks, -1), each + len(hot)
    result = assigned // each * total + assigned % each
    for i, h in enumerate(hot):
        result = numpy.where(assigned == h, numpy.arange(ranks)[:, None] * total + each + i, result)
    return result.ravel()


def rows(assignment: Any, hot: Sequence[int], ranks: int, each: int) -> numpy.ndarray:
    """Return the rows that rank s sends to rank d: [ranks, ranks]."""
    to = places(assignment, hot, ranks, each).reshape(ranks, -1) // (each + len(hot))
    return numpy.stack([numpy.bincount(row, minlength=ranks) for row in to])


def step_seconds(assignment: Any, hot: Sequence[int], ranks: int, each: int) -> float:
    """Predict the seconds of a step: products of the busiest rank, its rows, and the copies, forward and backward."""
    table, weights = rows(assignment, hot, ranks, each), 2 * FEATURES * HIDDEN
    sent = table * (1 - numpy.eye(ranks))
    busiest, copies = max(*sent.sum(axis=0), *sent.sum(axis=1)), 2 * len(hot) * (weights + HIDDEN + FEATURES)
    return 6 * weights * table.sum(axis=0).max() / OPERATIONS + (4 * busiest * FEATURES + copies) / BANDWIDTH


def choose_hot(assignment: Any, ranks: int, each: int) -> list[int]:
    """Add the busiest experts as long as the predicted step becomes shorter."""
    hot: list[int] = []
    for expert in numpy.argsort(-numpy.bincount(assignment, minlength=ranks * each), kind="stable"):
        if step_seconds(assignment, [*hot, expert], ranks, each) >= step_seconds(assignment, hot, ranks, each):
            break
        hot.append(int(expert))
    return hot


def show(mesh: spmd.Mesh) -> None:
    """Train on tokens of which half go to one expert."""
    rng, ranks, each = numpy.random.default_rng(0), mesh.size, 2
    experts, tokens, split = ranks * each, 32 * ranks, P("experts")
    assignment = rng.choice(experts, size=tokens, p=[0.5, *[0.5 / (experts - 1)] * (experts - 1)])
    shapes = (FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, FEATURES), (FEATURES,)
    params, x = [rng.normal(size=(experts, *shape)) for shape in shapes], rng.normal(size=(tokens, FEATURES))
    hot = choose_hot(assignment, ranks, each)
    choices = [subset for n in range(4) for subset in combinations(range(experts), n)]
    best = min(choices, key=lambda subset: step_seconds(assignment, subset, ranks, each))
    print(f"tokens of experts: {' '.join(map(str, numpy.bincount(assignment, minlength=experts)))}")
    print(f"copied: {hot}; the best of {len(choices)} choices: {[*best]}")

    def loss(params: Any, x: Any, hot: Any = None) -> Any:
        if hot is None:  # on one rank
            return np.mean(md.vmap(feed_forward)([p[assignment] for p in params], x) ** 2)
        return pmean(np.mean(shadowed_experts(feed_forward, params, x, assignment, hot, "experts") ** 2), "experts")

    expected, gradients = md.value_and_grad(loss)(params, x)
    for copied in ([], hot):
        table = rows(assignment, copied, ranks, each)
        sent = table.sum() - numpy.trace(table)
        print(f"{len(copied)} copies: the busiest rank computes {table.sum(axis=0).max()} rows; {sent} rows are sent")
        mapped = spmd.shard_map(partial(loss, hot=copied), mesh=mesh, in_specs=(split, split), out_specs=P())
        value, actual = print_calls("gradient", md.value_and_grad(mapped), params, x)
        same = all(numpy.allclose(spmd.gather(a), b) for a, b in zip(actual, gradients))
        print(f"the same gradients: {'yes' if same else 'NO'}; loss: {numbers([value, expected])} (one rank)")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("experts",), argv)


if __name__ == "__main__":
    main()
