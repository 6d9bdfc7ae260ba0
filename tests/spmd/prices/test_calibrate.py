"""The cost model: fitted, made by hand, and what it predicts of programs."""

import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import minidiff as md
import spmd
from collectives import all_gather, all_to_all, pmax, ppermute, psum, psum_scatter
from collectives.cost import ALGORITHMS, Cost, fastest, price
from spmd import CostModel, P
from spmd.prices.calibrate import _PARAMETERS, calibrate, fit_costs
from spmd.prices.forecast import AS_MANY, Measurement
from spmd.show import show_seconds

MODEL = CostModel(alpha=1e-6, beta=1e-9)


def mesh_of(*shape):
    return spmd.make_mesh(shape, ("i", "j")[: len(shape)], backend="simulated")


def mapped(f, mesh, in_specs=P("i"), out_specs=P("i")):
    return spmd.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


# ---------------------------------------------------------------- fitting

COSTS = [price(name, 8, 2**k) for name in _PARAMETERS for k in range(4, 20, 3)]
numbers = st.floats(1e-9, 1e-3)


@settings(max_examples=50, deadline=None)
@given(numbers, numbers)
@example(1e-9, 1e-3)
@example(1e-3, 1e-9)
def test_exact_times_are_fitted_exactly(alpha, beta):
    actual = fit_costs([(cost, cost.seconds(alpha, beta)) for cost in COSTS])
    times = np.array([[cost.seconds(*model) for cost in COSTS] for model in ((alpha, beta), actual)])
    np.testing.assert_allclose(times[1], times[0], rtol=1e-6)


@settings(max_examples=50, deadline=None)
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


@pytest.mark.parametrize("numbers", [(0.0, 1e-9), (1e-6, 0.0)])
def test_one_of_the_numbers_may_be_zero(numbers):
    costs = [Cost(1, 10), Cost(1, 1000), Cost(3, 30000)]
    assert fit_costs([(cost, cost.seconds(*numbers)) for cost in costs]) == pytest.approx(numbers, abs=1e-15)


def test_numbers_are_never_negative():
    alpha, beta = fit_costs([(Cost(1, 100), 5.0), (Cost(1, 200), 4.0), (Cost(1, 400), 3.0)])
    assert alpha >= 0
    assert beta >= 0


def test_proportional_costs_cannot_be_fitted():
    with pytest.raises(ValueError, match=r"cannot tell steps from bytes: .* Measure messages of several sizes"):
        fit_costs([(Cost(1, 100), 1.0), (Cost(2, 200), 2.0)])


# ---------------------------------------------------------------- measuring


def test_measurements_on_simulated_ranks():
    """Each axis by itself; together if asked. An axis of one rank gets the largest numbers."""
    mesh = spmd.make_mesh((2, 1, 3), ("i", "one", "j"), backend="simulated")
    model = calibrate(mesh, sizes=(8, 4096), repeats=2)
    assert {m.collective for m in model.measurements} == set(_PARAMETERS) == {*model.factors}
    assert {(m.axes, m.ranks) for m in model.measurements} == {(("i",), 2), (("j",), 3)}
    assert all(m.seconds > 0 for m in model.measurements)
    assert model.source == "fitted to times on 2 and 3 simulated ranks (copies in memory, no network)"
    for numbers in (model.alpha, model.beta):
        assert [*numbers] == ["i", "one", "j"]
        assert numbers["one"] == max(numbers["i"], numbers["j"])
    together = calibrate(mesh, ("i", "j"), sizes=(8, 4096), repeats=2)
    assert {(m.axes, m.ranks) for m in together.measurements} == {(("i", "j"), 6)}
    assert isinstance(together.alpha, float)
    assert not mesh.calls  # what is measured is no part of what programs communicate


TRUE = CostModel(
    alpha={"i": 1e-6, "j": 3e-5},
    beta={"i": 1e-10, "j": 2e-9},
    algorithms="fastest",
    factors={"psum": 0.6, "all_gather": 1.0, "psum_scatter": 1.0, "all_to_all": 1.5, "ppermute": 0.8},
)


SUMMING = replace(TRUE, gamma=5e-10, factors={})


