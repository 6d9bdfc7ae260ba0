"""Random programs over sharded arrays, and in bodies, whose reports are held against what the backend counted."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

Counts = dict[str, tuple[int, int]]  # by collective: calls and bytes

# ---------------------------------------------------------------- the comparison


def counts_of(report: Any) -> Counts:
    """The calls and bytes of each collective in a report of communication."""
    return {name: sums for (name,), sums in report.sums(lambda row: (row.collective,)).items()}


def asked_for(mesh: Any, run: Callable[[], Any]) -> Counts:
    """The calls and bytes of each collective that a run asks the backend for."""
    mesh.reset_calls()
    run()
    return {name: (calls, mesh.bytes[name]) for name, calls in mesh.calls.items()}


def check_reports(mesh: Any, f: Callable, args: Sequence[Any], options: dict, eager: bool) -> None:
    """Raise AssertionError where a report of `f(*args)` differs from what the backend is asked for.

    That is where it runs as a tape, compiled with these options, and op by op if `eager`. Where the numbers depend on
    values, the report has to say so.
    """
    import minidiff as md
    import spmd
    from minidiff import tree

    def agree(label: str, report: Any, run: Callable[[], Any]) -> None:
        reported, asked = counts_of(report), asked_for(mesh, run)
        assert reported == asked or report.notes, f"{label}: reported {reported}, asked for {asked}"

    tape = md.make_tape(f)(*args)
    agree("a tape", spmd.communication(tape), lambda: tape(*tree.leaves(args)))
    g = md.jit(f, **options)
    g(*args)  # compiles
    compiled = spmd.communication(g)(*args)
    agree("compiled", compiled, lambda: g(*args))
    agree("compiled, optimized=True", spmd.communication(g, optimized=True)(*args), lambda: g(*args))
    agree("called by a function", spmd.communication(lambda *args: g(*args))(*args), lambda: g(*args))
    assert counts_of(spmd.compare(lambda *args: g(*args), *args).typed) == counts_of(compiled), "compare of a call"
    if eager:
        agree("op by op", spmd.communication(f)(*args), lambda: f(*args))
    reported = counts_of(compiled)
    assert counts_of(spmd.compare(g, *args).typed) == reported, "compare differs from communication"
    prediction = spmd.predict(g, spmd.machines.A100)(*args)
    sent = [(key, entry) for key, entry in prediction.cost.entries.items() if key.axes]
    counts = {key.operation: [0, 0] for key, _ in sent}
    for key, entry in sent:
        counts[key.operation][0] += round(entry.count)
        counts[key.operation][1] += round(entry.bytes)
    predicted = {name: (calls, nbytes) for name, (calls, nbytes) in counts.items()}
    reported = counts_of(spmd.communication(spmd.rewritten(g)(*args)))  # before short loops are unrolled
    assert predicted == reported or prediction.notes, f"predicted {predicted}, reported {reported}"


def check_steps(mesh: Any, f: Callable, x: Any) -> None:
    """Raise AssertionError unless the while_loop in `f(x, steps)` is counted for one step, and the report says so.

    Its condition sends nothing.
    """
    import minidiff as md
    import spmd

    tape, g = md.make_tape(f)(x, 1), md.jit(f)
    g(x, 1)  # compiles
    for report, run in ((spmd.communication(f)(x, 1), tape), (spmd.communication(g)(x, 1), g)):
        none, one, two = (asked_for(mesh, functools.partial(run, x, n)) for n in range(3))
        expected = {}
        for name in two:
            before, a, b = (counts.get(name, (0, 0)) for counts in (none, one, two))
            expected[name] = tuple(x + z - y for x, y, z in zip(before, a, b))
        expected = {name: pair for name, pair in expected.items() if pair != (0, 0)}
        assert counts_of(report) == expected, f"reported {counts_of(report)}, asked for {expected} in one step"
        assert one == none or any("how many steps a while_loop takes" in note for note in report.notes), report.notes


# ---------------------------------------------------------------- programs

#: Functions of a vector v, all of whose elements count.
OF_A_VECTOR = [
    "np.tanh(v)",
    "v * np.sum(v)",
    "v - np.mean(v)",
    "v * np.max(v)",
    "v / (1 + np.sqrt(np.sum(v * v)))",
    "np.where(v > 0, v, np.sum(v))",
    "np.cumsum(v) / 9",
    "v[::-1] * v",
    "np.roll(v, 1) - v",
    "np.sort(v)",
    "v + v[0]",
    "np.concatenate([v[3:], v[:3]])",
    "np.outer(v, v).sum(0)",
]
OF_A_LONG_VECTOR = ["np.tanh(M @ v)", "np.sin(v @ M)", "v * np.sum(M @ v)"]  # as long as M
#: What runs a function f once or several times.
AROUND = [
    "(lambda v: md.scan(lambda c, _: (f(c), None), v, length=2)[0])",
    "(lambda v: md.scan(lambda c, r: (c * r, np.sum(c) * r), np.sum(v) / 9, f(v))[1])",
    "(lambda v: md.scan(lambda c, _: (c + np.sum(f(v)), None), 0.0, length=3)[0] * v)",
    "(lambda v: md.fori_loop(0, 3, lambda i, c: f(c) * (i + 1), v))",
    "(lambda v: md.map(lambda r: r * np.sum(f(v)), v))",
    "(lambda v: np.sum(md.map(lambda k: f(v) * k, np.arange(3.0)), 0))",
    "(lambda v: md.while_loop(lambda s: s[1] < 3, lambda s: (f(s[0]), s[1] + 1), (v, 0))[0])",
    "(lambda v: md.while_loop(lambda s: np.sum(s * s) < 9, lambda s: f(s) + 1 + s * s, v))",
    "(lambda v: md.cond(np.sum(v) > 0, f, lambda v: f(v) * 2, v))",
    "(lambda v: md.cond(np.sum(v) > 0, f, lambda v: v, v))",
    "(lambda v: md.switch(1, [np.sin, f], v))",
    "md.checkpoint(f)",
    "md.jit(f)",
    "(lambda v: f(f(v)))",
]
EAGER = {f"f = (lambda f: {around})(f)" for around in ("md.checkpoint(f)", "md.jit(f)", "(lambda v: f(f(v)))")}
NO_REVERSE = "while_loop"  # has no reverse mode
#: Functions of a matrix x, by a function f of vectors.
OF_A_MATRIX = [
    "md.vmap(f)",
    "md.vmap(f, in_axes=1, out_axes=1)",
    "(lambda x: f(x[0]))",
    "(lambda x: f(x[0]) @ x.T)",
    "(lambda x: np.sum(md.vmap(f)(x) @ x.T))",
    "md.vmap(lambda v: md.jvp(f, (v,), (v * 2,))[1])",
    "md.vmap(md.grad(lambda v: np.sum(f(v) ** 2)))",
    "md.grad(lambda x: np.sum(md.vmap(f)(x) ** 2))",
    "md.value_and_grad(lambda x: np.sum(f(x[0]) * x))",
]
#: Statements of a body, about a block v.
IN_A_BODY = [
    "v * psum(np.sum(v), 'i')",
    "v - pmean(v, 'i')",
    "np.tanh(v) * pmax(np.max(v), 'i')",
    "ppermute(v, 'i', [(k, (k + 1) % n) for k in range(n)])",
    "v + all_gather(v, 'i').sum(0)",
    "psum_scatter(np.stack([v] * n), 'i')",
    "all_to_all(np.stack([v] * n), 'i', 0, 0).sum(0)",
    "np.sin(v) * psum(v, 'i') + psum(v * 2, 'i')",
]
OPTIONS = [
    "{}",
    "{}",
    "{'bucket_bytes': 64}",
    "{'without': ['fuse psums']}",
    "{'without': ['fuse shard maps', 'overlap communication']}",
    "{'kernels': False}",
    "{'donate_argnums': ()}",
]


def _nested(rng: random.Random, innermost: Sequence[str], around: Sequence[str]) -> list[str]:
    """Lines that define a function f of a vector."""
    lines = [f"f = lambda v: {rng.choice(innermost)}"]
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2])):
        lines.append(f"f = (lambda f: {rng.choice(around)})(f)")
    return lines


def _steps(rng: random.Random) -> str:
    """A line that checks a loop of as many steps as an argument says."""
    body = rng.choice(OF_A_VECTOR + OF_A_LONG_VECTOR)
    loop = f"md.while_loop(lambda s: s[1] < k, lambda s: ((lambda v: {body})(s[0]), s[1] + 1), (v, 0 * k))[0]"
    f = rng.choice([f"lambda x, k: md.vmap(lambda v: {loop})(x)", f"lambda v, k: {loop}"])
    x = "(4, 12)), mesh, P(None, 'i')" if "vmap" in f else "12), mesh, P('i')"
    return f"""
        check_steps(mesh, {f}, spmd.distribute(rng.normal(size={x}))
    """


def reports(rng: random.Random) -> str:
    kind = rng.choice(["arrays", "arrays", "arrays", "bodies", "steps"])
    reverse = [a for a in AROUND if NO_REVERSE not in a]
    agreed = [a.replace("np.sum(v) > 0", "psum(np.sum(v), 'i') > 0") for a in reverse]  # ranks take the same branch
    start = f"""
        from tests.fuzz.routes.reports import check_reports, check_steps
        n = spmd.process_count() if spmd.process_count() > 1 else {rng.choice([2, 3, 4])}
        mesh = spmd.make_mesh((n,), ("i",))
        rng = numpy.random.default_rng({rng.randrange(100)})
        M = spmd.distribute(rng.normal(size=(12, 12)) / 12, mesh, {rng.choice(["P('i')", "P(None, 'i')", "P()"])})
    """
    if kind == "steps":
        return start + _steps(rng)
    if kind == "bodies":
        matrix, lines = rng.choice(["f", "md.grad(lambda x: np.sum(f(x) ** 2))"]), _nested(rng, IN_A_BODY, agreed)
        lines.append(f"g = spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))\nf = g\ng = {matrix}")
        x, eager = "rng.normal(size=24)", matrix == "f"
    else:
        matrix = rng.choice(OF_A_MATRIX)
        x = rng.choice(["(4, 12)), mesh, P(None, 'i')", "(12, 12)), mesh, P('i')"])
        fits = "in_axes" not in matrix or "(4" not in x  # M is 12 by 12
        innermost = OF_A_VECTOR + OF_A_LONG_VECTOR * fits
        lines = _nested(rng, innermost, reverse if "grad" in matrix else AROUND)
        lines.append(f"g = {matrix}")
        eager = set(lines[1:]) <= EAGER  # op by op, a loop reshards in its first step, and a cond depends on values
        x = f"spmd.distribute(rng.normal(size={x})"
    text = "\n".join(lines).replace("\n", "\n        ")
    return (
        start
        + f"""
        {text}
        check_reports(mesh, g, ({x},), {rng.choice(OPTIONS)}, eager={eager})
    """
    )
