"""The benchmark of calls and collectives runs, and computes the same as by hand. How fast it is is not tested."""

import json

import pytest
from mpi4py import MPI

from tests.benchmarks import ranks


@pytest.mark.parallel(2)
def test_calls_are_timed_beside_mpi4py(tmp_path, capsys):
    path = tmp_path / "numbers.json"
    rows = ranks.main(["--rounds", "1", "--only", "8 B", "512 B", "steps", "--json", str(path)])
    names = {row["row"] for row in rows}
    chains = ("psums of 8 B", "all-to-alls of 512 B", "gathers and scatters of 512 B")
    further = {f"each further of {chain}" for chain in chains}
    whole = {"one psum of 8 B", "one ppermute of 512 B", "50 steps of a small network"}
    assert names == {*whole, *further}
    assert {row["kind"] for row in rows} == {"mpi4py", "compiled", "eager"}
    assert {row["ranks"] for row in rows} == {MPI.COMM_WORLD.size}
    if MPI.COMM_WORLD.rank == 0:
        assert json.loads(path.read_text()) == rows
        text = capsys.readouterr().out
        assert all(name in text for name in names)
