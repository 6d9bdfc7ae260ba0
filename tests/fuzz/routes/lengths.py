"""Random loops of which each rank, and each element of a batch, takes as many steps as it needs."""

from __future__ import annotations

import random

#: Whether a carry c goes on, and steps; each loop ends, whatever c, the weight w and the rank k are.
LOOPS = {
    "np.abs({c}).max() > {limit}": [
        "c / 2",
        "c * np.cos(w) / 2",
        "md.cond(c.sum() > 0, lambda c: c * 0.5, lambda c: c * 0.25 + 0 * w, c)",
        "md.scan(lambda c, n: (0.6 * c * np.cos(n * w), n), c, np.arange(2.0))[0]",
        "c - md.grad(lambda c: (0.2 * c * c).sum())(c)",
    ],
    "({c} * {c}).sum() < 10 * {limit}": [
        "1.3 * c + 0.1 * np.sign(c) + 0.01",
        "c + np.abs(w).max() + 0.1",
        "md.fori_loop(0, k % 3, lambda i, c: 1.1 * c, c) + 0.3",
        "np.where(c > 0, c + np.sqrt(np.abs(c)), np.abs(c) + 0.1) + 0.05",
    ],
}
BODIES = [
    "md.while_loop(goes_on, step, x)",
    "md.while_loop(lambda s: goes_on(s[0]) & (s[1] < 9), lambda s: (step(s[0]), s[1] + 1), (x, 0))[0]",
    "md.while_loop(lambda s: s['n'] < k, lambda s: {'n': s['n'] + 1, 'c': step(s['c'])}, {'n': 0, 'c': x})['c']",
    "md.fori_loop(k // 2, k + 1, lambda i, c: step(c), x)",
    "md.scan(lambda c, n: (md.while_loop(goes_on, step, c + n), n), x, np.arange(2.0))[0]",
    "md.cond(k > 0, lambda: md.while_loop(goes_on, step, x), lambda: 2 * x + 0 * w)",
]


def draw(rng: random.Random, size: str) -> str:
    condition, n = rng.choice([*LOOPS]), rng.choice([1, 2, 3])
    shown = condition.format(c="c", limit=rng.choice([0.1, 0.5, 2.0]))
    return f"""
        def body(w, x, k):
            goes_on = lambda c: {shown}
            step = lambda c: {rng.choice(LOOPS[condition])}
            return {rng.choice(BODIES)}
        def on_ranks(mesh, rank):
            return spmd.shard_map(
                lambda w, x: body(w, x, rank()), mesh=mesh, in_specs=(P(), P('i')), out_specs=P('i')
            )
        def alone(w, x):
            line = spmd.make_mesh((1,), ('i',), backend='simulated')
            blocks = [on_ranks(line, lambda k=k: k)(w, b) for k, b in enumerate(numpy.split(x, {size}))]
            return numpy.concatenate([b.gather() for b in blocks])
        rng = numpy.random.default_rng({rng.randrange(10**6)})
        w, x = rng.normal(size={n}), rng.normal(size={n} * {size}) * {rng.choice([1, 10])}
    """


def lengths(rng: random.Random) -> str:
    run = rng.choice(["not_jitted", "md.jit"])
    return f"""{draw(rng, "4")}
        f = on_ranks(spmd.make_mesh((4,), ('i',), backend='simulated'), lambda: axis_index('i'))
        agree(f(w, x), alone(w, x))
        agree(md.jit(f)(w, x), alone(w, x))
        pushed = lambda w, x: md.jvp(f, (w, x), (numpy.ones_like(w), numpy.ones_like(x)))[1]
        agree(md.jit(pushed)(w, x), pushed(w, x))
        shifted = lambda t: (alone(w + t, x + t) - alone(w - t, x - t)) / (2 * t)
        if numpy.allclose(shifted(1e-6), shifted(1e-7), rtol=1e-3, atol=1e-3):  # no other number of steps is near
            agree(pushed(w, x), shifted(1e-6), rtol=1e-2, atol=1e-2)
        many = numpy.stack([w, 0.5 * w, -w])
        agree({run}(md.vmap(f, (0, None)))(many, x), numpy.stack([alone(v, x) for v in many]))
    """


def lengths_on_ranks(rng: random.Random) -> str:
    """The same on MPI ranks, which compute what simulated ones do."""
    return f"""{draw(rng, "SIZE")}
        index = lambda: axis_index('i')
        f, other = on_ranks(mesh, index), on_ranks(spmd.make_mesh((SIZE,), ('i',), backend='simulated'), index)
        agree(f(w, x), alone(w, x))
        for run in (not_jitted, md.jit):
            agree(run(f)(w, x), run(other)(w, x), rtol=1e-13)
    """
