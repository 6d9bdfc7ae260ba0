"""`fields`, `heat`, `wave` and `shallow_water`, as scripts; `tests/programs/halo.py` compares what they compute."""

import re

import numpy
import pytest

from spmd.examples import fields, heat, shallow_water, wave

SCRIPTS = {"heat": heat, "wave": wave, "shallow_water": shallow_water}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script(name, capsys):
    """It shows the mesh, whether NumPy found the same, and what a rank sends."""
    SCRIPTS[name].main(["--shape", "16", "24", "--steps", "9", "--ranks", "4"])
    out = capsys.readouterr().out
    assert str(fields.grid_mesh(4, "simulated")) in out
    assert "No MPI launcher: 4 ranks are simulated" in out
    assert "The same as plain NumPy, to the last bit: yes" in out
    assert re.search(r"^ppermute +rows ", out, re.M) and re.search(r"^ppermute +columns ", out, re.M)


def test_another_result_is_told(capsys):
    mesh, field = fields.grid_mesh(2, "simulated"), fields.bumps((4, 4))
    fields.compare(heat.plate(mesh, 1), lambda u: heat.plain(u, 1) + 1e-15, field, fields.FIELD, mesh)
    assert "to the last bit: NO" in capsys.readouterr().out


def test_the_wave_is_found_again(capsys):
    wave.main(["--shape", "16", "16", "--steps", "36", "--iterations", "12", "--ranks", "2"])
    out = capsys.readouterr().out
    assert float(re.search(r"with an error of ([\d.]+)%", out).group(1)) < 5


def test_meshes_are_as_square_as_possible():
    shapes = {n: tuple(fields.grid_mesh(n, "simulated").shape.values()) for n in (1, 2, 6, 7, 12)}
    assert shapes == {1: (1, 1), 2: (2, 1), 6: (3, 2), 7: (7, 1), 12: (4, 3)}


def test_heat_spreads_and_is_conserved():
    """No heat flows through the edge."""
    u = fields.bumps((12, 8))
    later = heat.plain(u, 50)
    assert numpy.isclose(later.sum(), u.sum(), rtol=1e-12) and numpy.ptp(later) < 0.5 * numpy.ptp(u)


def test_water_is_conserved_and_a_jet_in_balance_hardly_changes():
    """The slope of the water holds the jet: without rotation it would not. Nothing flows through the walls."""
    state = shallow_water.jet((24, 48))
    later = shallow_water.plain(state, 50)
    assert numpy.isclose(later[0].sum(), state[0].sum(), rtol=1e-12)
    assert not later[2, -1].any() and later[2, :-1].any()
    state[0] = state[0].mean(axis=1, keepdims=True)
    assert abs(shallow_water.plain(state, 50)[1] - state[1]).max() < 0.05 * state[1].max()
