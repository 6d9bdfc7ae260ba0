"""`schedule=` of `scan` and `while_loop`: lists of actions, and what loops that follow them compute and hold."""

import functools
import gc
import itertools
import math
import os
import tempfile
import xml.etree.ElementTree

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
from tests.checks.samples import each

SCHEDULES = [md.revolve(1), md.revolve(3), md.revolve(30), md.multistage(1, 2), md.online(3)]
RNG = np.random.default_rng(0)
W, X, ROWS = RNG.normal(size=(40, 40)) / 7, RNG.normal(size=40), RNG.normal(size=(9, 40))


def griewank(n, slots):
    """The least number of advances, and of those of one step: Griewank and Walther's formula."""
    r = next(r for r in range(n + 1) if math.comb(slots + r, r) >= n)
    return r * n - math.comb(slots + r, r - 1) if r else 0, r


def advances(schedule, n):
    """Follow a list of actions, and check each one; return how often each step is advanced."""
    slots, at, left, often = {}, 0, n, [0] * n
    for name, step, where in schedule.actions(n):
        if name == "restore":
            assert slots[where] == step
            at = step
            continue
        assert at == step
        if name == "store":
            assert 0 <= where < schedule.slots
            slots[where] = step
        elif name == "advance":
            assert where > step
            often[step:where] = [k + 1 for k in often[step:where]]
            at = where
        else:
            assert name == "reverse" and step == left - 1
            left, at = step, None
    assert left == 0
    return often


@pytest.mark.parametrize(
    "steps, slots",
    [
        pytest.param([*range(30), 57, 100, 500], [1, 2, 3, 5, 8, 30], id="some"),
        pytest.param(range(1, 501), range(1, 31), id="all"),
    ],
)
def test_as_many_advances_as_the_formula(steps, slots):
    for n, s in itertools.product(steps, slots):
        often = advances(md.revolve(s), n)
        assert (sum(often), max(often, default=0)) == griewank(n, s)


@each("slots", [1, 2, 3, 7, 20])
def test_online_knows_no_length(slots):
    sweep = lambda n: [a for a in md.online(slots).actions(n) if a.name in ("advance", "store")]  # noqa: E731
    for n in (1, 2, 9, 40, 90):
        often, (total, most) = advances(md.online(slots), n), griewank(n, slots)
        assert max(often) == most and total <= sum(often) <= 1.5 * total
        first = [a for a in md.online(slots).actions(n + 30) if a.name == "store"][:slots]
        assert [a for a in sweep(n) if a.name == "store"][:slots] == first[: min(n - 1 or 1, slots)]


def test_multistage_puts_least_used_states_on_disk():
    schedule = md.multistage(2, 3)
    assert advances(schedule, 40) == advances(md.revolve(5), 40)
    uses = [a.where for a in schedule.actions(40) if a.name in ("store", "restore")]
    counts = [uses.count(slot) for slot in range(5)]
    assert counts[1] >= max(counts[2:]) > 0  # slot 0 has the initial state, which is there anyway


def test_a_picture_has_all_actions(tmp_path):
    schedule = md.multistage(2, 2)
    path = md.draw(schedule)(30).render(tmp_path / "schedule.svg")
    drawn = [x.get("stroke") for x in xml.etree.ElementTree.parse(path).iter() if x.tag.endswith("path")]
    names = [a.name for a in schedule.actions(30)]
    assert [drawn.count(color) for color in ("#4c78a8", "#e45756")] == [names.count("advance"), 30]
    assert drawn.count("#9aa5b1") + drawn.count("#b8860b") == names.count("restore")
    assert f"30 steps, 4 slots: {sum(advances(schedule, 30))} steps again" in path.read_text()
    with pytest.raises(ValueError, match=r"is drawn as \.svg, not \.png"):
        md.draw(schedule)(30).render(tmp_path / "schedule.png")


# ---------------------------------------------------------------- what loops compute