@pytest.mark.parametrize("model", [TRUE, SUMMING], ids=["factors", "gamma"])
@pytest.mark.parametrize("shape", [(2, 2), (8, 4), (5, 3)])
def test_models_of_each_axis_are_found(shape, model, monkeypatch):
    """Times of a known model, a fifth of them far too long: the model found predicts the others."""
    rng = np.random.default_rng(0)

    def seconds(mesh, case):
        noise = 1 if rng.random() < 0.8 else 20
        return noise * model.seconds(case.name, case.params["size"], case.nbytes, case.params["axes"])

    monkeypatch.setattr(sys.modules["spmd.prices.calibrate"], "_time", seconds)
    monkeypatch.setattr(sys.modules["spmd.prices.calibrate"], "_seconds_a_byte_summed", lambda *_: model.gamma)
    actual = calibrate(mesh_of(*shape), repeats=40)
    assert actual.residual.median < 1e-6
    assert actual.residual.worst < 1e-6
    for axis in "ij":
        sum_, message = (actual.seconds(name, shape["ij".index(axis)], 777, (axis,)) for name in ("psum", "ppermute"))
        assert sum_ == pytest.approx(model.seconds("psum", shape["ij".index(axis)], 777, (axis,)))
        assert message == pytest.approx(model.seconds("ppermute", 2, 777, (axis,)))


def test_measurements_are_handed_whole_parts():
    """Arrays that are split are padded to equal parts; gathered ones have the stated size."""
    model = calibrate(mesh_of(3), collectives=["psum", "psum_scatter", "all_gather"], sizes=(10, 1000), repeats=1)
    assert [m.nbytes for m in model.measurements] == [16, 1000, 24, 1008, 8, 336]


def test_measurements_along_an_axis():
    model = calibrate(mesh_of(2, 3), "j", collectives=["ppermute", "psum"], sizes=(8, 800), repeats=1)
    assert {m.ranks for m in model.measurements} == {3}
    assert "3 simulated ranks" in model.source


def test_what_is_measured_is_the_collective(monkeypatch):
    """The median of the repeats counts."""
    times = iter([3.0, 2.0, 2.5, 9.0, 2.0, 2.0])
    monkeypatch.setattr(sys.modules["spmd.prices.calibrate"], "_time", lambda mesh, case: next(times))
    model = calibrate(mesh_of(2), collectives=["psum"], sizes=(8, 800), repeats=3)
    assert [m.seconds for m in model.measurements] == [2.5, 2.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis_name": "k"}, "Mesh\\(i: 2; 2 ranks, simulated\\) has no axis 'k'"),
        ({"collectives": ["pmean"]}, "'pmean' is not among the measured collectives: psum, "),
        ({"sizes": ()}, "sizes in bytes and repeats must be at least 1; got \\(\\), 20"),
        ({"sizes": (0,)}, "got \\(0,\\), 20"),
        ({"repeats": 0}, "must be at least 1"),
        ({"collectives": ["ppermute"], "sizes": (8,)}, "cannot tell steps from bytes"),
    ],
)
def test_what_cannot_be_measured(arguments, message):
    with pytest.raises(ValueError, match=message):
        calibrate(mesh_of(2), **arguments)


# ---------------------------------------------------------------- models


def test_predict_takes_a_network_for_a_machine():
    mesh = mesh_of(2, 2)
    f = spmd.shard_map(lambda x: psum(x.sum(), ("i", "j")), mesh=mesh, in_specs=P(("i", "j")), out_specs=P())
    options = {"ranks": (4, 16), "axis": "i", "scaling": "strong"}
    assert spmd.predict(f, MODEL, **options)(np.ones(8)) == MODEL.predict(f, **options, optimized=True)(np.ones(8))


def test_models_are_immutable():
    with pytest.raises(AttributeError):
        MODEL.alpha = 0.0
    algorithms = {"psum": "tree_all_reduce"}
    model = CostModel(1e-6, 1e-9, algorithms=algorithms)
    algorithms["psum"] = "ring_all_reduce"
    assert model.seconds("psum", 8, 1000) == CostModel(1e-6, 1e-9, algorithms=model.algorithms).seconds("psum", 8, 1000)
    assert model.algorithms == {"psum": "tree_all_reduce"}
    assert pickle.loads(pickle.dumps(model)) == model
    assert hash(model) == hash(pickle.loads(pickle.dumps(model)))


