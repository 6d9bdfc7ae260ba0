"""The numbers of a cost model: fitted to times, and measured."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from collectives.cost import Cost, price
from spmd import CostModel
from spmd.prices.calibrate import _PARAMETERS, calibrate, fit_costs
from tests.checks.meshes import mesh
from tests.checks.samples import each

COSTS = [price(name, 8, 2**k) for name in _PARAMETERS for k in range(4, 20, 3)]
numbers = st.floats(1e-9, 1e-3)


@settings(max_examples=25, deadline=None)
@given(numbers, numbers)
@example(1e-9, 1e-3)
@example(1e-3, 1e-9)
def test_exact_times_are_fitted_exactly(alpha, beta):
    actual = fit_costs([(cost, cost.seconds(alpha, beta)) for cost in COSTS])
    times = np.array([[cost.seconds(*model) for cost in COSTS] for model in ((alpha, beta), actual)])
    np.testing.assert_allclose(times[1], times[0], rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.floats(1e-7, 1e-3), st.floats(1e-11, 1e-8))
def test_noise_and_odd_times_do_little(seed, alpha, beta):
    """Times off by 10% or so, and every fifth one twenty times too long."""
    rng = np.random.default_rng(seed)
    noise = np.exp(rng.normal(0, 0.1, len(COSTS)))
    noise[rng.permutation(len(COSTS))[: len(COSTS) // 5]] *= 20
    times = np.array([cost.seconds(alpha, beta) for cost in COSTS])
    actual = fit_costs(list(zip(COSTS, times * noise)))
    ratios = [cost.seconds(*actual) / t for cost, t in zip(COSTS, times)]
    assert 0.7 < np.median(ratios) < 1.4


@each("numbers", [(0.0, 1e-9), (1e-6, 0.0)])
def test_one_of_the_numbers_may_be_zero(numbers):
    costs = [Cost(1, 10), Cost(1, 1000), Cost(3, 30000)]
    assert fit_costs([(cost, cost.seconds(*numbers)) for cost in costs]) == pytest.approx(numbers, abs=1e-15)


def test_numbers_are_never_negative():
    assert min(fit_costs([(Cost(1, 100), 5.0), (Cost(1, 200), 4.0), (Cost(1, 400), 3.0)])) >= 0


TRUE = CostModel(
    alpha={"i": 1e-6, "j": 3e-5},
    beta={"i": 1e-10, "j": 2e-9},
    algorithms="fastest",
    factors={"psum": 0.6, "all_gather": 1.0, "psum_scatter": 1.0, "all_to_all": 1.5, "ppermute": 0.8},
)


SUMMING = replace(TRUE, gamma=5e-10, factors={})


@pytest.mark.parametrize("shape, model", [((2, 2), TRUE), ((2, 2), SUMMING), ((5, 3), TRUE)])
def test_models_of_each_axis_are_found(shape, model, monkeypatch):
    """Times of a known model, a fifth of them far too long: the model found predicts the others."""
    rng = np.random.default_rng(0)

    def seconds(mesh, case):
        noise = 1 if rng.random() < 0.8 else 20
        return noise * model.seconds(case.name, case.params["size"], case.nbytes, case.params["axes"])

    monkeypatch.setattr(sys.modules["spmd.prices.calibrate"], "_time", seconds)
    monkeypatch.setattr(sys.modules["spmd.prices.calibrate"], "_seconds_a_byte_summed", lambda *_: model.gamma)
    actual = calibrate(mesh(*shape), repeats=40)
    assert max(actual.residual) < 1e-6
    for axis in "ij":
        sum_, message = (actual.seconds(name, shape["ij".index(axis)], 777, (axis,)) for name in ("psum", "ppermute"))
        assert sum_ == pytest.approx(model.seconds("psum", shape["ij".index(axis)], 777, (axis,)))
        assert message == pytest.approx(model.seconds("ppermute", 2, 777, (axis,)))


def test_the_median_of_the_repeats_counts(monkeypatch):
    times = iter([3.0, 2.0, 2.5, 9.0, 2.0, 2.0])
    monkeypatch.setattr(sys.modules["spmd.prices.calibrate"], "_time", lambda mesh, case: next(times))
    model = calibrate(mesh(2), collectives=["psum"], sizes=(8, 800), repeats=3)
    assert [m.seconds for m in model.measurements] == [2.5, 2.0]
