"""`schedule=` of `scan` and `while_loop`: lists of actions, and what loops that follow them compute and hold."""

import functools
import gc
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


def check_counts(steps, slots):
    for n in steps:
        for s in slots:
            often = advances(md.revolve(s), n)
            assert (sum(often), max(often, default=0)) == griewank(n, s)


def test_as_many_advances_as_the_formula():
    check_counts([*range(30), 57, 100, 500], [1, 2, 3, 5, 8, 30])


def test_as_many_advances_as_the_formula_for_all():
    check_counts(range(1, 501), range(1, 31))


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


def check_same_bits(f, args, schedule, compiled):
    for reverse, n in ((False, 9), (True, 9), (False, 0), (False, 1), (True, 2)):
        programs = [functools.partial(f, reverse=reverse, schedule=s) for s in (None, schedule)]
        everything = tuple(range(len(args)))
        results = [compiled(md.value_and_grad(g, everything))(*args[:-1], args[-1][:n]) for g in programs]
        for a, b in zip(*map(md.tree.leaves, results)):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@each("schedule", SCHEDULES)
def test_the_same_bits(schedule):
    check_same_bits(layers, (W, X, ROWS), schedule, lambda f: f)


@each("schedule", SCHEDULES[1::2])
def test_the_same_bits_compiled(schedule):
    check_same_bits(waves, (X, ROWS), schedule, md.jit)
    check_same_bits(products, (W, X, ROWS), schedule, functools.partial(md.jit, kernels=False))
    check_same_bits(products, (W[:4, :4], X[:4], ROWS[:, :4]), schedule, functools.partial(md.jit, kernels=False))


def powers(x, **options):
    """A step has its own results, and all derivatives; an integer is among the carries."""
    step = lambda c, _: ((mnp.sin(c[0]) * c[0][::-1], c[1] + 1), mnp.sum(c[0] ** 3))  # noqa: E731
    (last, n), ys = md.scan(step, (x, 0), length=7, **options)
    return n * mnp.sum(last) + mnp.sum(ys)


TRANSFORMED = {
    "reverse over reverse": lambda f: md.jacrev(md.grad(f)),
    "forward over reverse": md.hessian,
    "reverse over forward": lambda f: md.jacrev(md.jacfwd(f)),
    "forward": md.jacfwd,
    "vmap of grad": lambda f: lambda x: md.vmap(md.grad(f))(np.stack([x, 2 * x])),
    "grad of vmap": lambda f: md.grad(lambda x: mnp.sum(md.vmap(f)(mnp.stack([x, x * x])))),
    "of a checkpoint": lambda f: md.grad(md.checkpoint(f)),
    "a pullback, twice": lambda f: lambda x: [md.vjp(f, x)[1](ct)[0] for ct in (1.0, -2.0)],
}