def test_models_are_shown():
    assert repr(MODEL) == "CostModel(alpha=1e-06, beta=1e-09)"
    assert eval(repr(MODEL)) == MODEL
    named = CostModel(1e-6, 0.0, 2e-9, algorithms={"psum": "tree_all_reduce"})
    assert eval(repr(named)) == named
    assert str(named) == "1.00 µs a step, 0 ns a byte, 2.00 ns a byte summed"
    measurements = tuple(Measurement("psum", 2, 1000, 3e-6 * off, ("i",)) for off in (0.8, 1.0, 1.6))
    measured = CostModel(1e-6, 1e-9, measurements=measurements, source="made up")
    assert measured.residual == pytest.approx((0.25, 0.375))
    text = str(measured).splitlines()
    assert text[0] == "1.00 µs a step, 1.00 ns a byte (1 GB/s)"
    assert text[3].split() == ["psum", "1.00", "25%", "38%"]
    assert text[-1] == "made up; residual 25% (median of 3), at worst 38%"
    lines = str(measured.fit).splitlines()
    assert lines[2].split() == ["psum", "i", "2", "1,000", "2.40", "µs", "3.00", "µs", "1.25"]
    assert lines[-1] == text[-1]
    assert "<td" in measured.fit._repr_html_()


PER_AXIS = CostModel({"i": 1e-5, "j": 1e-6}, {"i": 1e-9, "j": 2e-9}, gamma=1e-10, factors={"psum": 2.0})


def test_models_of_each_axis():
    assert [PER_AXIS.along(axes) for axes in (("i",), ("j",), ("j", "i"), ())] == [
        *((1e-5, 1e-9), (1e-6, 2e-9)),  # over several axes, the largest of each
        *[(1e-5, 2e-9)] * 2,
    ]
    assert eval(repr(PER_AXIS)) == PER_AXIS == pickle.loads(pickle.dumps(PER_AXIS))
    assert hash(PER_AXIS) == hash(pickle.loads(pickle.dumps(PER_AXIS)))
    assert [line.split() for line in str(PER_AXIS).splitlines()[2:]] == [
        ["i", "10.0", "µs", "1.00", "ns", "1", "GB/s"],
        ["j", "1.00", "µs", "2.00", "ns", "0.5", "GB/s"],
        ["0.1", "ns", "a", "byte", "summed"],
    ]
    mixed = CostModel({"i": 1.0, "j": 2.0}, 3.0)
    assert [mixed.along(("i",)), mixed.along()] == [(1.0, 3.0), (2.0, 3.0)]


def test_forecasts_use_the_numbers_of_the_axes():
    def body(x):
        return psum(psum(x, "i"), "j") + ppermute(x, "j", [(0, 1)])

    f = mapped(body, mesh_of(4, 2), P("i", "j"), P("i", "j"))
    forecast = PER_AXIS.predict(f)(np.ones((4, 2)))
    parts = [("psum", 4, 8, ("i",)), ("psum", 2, 8, ("j",)), ("ppermute", 2, 8, ("j",))]
    assert forecast.seconds[8] == pytest.approx(sum(PER_AXIS.seconds(*part) for part in parts))
    steps = 2 * 6 * 1e-5 + 2 * 2 * 1e-6 + 1e-6
    assert f"{steps / forecast.seconds[8]:.0%}" in str(forecast)
    assert sum(p.latency for p in forecast.predictions) == pytest.approx(steps)


def test_the_fastest_algorithm_is_chosen_by_size():
    model = CostModel(1e-6, 1e-9, algorithms="fastest")
    for n in (2, 3, 8, 48, 64):
        for nbytes in (8, 10**4, 10**7):
            each = [MODEL.of(ALGORITHMS[name](n, nbytes)) for name in ALGORITHMS if name.endswith("all_reduce")
                    and ALGORITHMS[name].ports == 1]  # fmt: skip
            assert model.seconds("psum", n, nbytes) == pytest.approx(min(each))
    assert fastest("psum_scatter", 8, 8, 1e-6, 1e-9) == "recursive_halving_reduce_scatter"
    assert fastest("psum_scatter", 6, 8, 1e-6, 1e-9) == "ring_reduce_scatter"  # the other takes powers of two


def test_gamma_prices_what_is_summed():
    dear = CostModel(0.0, 0.0, gamma=1e-9)
    assert dear.seconds("psum", 4, 1000) == pytest.approx(750e-9)
    assert dear.seconds("all_gather", 4, 1000) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"),
        (1.5e-12, "0.0015 ns"),
        (1e-9, "1.00 ns"),
        (9.996e-7, "1.00 µs"),
        (1.234e-5, "12.3 µs"),
        (0.1234, "123 ms"),
        (1.0, "1.00 s"),
        (4321.0, "4,320 s"),
    ],
)
def test_times_are_shown(seconds, text):
    assert show_seconds(seconds) == text


# ---------------------------------------------------------------- predictions


