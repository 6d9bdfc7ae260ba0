"""Loops with bounds that are known: linear ones, and long ones; `recorded.md` shows what is recorded of them."""

import warnings

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.control_flow import loops
from tests.checks.results import assert_trees_close
from tests.checks.samples import each

XS = np.sin(np.arange(12.0)).reshape(4, 3)


@each("run", [lambda f, x: f, lambda f, x: lambda x: tuple(md.make_tape(f)(x)(x))])
def test_a_linear_loop_is_transposed(run):
    """Also beside a carry that is not linear."""

    def f(x):
        def step(carry, k):
            n, r, y = carry
            return (n + 1, np.sin(r) + k, y * r * n + y[::-1]), y * 2.0

        (_, _, y), ys = md.scan(step, (1, 0.5, x), np.arange(3.0))
        return md.fori_loop(0, 2, lambda i, c: c * (i + 1), y), md.cond(True, lambda y: -y, lambda y: y, ys)

    x, ct = XS[0], (XS[1], XS[1:])
    g = run(f, x)
    assert_trees_close(md.linear_transpose(g, x)(ct), md.vjp(f, x)[1](ct))
    assert_trees_close(md.linear_transpose(lambda ct: md.linear_transpose(g, x)(ct)[0], ct)(x)[0], f(x))


@pytest.mark.parametrize("steps", [29, 30, 90])
def test_a_long_eager_loop_suggests_jit_once(steps, monkeypatch):
    monkeypatch.setattr(loops, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(loops, "MANY_STEPS", 30)
    programs = {
        "scan": lambda x: md.scan(lambda c, _: (c + 1, c), x, length=steps),
        "while_loop": lambda x: md.while_loop(lambda c: np.max(c) < steps, lambda c: c + 1, x),
    }
    for name, f in programs.items():
        for run, suggests in {f: steps >= 30, md.jit(f, kernels=False): False}.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run(0.0)
                run(numpy.zeros(loops.FEW_NUMBERS + 1))  # the calls do not take most of the time
            assert [str(w.message).split(" took ")[0] for w in caught] == [f"30 steps of this {name}"] * suggests
            assert all(w.filename == __file__ for w in caught)