@each("jit", [False, True])
@each("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_under_transformations(transformed, jit):
    compiled, x = md.jit if jit else lambda f: f, np.array([0.3, 0.7, 1.1])
    for schedule in (md.revolve(2), md.multistage(1, 1)):
        got = compiled(transformed(lambda x: powers(x, schedule=schedule)))(x)  # noqa: B023
        np.testing.assert_allclose(got, compiled(transformed(powers))(x), rtol=1e-12)


@each("jit", [False, True])
@each("schedule", SCHEDULES[1::2])
def test_as_many_steps_run_as_the_schedule_says(schedule, jit):
    n, calls = 17, []

    @md.custom_jvp
    def decay(x):
        return md.pure_callback(lambda x: calls.append(0) or np.exp(-x), x, x)

    decay.defjvps(lambda t, out, x: -t * out)
    scanned = lambda f, x, **options: md.scan(lambda c, _: (f(c), None), x, length=n, **options)[0] ** 2  # noqa: E731
    gradient = md.value_and_grad(lambda x: scanned(decay, x, schedule=schedule))
    gradient = md.jit(gradient) if jit else gradient
    gradient(1.0)
    del calls[:]
    slope = gradient(1.0)[1]
    assert len(calls) == n + schedule.advances(n) + n  # forward; again; and each once more, where it is reversed
    assert schedule.kind == "online" or schedule.advances(n) == griewank(n, schedule.slots)[0]
    assert slope == pytest.approx(md.grad(lambda x: scanned(lambda x: mnp.exp(-x), x))(1.0))


# ---------------------------------------------------------------- loops whose length is not known


def decays(x, w, steps, f=mnp.exp, **options):
    """A loop of so many steps, and at most 40; an integer is among the carries."""
    step = lambda s: (w * f(-s[0]) + 0.1 * s[0], s[1] + 1)  # noqa: E731
    return mnp.sum(md.while_loop(lambda s: s[1] < steps, step, (x, 0), max_steps=40, **options)[0] ** 2)


@each("jit", [False, True])
@each("schedule", SCHEDULES[1:])
def test_a_while_loop_runs_the_steps_that_the_schedule_of_its_length_says(schedule, jit):
    calls = []

    @md.custom_jvp
    def exp(x):
        return md.pure_callback(lambda x: calls.append(0) or np.exp(x), x, x)

    exp.defjvps(lambda t, out, x: t * out)
    gradient = md.value_and_grad(lambda x, w, n: decays(x, w, n, exp, schedule=schedule), (0, 1))
    gradient = md.jit(gradient) if jit else gradient
    plain = md.value_and_grad(decays, (0, 1))
    plain = md.jit(plain) if jit else plain
    gradient(0.3, 0.7, 3)
    for n in (0, 1, 2, 17, 40):
        del calls[:]
        actual = md.tree.leaves(gradient(0.3, 0.7, n))
        assert len(calls) == n + schedule.advances(n) + n, n
        assert np.array(actual).tobytes() == np.array(md.tree.leaves(plain(0.3, 0.7, n))).tobytes()
    assert schedule.kind == "online" or schedule.advances(17) == griewank(17, schedule.slots)[0]


def test_tables_of_fewer_steps_fit_into_those_of_more():
    for schedule in SCHEDULES:
        advances = [schedule.advances(n) for n in range(80)]
        assert advances == sorted(advances)


LENGTHS = np.array([3, 0, 17])
OF_LENGTHS = {
    "forward over reverse": lambda f: md.hessian(lambda x: f(x, 1.1, 7)),
    "reverse over reverse": lambda f: md.jacrev(md.grad(lambda x: f(x, x, 7))),
    "forward": lambda f: md.jacfwd(lambda x: f(x, 1.1, 7)),
    "vmap of grad": lambda f: lambda x: md.vmap(md.grad(f), (None, None, 0))(x, 1.1, LENGTHS),
    "elements": lambda f: lambda x: md.vmap(md.grad(f), (0, None, None))(np.stack([x, 2 * x]), 1.1, 7),
    "grad of vmap": lambda f: md.grad(lambda x: mnp.sum(md.vmap(f, (None, None, 0))(x, 1.1, LENGTHS))),
}


@each("jit", [False, True])
@each("transformed", OF_LENGTHS.values(), ids=OF_LENGTHS)
def test_a_while_loop_under_transformations(transformed, jit):
    compiled, x = md.jit if jit else lambda f: f, np.array([0.3, 0.7])
    for schedule in (md.online(2), md.multistage(1, 1)):
        got = compiled(transformed(functools.partial(decays, schedule=schedule)))(x)
        np.testing.assert_allclose(got, compiled(transformed(decays))(x), rtol=1e-12)


def test_more_steps_than_the_largest_number_are_an_error():
    scheduled = functools.partial(decays, schedule=md.online(2))
    for f in (scheduled, md.jit(md.grad(scheduled))):
        with pytest.raises(RuntimeError, match="still holds after max_steps=40 steps"):
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
            with pytest.raises(ArithmeticError, match="a step failed"):
                gradient(X)
        else:
            gradient(X)
        assert max(count for count, _ in seen) >= 3 and not any(names for _, names in seen)
        gc.collect()
        with open("/proc/self/maps") as maps:
            assert str(tmp_path) not in maps.read()


def test_wrong_arguments():
    step = lambda c, _: (c, None)  # noqa: E731
    with pytest.raises(TypeError, match=r"schedule must be md\.revolve\(slots\), or multistage or online, got 3"):
        md.scan(step, 1.0, length=3, schedule=3)
    with pytest.raises(TypeError, match=r"while_loop: schedule must be md\.revolve\(slots\)"):
        md.while_loop(lambda c: False, lambda c: c, 1.0, max_steps=3, schedule=3)
    with pytest.raises(ValueError, match="a schedule needs max_steps="):
        md.while_loop(lambda c: False, lambda c: c, 1.0, schedule=md.online(2))
    for make in (md.revolve, md.online, lambda slots: md.multistage(slots, 1)):
        with pytest.raises(ValueError, match="at least 1 state must be in memory"):
            make(0)