def layers(w, x, rows, reverse=False, **options):
    """A weight that is used twice; elements and results; an integer and a complex number among the carries."""

    def step(carry, row):
        h = mnp.tanh(w @ carry["h"]) + row
        turned = carry["z"] * (0.9 + 0.3j)
        return {"h": h + 0.1 * mnp.cos(w @ h), "n": carry["n"] + 1, "z": turned}, mnp.abs(turned) * h

    carry, ys = md.scan(step, {"h": x, "n": 0, "z": x + 1j}, rows, reverse=reverse, **options)
    return mnp.sum(carry["h"] ** 2) + mnp.sum(ys**2) + mnp.real(mnp.sum(carry["z"])) * carry["n"]


def waves(x, rows, reverse=False, **options):
    """Elementwise alone, so that kernels have the same bits, too."""

    def step(carry, row):
        u, before = carry
        return (2 * u - before + 0.1 * mnp.sin(u) * row, u), u * before

    (u, _), ys = md.scan(step, (x, x), rows, reverse=reverse, **options)
    return mnp.sum(u**2) + mnp.sum(ys)


def products(w, x, rows, reverse=False, **options):
    x, ys = md.scan(lambda x, row: (mnp.tanh(w @ x) + row, mnp.cos(x)), x, rows, reverse=reverse, **options)
    return mnp.sum(x**2) + mnp.sum(ys)


