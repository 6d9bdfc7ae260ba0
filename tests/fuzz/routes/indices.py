"""Random programs that index, shift, pad and branch on sharded arrays, beside the same on whole ones."""

from __future__ import annotations

import random

#: Functions of a matrix x, and of integers `rows` and `columns` as long as its first and second dimension.
PROGRAMS = [
    "np.take_along_axis(x, columns[:, :2] % x.shape[1], 1)",
    "np.take_along_axis(x, columns % x.shape[0], 0)",
    "md.vmap(lambda a, b: a[b % len(a)])(x, columns)",
    "md.vmap(lambda a, b: np.take(a, b, mode='{mode}'))(x, columns)",
    "x[np.arange(len(x)), rows % x.shape[1]]",
    "x[rows[:{few}]]",
    "x[{few}, rows % x.shape[1]]",
    "md.vmap(lambda a, k: md.dynamic_slice_in_dim(a, k, 2))(x, rows)",
    "md.dynamic_slice_in_dim(x, rows[0], {few}, {axis})",
    "md.dynamic_update_slice_in_dim(x, x[:{few}] * 2, rows[1], 0)",
    "md.vmap(lambda a, b: np.at(a)[b % len(a)].{update}(a[0]))(x, columns)",
    "np.at(x)[np.arange(len(x)), rows % x.shape[1]].{update}(x[:, 0])",
    "np.at(x)[rows % len(x)].set(x * 2)",
    "np.sort(x, {axis})",
    "md.vmap(lambda a, b: np.convolve(a, b[:3], '{fit}'))(x, x)",
    "md.vmap(lambda a, b: np.correlate(a, b[:2], '{fit}'))(x, x)",
    "md.vmap(lambda a, b: np.searchsorted(a, b) * b)(np.sort(x, 1), x)",
    "md.vmap(lambda a: md.cond(np.sum(a) > 0, lambda a: a * np.log(np.sum(a)), np.sin, a))(x)",
    "md.vmap(lambda k, a: md.switch(k % 3, [np.sin, lambda a: 2 * a, lambda a: a * a[0]], a))(rows, x)",
    "np.roll(x, {shift}, {axis})",
    "np.roll(x, ({shift}, {few}), (0, 1)) - np.roll(x, {shift})",
    "np.flip(x, {axis})",
    "x[{start}:{stop}] * 2",
    "x[{start}:{stop}:{few}]",
    "x[:, 1:] - x[:, :-1]",
    "x[{few}:] - x[:-{few}]",
    "np.at(x)[1:-1].add(x[2:] + x[:-2])",
    "np.pad(x, ({few}, {shift} % 7))",
    "np.pad(x, (({few}, {few}), (0, 0)), '{around}')[2 * {few}:] - x",
    "np.concatenate([x[{few}:], x[:{few}]])",
    "np.diff(x, axis={axis}) ** 2",
    "np.gradient(x, axis={axis})",
]


def indices(rng: random.Random) -> str:
    """Compare a program and its gradient with those on whole arrays, op by op and compiled, and its count with reports.

    Op by op, values decide what is sent where a program computes its indices from other arrays; the report says so.
    """
    blocks, columns = rng.choice([1, 2, 3]), rng.choice([4, 6, 12])
    options = {
        "mode": rng.choice(["wrap", "clip"]),
        "few": rng.choice([1, 1, 2, 3]),
        "axis": rng.choice([0, 0, 1]),
        "update": rng.choice(["set", "add", "max", "multiply"]),
        "fit": rng.choice(["full", "same", "valid"]),
        "shift": rng.randrange(-20, 20),
        "start": rng.choice([0, 1, 4, 6]),
        "stop": rng.choice([-1, -4, 6, 12, 10**6]),
        "around": rng.choice(["constant", "edge", "wrap", "reflect", "linear_ramp"]),
    }
    chosen = [rng.choice(PROGRAMS).format(**options) for _ in range(rng.choice([1, 1, 2]))]
    wrapped = rng.choice(["np.sin({})", "{} * 2", "{}"]).format(f"({chosen[0]})")
    body = wrapped if len(chosen) == 1 else f"np.sum({wrapped}) + ({chosen[1]})"
    spec = rng.choice(["P('i')", "P('i')", "P(None, 'i')" if columns == 12 else "P('i')"])
    return f"""
        mesh = globals().get("mesh") or spmd.make_mesh(({rng.choice([2, 3, 4])},), ("i",), backend="simulated")
        draw = numpy.random.default_rng({rng.randrange(10**6)})
        x = draw.uniform(-1, 2, ({12 * blocks}, {columns}))
        rows = draw.integers(0, {12 * blocks}, {12 * blocks})
        columns = draw.integers(0, {columns}, x.shape)
        f = lambda x, rows, columns: {body}
        split = [spmd.distribute(x, mesh, {spec}), spmd.distribute(rows, mesh, P("i")),
                 spmd.distribute(columns, mesh, {spec})]
        expected = f(x, rows, columns)
        for g in (f, md.jit(f)):
            agree(g(*split), expected)
            mesh.reset_calls()
            g(*split)
            report = spmd.communication(g, optimized=g is not f)(*split)
            assert report.notes or (mesh.calls, sum(mesh.bytes.values())) == (report.counts, report.bytes), report
        gradient = md.grad(lambda x, *rest: np.sum(f(x, *rest) ** 2))
        expected = gradient(x, rows, columns)
        for g in (gradient, md.jit(gradient)):
            agree(g(*split), expected, rtol=1e-7, atol=1e-9)
    """