def test_predictions_at_the_size_of_the_tape():
    mesh = mesh_of(4)
    f = mapped(lambda x: psum(x, "i") + all_gather(x, "i").sum(0) + pmax(x, "i"), mesh)
    forecast = MODEL.predict(f)(np.ones(32))
    assert forecast.ranks == (4,)
    assert forecast.notes == ()
    expected = [price(name, 4, 64) for name in ("psum", "all_gather", "pmax")]
    assert forecast.costs == {4: sum(expected, Cost())}
    assert forecast.seconds[4] == pytest.approx(sum(c.seconds(1e-6, 1e-9) for c in expected))
    assert forecast == MODEL.predict(md.make_tape(f)(np.ones(32)))


def program(mesh, scale):
    """Return one call of each collective, on blocks and whole arrays that grow with the mesh as the scaling says."""
    n = mesh.size

    def body(w, x, whole):
        gathered = all_gather(x, "i", tiled=True)
        local = psum_scatter(whole * gathered.sum(), "i", tiled=True)
        exchanged = all_to_all(x, "i", 0, 0, tiled=True)
        moved = ppermute(x, "i", [(k, (k + 1) % n) for k in range(n)])
        return psum(w * x.sum(), "i"), local, exchanged + moved

    f = mapped(body, mesh, in_specs=(P(), P("i"), P()), out_specs=(P(), P("i"), P("i")))
    block, whole = (64, 64 * n) if scale == "weak" else (2048 // n, 2048)
    args = [md.ShapedArray((10,), float), md.ShapedArray((block * n,), float), md.ShapedArray((whole,), float)]
    return f, args


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_scaling_is_what_tapes_of_other_sizes_say(scaling):
    """From the tape of 8 ranks to other numbers, by the model; and from tapes on meshes that have as many."""
    f, args = program(mesh_of(8), scaling)
    ranks = (2, 4, 8, 16, 32)
    scaled = MODEL.predict(f, ranks=ranks, scaling=scaling)(*args)
    taped = None
    for n in ranks:
        g, arguments = program(mesh_of(n), scaling)
        forecast = MODEL.predict(g)(*arguments)
        taped = forecast if taped is None else taped + forecast
    assert scaled.costs == taped.costs
    assert scaled.seconds == pytest.approx(taped.seconds)
    assert scaled.notes == (
        {
            "weak": "weak scaling: every rank's blocks stay as large as on the tape, which is for 8 ranks",
            "strong": "strong scaling: whole arrays stay as large as on the tape, which is for 8 ranks",
        }[scaling],
        AS_MANY,
    )


def test_thousands_of_ranks_of_a_gradient():
    mesh = mesh_of(4)

    def loss(w, x):
        return mapped(lambda w, x: psum(np.sum(x @ w), "i"), mesh, (P(), P("i")), P())(w, x)

    forecast = MODEL.predict(md.grad(loss), ranks=(8, 64, 512, 4096))(np.ones((100, 10)), np.ones((32, 100)))
    ring = ALGORITHMS["ring_all_reduce"]
    for n in (8, 64, 512, 4096):
        assert forecast.costs[n] == ring(n, 8) + ring(n, 8000)
    assert forecast.seconds[4096] == pytest.approx(2 * 2 * 4095e-6 + 2 * 4095 / 4096 * 8008e-9)


def test_the_axis_that_grows():
    mesh = mesh_of(4, 2)
    specs = P("i", "j")
    f = mapped(lambda x: psum(psum(x, "i"), "j") + psum(x, ("j", "i")), mesh, specs, P())
    forecast = MODEL.predict(f, ranks=(8, 32), axis="i")(np.ones((4, 2)))
    assert forecast.costs[32] == sum((price("psum", n, 8) for n in (16, 2, 32)), Cost())
    with pytest.raises(ValueError, match="has several axes: say which one grows, axis='i'"):
        MODEL.predict(f, ranks=(8,))(np.ones((4, 2)))
    with pytest.raises(ValueError, match="has no axis 'k'"):
        MODEL.predict(f, ranks=(8,), axis="k")(np.ones((4, 2)))
    with pytest.raises(ValueError, match="cannot have 9 ranks by growing along 'i': take a multiple of 2"):
        MODEL.predict(f, ranks=(9,), axis="i")(np.ones((4, 2)))


def test_an_exact_sum_takes_the_steps_of_two():
    x, mesh = np.ones((4, 8)), mesh_of(2)
    exact, ordinary = (
        MODEL.predict(mapped(lambda b, e=e: psum(b, "i", exact=e), mesh, out_specs=P()), ranks=(2, 8))(x)
        for e in (True, False)
    )
    for ranks in (2, 8):
        assert exact.costs[ranks].steps == 2 * ordinary.costs[ranks].steps > 0
        assert exact.costs[ranks].bytes > ordinary.costs[ranks].bytes


def test_loops_are_predicted_as_often_as_they_run():
    def body(x):
        return md.scan(lambda c, _: (psum(c * x, "i") / 4, None), psum(x, "i"), None, length=3)[0]

    forecast = MODEL.predict(mapped(body, mesh_of(4), P("i"), P()))(np.ones(32))
    assert forecast.costs[4] == 4 * price("psum", 4, 64)


def test_what_jit_makes_of_it():
    def body(x):
        return psum(x, "i"), psum(x * x, "i")

    f = mapped(body, mesh_of(4), P("i"), (P(), P()))
    plain, fused = (MODEL.predict(f, optimized=flag)(np.ones(32)) for flag in (False, True))
    assert (plain.costs[4].steps, fused.costs[4].steps) == (12, 6)
    assert plain.costs[4].bytes == fused.costs[4].bytes


def test_other_algorithms():
    f = mapped(lambda x: psum(x, "i"), mesh_of(4), P("i"), P())
    model = CostModel(1e-6, 1e-9, algorithms={"psum": "tree_all_reduce"})
    assert model.predict(f)(np.ones(32)).costs[4] == ALGORITHMS["tree_all_reduce"](4, 64)


def test_programs_that_do_not_communicate():
    for f in (np.sin, mapped(np.sin, mesh_of(4))):
        forecast = MODEL.predict(f, ranks=(8, 64))(np.ones(4))
        assert forecast.seconds == {8: 0, 64: 0}
        assert "0 ns" in str(forecast)


def test_programs_on_several_meshes():
    inner = [mapped(lambda x: psum(x, "i"), mesh_of(n), P("i"), P()) for n in (2, 4)]

    def f(x):
        return inner[0](x).sum() + inner[1](x).sum()

    assert MODEL.predict(f)(np.ones(8)).costs[4] == price("psum", 2, 32) + price("psum", 4, 16)
    with pytest.raises(ValueError, match=r"several meshes .*: which one grows is not clear. Make its tape"):
        MODEL.predict(f, ranks=(8,))(np.ones(8))


def test_reports_that_depend_on_values_say_so():
    def body(x):
        total = psum(x.sum(), "i")
        return md.cond(total > 0, lambda x: psum(x, "i"), lambda x: psum(2 * x[:1], "i") + x * 0 + 0 * psum(x, "i"), x)

    forecast = MODEL.predict(mapped(body, mesh_of(4)))(np.ones(32))
    assert "which branch is run is not known beforehand" in str(forecast)


def test_forecasts_are_added():
    f = mapped(lambda x: psum(x, "i"), mesh_of(4), P("i"), P())
    four = MODEL.predict(f)(np.ones(32))
    more = MODEL.predict(f, ranks=(16, 8))(np.ones(32))
    assert (more + four).ranks == (4, 8, 16)
    assert (more + four).seconds == {**four.seconds, **more.seconds}
    with pytest.raises(ValueError, match=r"both are for \[4\]"):
        four + four
    with pytest.raises(ValueError, match="of different models"):
        more + CostModel(0.0, 0.0).predict(f)(np.ones(32))


def test_tables_and_plots():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    f = mapped(lambda x: psum(x, "i") + all_gather(x, "i").sum(0), mesh_of(4))
    forecast = MODEL.predict(f, ranks=(8, 64))(np.ones(32))
    header, _, *lines = str(forecast).splitlines()
    assert header.split() == ["ranks", "steps", "bytes", "psum", "all_gather", "time", "latency"]
    assert lines[0].split()[:3] == ["8", "21", "560"]
    assert forecast._repr_html_().count("<tr>") == 3
    ax = forecast.plot()
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    drawn = {line.get_label(): (*line.get_xdata(), *line.get_ydata()) for line in ax.lines}
    assert drawn.keys() == {"psum", "all_gather", "time"}
    assert drawn["time"] == (8, 64, *forecast.seconds.values())
    race = MODEL.compare(["ring_all_reduce", "tree_all_reduce"], 1000, ranks=(4, 16))
    assert race.seconds["tree_all_reduce"] == pytest.approx((8e-6, 16e-6))
    assert race.plot(ax) is ax
    fit = calibrate(mesh_of(2), collectives=["psum"], sizes=(8, 800), repeats=1).fit
    assert len(fit.plot().lines) == 2


def test_plots_need_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="plots need the package matplotlib: `pip install matplotlib`"):
        MODEL.compare(["ring_all_reduce"], 1000, ranks=(4,)).plot()