@each("schedule", SCHEDULES)
@each("reverse, n", [(False, 9), (True, 9), (False, 0), (False, 1), (True, 2)])
@each(
    "f, args, run",
    [
        (layers, (W, X, ROWS), lambda f: f),
        (waves, (X, ROWS), md.jit),
        (products, (W, X, ROWS), functools.partial(md.jit, kernels=False)),
        (products, (W[:4, :4], X[:4], ROWS[:, :4]), functools.partial(md.jit, kernels=False)),
    ],
    ["eager", "kernels", "compiled", "compiled, small"],
)
def test_the_same_bits(f, args, run, schedule, reverse, n):
    results = [
        run(md.value_and_grad(functools.partial(f, reverse=reverse, schedule=s), tuple(range(len(args)))))(
            *args[:-1], args[-1][:n]
        )
        for s in (None, schedule)
    ]
    for a, b in zip(*map(md.tree.leaves, results)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def powers(x, **options):
    """A step has its own results, and all derivatives; an integer is among the carries."""
    step = lambda c, _: ((mnp.sin(c[0]) * c[0][::-1], c[1] + 1), mnp.sum(c[0] ** 3))  # noqa: E731
    (last, n), ys = md.scan(step, (x, 0), length=7, **options)
    return n * mnp.sum(last) + mnp.sum(ys)


def decays(x, w, steps, f=mnp.exp, **options):
    """A loop of so many steps, and at most 40; an integer is among the carries."""
    step = lambda s: (w * f(-s[0]) + 0.1 * s[0], s[1] + 1)  # noqa: E731
    return mnp.sum(md.while_loop(lambda s: s[1] < steps, step, (x, 0), max_steps=40, **options)[0] ** 2)


def scanned(x, w, steps, f=mnp.exp, **options):
    """The same in a loop of a known length."""
    return mnp.sum(md.scan(lambda x, _: (w * f(-x) + 0.1 * x, None), x, length=steps, **options)[0] ** 2)


@each("run", [lambda f, **_: f, md.jit], ["eager", "jit"])
@each("schedule", SCHEDULES[1:])
@each("loop", [decays, scanned])
def test_as_many_steps_run_as_the_schedule_says(loop, schedule, run):
    """Forward; again; and each once more, where it is reversed."""
    calls = []

    @md.custom_jvp
    def exp(x):
        return md.pure_callback(lambda x: calls.append(0) or np.exp(x), x, x)

    exp.defjvps(lambda t, out, x: t * out)
    static = {} if loop is decays else {"static_argnums": 2}
    gradient, plain = (
        run(md.value_and_grad(lambda x, w, n, o=options: loop(x, w, n, **o), (0, 1)), **static)
        for options in ({"f": exp, "schedule": schedule}, {})
    )
    for n in (3, 0, 1, 2, 17, 40) if loop is decays else (17,):
        gradient(0.3, 0.7, n)  # recorded, for types
        del calls[:]
        actual = md.tree.leaves(gradient(0.3, 0.7, n))
        assert len(calls) == n + schedule.advances(n) + n, n
        np.testing.assert_allclose(actual, md.tree.leaves(plain(0.3, 0.7, n)), rtol=0 if loop is decays else 1e-12)
        assert schedule.kind == "online" or schedule.advances(n) == griewank(n, schedule.slots)[0]


def test_tables_of_fewer_steps_fit_into_those_of_more():
    for schedule in SCHEDULES:
        advances = [schedule.advances(n) for n in range(80)]
        assert advances == sorted(advances)


LENGTHS = np.array([3, 0, 17])
OF_X = {
    "reverse over reverse": lambda f: md.jacrev(md.grad(f)),
    "forward over reverse": md.hessian,
    "reverse over forward": lambda f: md.jacrev(md.jacfwd(f)),
    "forward": md.jacfwd,
    "vmap of grad": lambda f: lambda x: md.vmap(md.grad(f))(np.stack([x, 2 * x])),
    "grad of vmap": lambda f: md.grad(lambda x: mnp.sum(md.vmap(f)(mnp.stack([x, x * x])))),
    "of a checkpoint": lambda f: md.grad(md.checkpoint(f)),
    "a pullback, twice": lambda f: lambda x: [md.vjp(f, x)[1](ct)[0] for ct in (1.0, -2.0)],
}
#: Properties of `powers`, and of `decays`, whose steps are closed over, or differ between elements of a batch.
TRANSFORMED = {
    **{f"scan, {name}": (powers, of) for name, of in OF_X.items()},
    **{
        f"while, {name}": (decays, lambda f, of=OF_X[name]: of(lambda x: f(x, x, 7)))
        for name in ("reverse over reverse", "forward over reverse", "forward", "vmap of grad")
    },
    "lengths": (decays, lambda f: lambda x: md.vmap(md.grad(f), (None, None, 0))(x, 1.1, LENGTHS)),
    "sum of lengths": (decays, lambda f: md.grad(lambda x: mnp.sum(md.vmap(f, (None, None, 0))(x, 1.1, LENGTHS)))),
}


@each("run", [lambda f: f, md.jit], ["eager", "jit"])
@each("schedule", [md.revolve(2), md.online(2), md.multistage(1, 1)])
@each("f, of", TRANSFORMED.values(), TRANSFORMED)
def test_under_transformations(f, of, schedule, run):
    x = np.array([0.3, 0.7, 1.1])
    actual, expected = (run(of(g))(x) for g in (functools.partial(f, schedule=schedule), f))
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_more_steps_than_the_largest_number_are_an_error():
    scheduled = functools.partial(decays, schedule=md.online(2))
    for f in (scheduled, md.jit(md.grad(scheduled))):
        with pytest.raises(RuntimeError):
            f(0.3, 0.7, 41)


@each("jit", [False, True])
def test_nothing_is_left_on_disk(jit, tmp_path, monkeypatch):
    """Files have no name while they are in use, and none is left after a step that fails."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []

    def look(x):
        with open("/proc/self/maps") as maps:
            seen.append((sum(str(tmp_path) in line for line in maps), os.listdir(tmp_path)))
        if fails and len(seen) > 20:
            raise ArithmeticError("a step failed")
        return x

    def loss(x):
        step = lambda c, _: (mnp.sin(c) + md.pure_callback(look, c, md.stop_gradient(c)), None)  # noqa: E731
        return mnp.sum(md.scan(step, x, length=12, schedule=md.multistage(1, 4))[0])

    gradient = md.jit(md.value_and_grad(loss)) if jit else md.value_and_grad(loss)
    for fails in (False, True):
        del seen[:]
        if fails:
            with pytest.raises(ArithmeticError):
                gradient(X)
        else:
            gradient(X)
        assert max(count for count, _ in seen) >= 3 and not any(names for _, names in seen)
        gc.collect()
        with open("/proc/self/maps") as maps:
            assert str(tmp_path) not in maps.read()
