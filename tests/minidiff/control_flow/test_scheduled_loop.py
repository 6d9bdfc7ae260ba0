"""`schedule=` of `scan` and `while_loop`: what loops that follow schedules compute, and what they hold."""

import functools
import gc
import os
import tempfile

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
from tests.checks.meanings import MIXED, REVERSE, check_meaning
from tests.checks.samples import each

SCHEDULES = [md.revolve(1), md.revolve(3), md.multistage(1, 2), md.online(3)]
RNG = np.random.default_rng(0)
W, X, ROWS = RNG.normal(size=(40, 40)) / 7, RNG.normal(size=40), RNG.normal(size=(9, 40))


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
@each("reverse, n", [(False, 9), (True, 4), (False, 0)])
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
    for n in (0, 1, 17) if loop is decays else (17,):
        gradient(0.3, 0.7, n)  # recorded, for types
        del calls[:]
        actual = md.tree.leaves(gradient(0.3, 0.7, n))
        assert len(calls) == n + schedule.advances(n) + n, n
        np.testing.assert_allclose(actual, md.tree.leaves(plain(0.3, 0.7, n)), rtol=0 if loop is decays else 1e-12)


LENGTHS = np.array([3, 0, 17])
PROGRAMS = {
    "scan": powers,
    "while": lambda x, **options: decays(x, x, 7, **options),
    "lengths": lambda x, **options: md.vmap(functools.partial(decays, **options), (None, None, 0))(x, 1.1, LENGTHS),
    "gradients of lengths": lambda x, **options: md.vmap(
        md.grad(functools.partial(decays, **options)), (None, None, 0)
    )(x, 1.1, LENGTHS),
}
KINDS = dict.fromkeys(["scan", "while"], (*REVERSE, *MIXED, "jvp")) | {"lengths": ("grad",)}


@each("schedule", [md.revolve(2), md.online(2), md.multistage(1, 1)])
@each("name", PROGRAMS)
def test_under_transformations(name, schedule):
    f = functools.partial(PROGRAMS[name], schedule=schedule)
    kinds = KINDS.get(name, ("value",))
    check = functools.partial(check_meaning, f, PROGRAMS[name], (np.array([0.3, 0.7, 1.1]),), rtol=1e-11)
    check(kinds if schedule == md.revolve(2) else kinds[:1])
    check(kinds[:1], ["jit", "of checkpoint"] if schedule == md.revolve(2) else ["jit"])


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
