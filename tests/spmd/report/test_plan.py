"""The plan of a tiny decoder on eight devices: what it finds, why, and what it says of bad input."""

import functools
import itertools
import re

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean, psum
from minidiff.nn import softmax
from spmd import P
from spmd.machines import A100
from spmd.report.plan import Choice, _factorizations, bytes_along
from tests.checks.meshes import mapped, mesh

DEVICES, EXAMPLES, TOKENS, FEATURES, HEADS, SIZE, HIDDEN = 8, 64, 128, 512, 8, 64, 2048
SPECS = {"qkv": P(None, None, "feats"), "out": P("feats"), "up": P(None, "feats"), "down": P("feats")}
OPTIONS = {"microbatch": (1, 4), "recompute": ("full", None)}
FIXED = {"devices": DEVICES, "axes": ("data", "feats"), "schedule": ["one_f_one_b"], "chunks": [1], "zero": [0]}


def layer(params, x):
    query, key, value = np.einsum("btf,cfhs->cbths", x, params["qkv"])
    weights = softmax(np.einsum("bths,buhs->bhtu", query, key))
    attended = np.einsum("bhtu,buhs->bths", weights, value)
    x = x + psum(np.einsum("bths,hsf->btf", attended, params["out"]), "feats")
    return x + psum(np.tanh(x @ params["up"]) @ params["down"], "feats")


def make_step(choice):
    """A layer with its gradients, one microbatch after the other."""
    if HEADS % choice.feats or EXAMPLES % (choice.data * choice.microbatch):
        raise ValueError(f"{choice} does not divide {HEADS} heads and {EXAMPLES} examples")
    block = md.checkpoint(layer) if choice.recompute else layer

    def step(params, x):
        def loss(params):
            parts = x.reshape(-1, choice.microbatch, *x.shape[1:])
            return pmean(np.mean(md.map(lambda x: np.sum(block(params, x) ** 2), parts)), "data")

        return md.grad(loss)(params)

    t = lambda *shape: md.ShapedArray(shape, "float32")  # noqa: E731
    shapes = (3, FEATURES, HEADS, SIZE), (HEADS, SIZE, FEATURES), (FEATURES, HIDDEN), (HIDDEN, FEATURES)
    params = {name: t(*shape) for name, shape in zip(SPECS, shapes)}
    over = mesh(choice.data, choice.feats, names=("data", "feats"))
    return mapped(step, over, (SPECS, P("data")), SPECS), (params, t(EXAMPLES, TOKENS, FEATURES))


@functools.cache
def planned(**options):
    return spmd.plan(make_step, A100, **FIXED, **OPTIONS, **options)


@functools.cache
def price_plan():
    """The seconds and bytes of every choice, by `predict` alone."""
    actual = {}
    for sizes, (m, r) in itertools.product(_factorizations(DEVICES, 2), itertools.product(*OPTIONS.values())):
        choice = Choice(data=sizes[0], feats=sizes[1], microbatch=m, recompute=r)
        try:
            step, types = make_step(choice)
        except ValueError:
            continue
        report = spmd.predict(step, A100)(*types)
        actual[choice] = report.seconds, sum(report.memory.values())
    return actual


def test_it_finds_what_brute_force_finds():
    actual = planned()
    assert actual.complete and {c.choice for c in actual.predicted} == {*price_plan()}
    assert actual.best.seconds == pytest.approx(min(seconds for seconds, _ in price_plan().values()))
    assert all(c.memory == price_plan()[c.choice][1] for c in actual.predicted)


def test_descent_finds_the_same_with_fewer_predictions():
    actual = planned(tries=12)
    assert not actual.complete and len(actual.predicted) <= 12 < len(price_plan())
    assert actual.best.seconds == planned().best.seconds


def test_more_memory_never_gives_a_slower_plan():
    needs = sorted({c.memory for c in planned().predicted})
    times = [planned(memory=need).best.seconds for need in (needs[0], needs[len(needs) // 2], needs[-1])]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    assert all(c.memory <= needs[0] for c in planned(memory=needs[0]).choices)


def test_the_front_has_what_no_other_choice_beats():
    actual = planned()
    for c in actual.predicted:
        beaten = any(o.seconds <= c.seconds and o.memory < c.memory for o in actual.predicted)
        beaten |= any(o.seconds < c.seconds and o.memory <= c.memory for o in actual.predicted)
        assert c not in actual.front or not beaten


def test_the_table_says_why_others_take_longer():
    actual = planned()
    text = str(actual)
    assert "the best" in text and f"{len(actual.predicted)} choices are predicted" in text
    assert "exposed psum along feats" in actual.choices[-1].against(actual.best)
    whole = next(c for c in actual.choices if c.choice.recompute and not actual.best.choice.recompute)
    assert "%" in whole.against(actual.best)
    assert actual.best.against(actual.best) == "as fast"


def test_axes_are_placed_by_the_bytes_that_they_carry():
    for devices in (16, 32):
        options = {**FIXED, "devices": devices, "microbatch": [1], "recompute": [None]}
        for c in spmd.plan(make_step, A100, **options).choices:
            volume = bytes_along(c.prediction)
            if volume["feats"] > 2 * volume["data"] > 0:
                assert c.placed.axes[0][0] == "feats"
                assert c.slowest()["feats"] == "NVLink" and c.slowest()["data"] == "InfiniBand"


def test_an_axis_that_leaves_the_fast_link_is_named():
    slow = spmd.machines.link("slow", float("inf"), 1e-5, 1e8)
    machine = A100.replace(links=(spmd.machines.link("fast", 2, 1e-6, 1e11), slow))
    actual = spmd.plan(make_step, machine, **FIXED, microbatch=[1], recompute=[None])
    reasons = [c.against(actual.best) for c in actual.choices[1:]]
    assert any(re.search(r"^(data|feats)=\d leaves fast: \+\d+ % exposed psum along (data|feats)", r) for r in reasons)


def test_a_choice_that_does_not_fit_is_counted_with_its_reason():
    actual = spmd.plan(make_step, A100, **{**FIXED, "devices": 16}, microbatch=[1], recompute=[None])
    (rejected,) = actual.rejected.items()
    assert rejected[0] == Choice(feats=16) and "does not divide 8 heads" in rejected[1]
    assert "1 do not fit the model" in str(actual)


def test_bad_input():
    with pytest.raises(ValueError, match="data=7 does not divide"):
        spmd.plan(make_step, A100, **{**FIXED, "devices": 7}, microbatch=[1], recompute=[None])
    least = min(nbytes for _, nbytes in price_plan().values())
    with pytest.raises(ValueError, match=rf"fits in 0.000977 GiB .* smallest need is {least / 2**30:.3g} GiB, of "):
        planned(memory=2**20)


def test_plot():
    pytest.importorskip("matplotlib").use("Agg")
    ax = planned().plot()
    assert ax.get_ylabel() == "seconds a step" and len(ax.get_lines()) == 3
