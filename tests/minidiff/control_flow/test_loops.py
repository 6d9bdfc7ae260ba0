"""`scan`, and loops with bounds that are known: what is recorded, several steps at once, and long ones."""

import warnings

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.control_flow import loops
from tests.checks.results import assert_trees_close
from tests.checks.samples import each

XS = np.sin(np.arange(12.0)).reshape(4, 3)


def names(tape):
    return [eqn.primitive.name for eqn in tape.equations]


def size(tape):
    return sum(1 + sum(map(size, eqn.bodies)) for eqn in tape.equations)


def test_a_loop_is_recorded_once():
    """Kept of each step: what the product needs of h, and tanh's derivative; never the weights."""
    f = lambda w, xs: md.scan(lambda h, x: (np.tanh(w @ h + x), None), XS[0], xs)[0].sum()  # noqa: E731
    short, long = (md.make_tape(md.grad(f, (0, 1)))(XS[1:], np.ones((n, 3))) for n in (2, 200))
    assert size(short) == size(long)
    forward, backward = (eqn for eqn in long.equations if eqn.primitive.name == "scan")
    assert [eqn.params["reverse"] for eqn in (forward, backward)] == [False, True]
    assert sorted(v.type.size for v in forward.outputs) == [3, 600, 600]


def test_elements_of_an_array_cost_one_operation():
    """An eager loop takes the array apart once, and its cotangent is put together once."""
    f = lambda xs: md.scan(lambda c, x: (c + x, c + x), np.zeros(3), xs)[1].sum()  # noqa: E731
    _, tape = md.core.reverse.engine.linearize_flat(lambda xs: [f(xs)], [XS], [True])
    recorded = names(tape)
    assert recorded.count("unstack") == recorded.count("stack") == 1 and "slice" not in recorded


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


@each("reverse", [False, True])
@each(
    "n, unroll, lengths, in_body, after",
    [
        *((10, False, [10], [1], 0), (10, 2, [5], [2], 0), (10, 4, [2], [4], 2), (10, 9, [1], [9], 1)),
        *((10, 11, [], [], 10), (10, True, [], [], 10), (1, 1, [1], [1], 0), (0, True, [0], [1], 0)),
    ],
)
def test_how_many_steps_are_recorded(n, unroll, lengths, in_body, after, reverse):
    f = lambda xs: md.scan(lambda h, x: (np.tanh(h + x), h), 0.0, xs, reverse=reverse, unroll=unroll)  # noqa: E731
    tape = md.make_tape(f)(np.ones(n))
    scans = [eqn for eqn in tape.equations if eqn.primitive.name == "scan"]
    assert [eqn.params["length"] for eqn in scans] == lengths
    assert [names(eqn.params["body"]).count("tanh") for eqn in scans] == in_body
    assert names(tape).count("tanh") == after


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
