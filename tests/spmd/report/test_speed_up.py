"""Speed-up on simulated ranks: predicted only, from the time on one rank and the model."""

import pytest

import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import CostModel, P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

MODEL = CostModel(alpha={"i": 1e-5, "j": 1e-3}, beta=1e-9)


def total(over, axes):
    return mapped(lambda x: psum(x.sum(), axes), over, P(axes), P())


@each("axes, alpha", [(("i",), 1e-5), (("i", "j"), 1e-3)])
def test_predictions_are_computation_and_communication(axes, alpha):
    over = mesh(*[4, 2][: len(axes)])
    n = over.size
    actual = spmd.speed_up(total(over, axes), over, MODEL, 0.5)(np.ones(64))
    assert actual.measured == {1: (0.5, 1.0, 1.0)}
    seconds, speed_up, efficiency = actual.predicted[n]
    assert seconds == pytest.approx(0.5 / n + 2 * (n - 1) * alpha + 2 * (n - 1) / n * 8e-9)
    assert speed_up == 0.5 / seconds
    assert efficiency == pytest.approx(speed_up / n)


def test_the_time_on_one_rank_is_measured():
    seen, over = [], mesh(4)
    speed_up = spmd.speed_up(total(over, "i"), over, MODEL, seen.append, repeats=3)
    actual = speed_up(spmd.distribute(np.ones(8), over, P()))
    assert [type(x).__name__ for x in seen] == ["ndarray"] * 4  # one call is not timed
    assert actual.measured[1] == actual.predicted[1] == (actual.measured[1].seconds, 1.0, 1.0)


def test_the_table_and_other_numbers_of_ranks(golden):
    over = mesh(2, 2)
    actual = spmd.speed_up(total(over, ("i", "j")), over, MODEL, 1.0, ranks=(1, 8, 2), axis="i")(np.ones(64))
    golden("speed_up", str(actual))
    assert list(actual.predicted) == [1, 2, 4, 8] and actual._repr_html_().count("<tr>") == 5


def test_errors_of_the_function_of_one_rank_are_raised():
    with pytest.raises(ZeroDivisionError):
        spmd.speed_up(total(mesh(4), "i"), mesh(4), MODEL, lambda x: 1 / 0)(np.ones(8))
