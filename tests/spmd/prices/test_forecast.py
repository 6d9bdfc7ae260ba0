"""Predictions of programs by cost models; `cost_models.md` shows the models."""

import functools
import operator
import sys

import numpy as np
import pytest

import minidiff as md
from collectives import all_gather, all_to_all, ppermute, psum, psum_scatter
from spmd import CostModel, P
from spmd.prices.forecast import AS_MANY, Measurement
from spmd.show import show_seconds
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

MODEL = CostModel(alpha=1e-6, beta=1e-9)
PER_AXIS = CostModel({"i": 1e-5, "j": 1e-6}, {"i": 1e-9, "j": 2e-9}, gamma=1e-10, factors={"psum": 2.0})
TREES = CostModel(1e-6, 0.0, 2e-9, algorithms={"psum": "tree_all_reduce"})
MEASURED = CostModel(
    1e-6,
    1e-9,
    measurements=tuple(Measurement("psum", 2, 1000, 3e-6 * off, ("i",)) for off in (0.8, 1.0, 1.6)),
    source="made up",
)


def on_ranks(f, *sizes, in_specs=P("i"), out_specs=P("i")):
    return mapped(f, mesh(*sizes), in_specs, out_specs)


def test_models_are_shown(golden):
    times = [0, 1.5e-12, 1e-9, 9.996e-7, 1.234e-5, 0.1234, 1.0, 4321.0]
    texts = [MODEL, TREES, PER_AXIS, MEASURED, MEASURED.fit, ", ".join(map(show_seconds, times))]
    golden("cost_models", "\n\n".join(map(str, texts)))
    assert MEASURED.residual == pytest.approx((0.25, 0.375)) and "<td" in MEASURED.fit._repr_html_()


def program(n, scale):
    """Return one call of each collective, on blocks and whole arrays that grow with the ranks as the scaling says."""

    def body(w, x, whole):
        gathered = all_gather(x, "i", tiled=True)
        local = psum_scatter(whole * gathered.sum(), "i", tiled=True)
        exchanged = all_to_all(x, "i", 0, 0, tiled=True)
        moved = ppermute(x, "i", [(k, (k + 1) % n) for k in range(n)])
        return psum(w * x.sum(), "i"), local, exchanged + moved

    f = on_ranks(body, n, in_specs=(P(), P("i"), P()), out_specs=(P(), P("i"), P("i")))
    block, whole = (64, 64 * n) if scale == "weak" else (2048 // n, 2048)
    args = [md.ShapedArray((10,), float), md.ShapedArray((block * n,), float), md.ShapedArray((whole,), float)]
    return f, args


SCALING = {
    "weak": "weak scaling: every rank's blocks stay as large as on the tape, which is for 8 ranks",
    "strong": "strong scaling: whole arrays stay as large as on the tape, which is for 8 ranks",
}


@each("scaling", SCALING)
def test_scaling_is_what_tapes_of_other_sizes_say(scaling):
    """From the tape of 8 ranks to other numbers, by the model; and from tapes on meshes that have as many."""
    f, args = program(8, scaling)
    ranks = (2, 4, 8, 16, 32)
    scaled = MODEL.predict(f, ranks=ranks, scaling=scaling)(*args)
    taped = []
    for n in ranks:
        g, arguments = program(n, scaling)
        taped.append(MODEL.predict(g)(*arguments))
    several = functools.reduce(operator.add, taped)
    assert scaled.costs == several.costs
    assert scaled.seconds == pytest.approx(several.seconds)
    assert scaled.notes == (SCALING[scaling], AS_MANY)


def test_tables_and_plots(golden):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    f = on_ranks(lambda x: psum(x, "i") + all_gather(x, "i").sum(0), 4)
    forecast = MODEL.predict(f, ranks=(8, 64))(np.ones(32))
    golden("forecast", str(forecast))
    assert forecast._repr_html_().count("<tr>") == 3
    ax = forecast.plot()
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    drawn = {line.get_label(): (*line.get_xdata(), *line.get_ydata()) for line in ax.lines}
    assert drawn.keys() == {"psum", "all_gather", "time"}
    assert drawn["time"] == (8, 64, *forecast.seconds.values())
    race = MODEL.compare(["ring_all_reduce", "tree_all_reduce"], 1000, ranks=(4, 16))
    assert race.seconds["tree_all_reduce"] == pytest.approx((8e-6, 16e-6))
    assert race.plot(ax) is ax
    assert len(MEASURED.fit.plot().lines) == 2


def test_plots_need_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError):
        MODEL.compare(["ring_all_reduce"], 1000, ranks=(4,)).plot()
