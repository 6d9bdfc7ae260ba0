"""Speed-up on simulated ranks: predicted only, from the time on one rank and the model."""

import pytest

import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import CostModel, P

MODEL = CostModel(alpha={"i": 1e-5, "j": 1e-3}, beta=1e-9)


def mesh_of(*shape):
    return spmd.make_mesh(shape, ("i", "j")[: len(shape)], backend="simulated")


def total(mesh, axes):
    return spmd.shard_map(lambda x: psum(x.sum(), axes), mesh=mesh, in_specs=P(axes), out_specs=P())


@pytest.mark.parametrize(("axes", "alpha"), [(("i",), 1e-5), (("i", "j"), 1e-3)])
def test_predictions_are_computation_and_communication(axes, alpha):
    mesh = mesh_of(*[4, 2][: len(axes)])
    n, x = mesh.size, np.ones(64)
    actual = spmd.speed_up(total(mesh, axes), mesh, MODEL, 0.5)(x)
    assert actual.measured == {1: (0.5, 1.0, 1.0)}
    seconds, speed_up, efficiency = actual.predicted[n]
    assert seconds == pytest.approx(0.5 / n + 2 * (n - 1) * alpha + 2 * (n - 1) / n * 8e-9)
    assert speed_up == 0.5 / seconds
    assert efficiency == pytest.approx(speed_up / n)


def test_the_time_on_one_rank_is_measured():
    seen = []
    mesh = mesh_of(4)
    actual = spmd.speed_up(total(mesh, "i"), mesh, MODEL, seen.append, repeats=3)(
        spmd.distribute(np.ones(8), mesh, P())
    )
    assert [type(x).__name__ for x in seen] == ["ndarray"] * 4  # one call is not timed
    assert actual.measured[1] == actual.predicted[1] == (actual.measured[1].seconds, 1.0, 1.0)


def test_the_table_and_other_numbers_of_ranks():
    mesh = mesh_of(2, 2)
    actual = spmd.speed_up(total(mesh, ("i", "j")), mesh, MODEL, 1.0, ranks=(1, 8, 2), axis="i")(np.ones(64))
    assert list(actual.predicted) == [1, 2, 4, 8]
    header, _, *lines, remark = str(actual).splitlines()
    assert header.split() == ["ranks", "time", "predicted", "speed-up", "predicted", "efficiency", "predicted"]
    assert lines[0].split() == ["1", "1.00", "s", "1.00", "s", "1.00", "1.00", "100%", "100%"]
    assert lines[2].split() == ["4", "-", "256", "ms", "-", "3.91", "-", "98%"]
    assert remark == "strong scaling: whole arrays stay as large as on the tape, which is for 4 ranks"
    assert actual._repr_html_().count("<tr>") == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"one": 0.0}, "`one` must be a function or its seconds, repeats at least 1; got 0.0, 5"),
        ({"repeats": 0}, "repeats at least 1; got 1.0, 0"),
        ({"f": np.sin}, r"speed_up: the function has no shard_map and no sharded array on Mesh\(i: 4; 4 ranks, sim"),
        ({"mesh": mesh_of(2)}, r"no sharded array on Mesh\(i: 2"),
        ({"ranks": (8,), "axis": "k"}, "has no axis 'k'"),
    ],
)
def test_mistakes(wrong, message):
    mesh = mesh_of(4)
    with pytest.raises(ValueError, match=message):
        spmd.speed_up(**{"f": total(mesh, "i"), "mesh": mesh, "model": MODEL, "one": 1.0, **wrong})(np.ones(8))


def test_errors_of_the_function_of_one_rank_are_raised():
    mesh = mesh_of(4)
    with pytest.raises(ZeroDivisionError):
        spmd.speed_up(total(mesh, "i"), mesh, MODEL, lambda x: 1 / 0)(np.ones(8))
