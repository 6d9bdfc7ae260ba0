"""The benchmarks run, and compare what is equal. How fast anything is, is not tested."""

import json
import re
import subprocess
import sys
import types

import pytest

from tests import PATIENCE
from tests.benchmarks import (
    activations,
    all_reduces,
    array_programs,
    compare,
    cores,
    eager,
    growth,
    halos,
    report,
    steps,
)
from tests.benchmarks.problems import problems


def test_all_agree_and_the_table_is_printed(tmp_path):
    path = tmp_path / "numbers.json"
    options = ["--quick", "--json", str(path), "--peers", "minidiff", "minidiff jit"]
    text = subprocess.check_output([sys.executable, "-m", "tests.benchmarks", *options], text=True, timeout=PATIENCE)
    names = [row["name"] for row in json.loads(path.read_text())["rows"]]
    for name in (*[f"grad: {problem.name}" for problem in problems(quick=True)], *names):
        assert name in text
    assert "memory: MLP" in text and "import" in text


def test_a_wrong_gradient_is_found():
    problem = problems(quick=True)[0]
    runs = {report.HAND: lambda: (1.0, [1.0, 2.0]), "peer": lambda: (1.0, [1.0, 2.0 + 1e-8])}
    with pytest.raises(AssertionError, match="formula, peer: gradient 1"):
        report.check(problem, runs)


def test_a_missing_peer_is_shown(monkeypatch, capsys):
    def absent():
        raise ImportError("not here")

    monkeypatch.setitem(report.peers.PEERS, "JAX", absent)
    report.main(["--quick", "--only", "formula", "--peers", "minidiff", "JAX"])
    text = capsys.readouterr().out
    assert "missing: JAX (not here)" in text
    assert any("grad: formula" in line and "missing" in line for line in text.splitlines())


def test_a_peer_without_a_function_has_no_time_in_that_row(monkeypatch, capsys):
    def prepare(problem):
        def run():
            if problem.name == "heat":
                raise report.peers.Unsupported("no roll")
            return problem.by_hand(problem.params, problem.data)

        return run

    monkeypatch.setitem(report.peers.PEERS, "numba", lambda: prepare)
    result = report.main(["--quick", "--only", "heat", "polynomial", "--peers", "minidiff", "numba"])
    columns = {row["name"]: {*row["ratio"]} for row in result["rows"]}
    assert columns == {"grad: polynomial": {"minidiff", "numba"}, "grad: heat": {"minidiff"}}


@pytest.mark.parametrize("time, verdict", [(20.0, "minidiff <= 25 µs: met"), (30.0, "minidiff <= 25 µs: missed")])
def test_targets(monkeypatch, time, verdict):
    monkeypatch.setattr(report, "TARGETS", {("grad: formula", "minidiff"): (25.0, "µs")})
    row = {"name": "grad: formula", "unit": "µs", "absolute": {"minidiff": time}, "ratio": {"minidiff": 2.0}}
    assert report.verdict(row, "minidiff") == verdict
    assert report.verdict({**row, "name": "other"}, "minidiff") == ""


def test_all_reduces_are_counted(capsys, monkeypatch):
    """The JEP's example 1: one psum forward, and one backward without types."""
    monkeypatch.setattr("sys.argv", ["all_reduces", "--programs", "2"])
    monkeypatch.setitem(sys.modules, "jax", None)
    all_reduces.main()
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[-7:] == ["eager", "compiled", "untyped", "eager", "untyped", "compiled", "JAX"]
    assert table[1].split()[-5:] == ["1", "0", "2", "1", "-"]
    assert table[-1].startswith("  compiled beside untyped compiled: more in 0, fewer in 1")


def test_array_programs_are_printed_beside_what_they_need(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    array_programs.main(["--only", "two sums", "two layers", "x.T @ y"])
    lines = capsys.readouterr().out.splitlines()
    assert [re.split("  +", line.rstrip()) for line in lines[1:4]] == [
        ["two sums", "all-reduce: 16", "?", "1: 8", "-", "more than needed"],
        ["x.T @ y", "all-reduce: 1,152", "?", "1: 1,152", "-"],
        ["two layers", "-", "?", "-", "0"],
    ]
    assert lines[-1] == "1 more than needed, 2 as few as needed of 3 programs"


def test_collectives_of_hlo_are_counted_in_loops_and_branches():
    """Those of a loop as often as it runs, of branches those of the longest; the bytes are those of operands."""
    text = (compare.ROOT / "tests/benchmarks/collectives.hlo").read_text()
    kinds, nbytes = array_programs.sent_by_hlo(text)
    assert kinds == {"all-reduce": 6, "ppermute": 1, "all-gather": 1}
    assert nbytes == 5 * 48 + 2 * 16 + 2 * 48


def test_growth_is_fitted_where_it_can_be_seen(capsys):
    """A constant part hides the growth of the first sizes; a row's times are those of its sizes."""
    sizes = (10, 100, 1_000, 10_000)
    assert growth.slope(sizes, [1e-6 * n**1.5 for n in sizes]) == pytest.approx(1.5)
    assert growth.slope(sizes, [1e-3 + 1e-5 * n for n in sizes]) == pytest.approx(1.0, abs=0.05)
    results = growth.main(["--only", "record", "--largest", "1000", "--rounds", "1"])
    assert [len(row["seconds"]) for row in results] == [2] and results[0]["sizes"] == [1_000, 10_000]
    assert "operations 1,000: " in capsys.readouterr().out


#: Drivers, options that make them quick, and how many lines they print.
QUICK = ["--rounds", "1", "--seconds"]
DRIVERS = {
    "steps": (steps, [*QUICK, "1e-4", "--steps", "10", "--only", "pendulum", "adaptive"], 5),
    "cores": (cores, [*QUICK, "0", "--rows", "64", "--only", "axis=0", "softmax", "100"], 1 + 2 + 4),
    "halos": (halos, ["--quick"], 7),
    "activations": (activations, [*QUICK, "1e-4", "--only", "softmax", "--dtypes", "float32"], 5),
}


@pytest.mark.parametrize("name", DRIVERS)
def test_drivers_without_jax_print_a_line_for_each_row(name, capsys, monkeypatch):
    """Results are compared before they are timed."""
    monkeypatch.setitem(sys.modules, "jax", None)
    driver, options, lines = DRIVERS[name]
    driver.main(options)
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_every_row_of_growth_runs():
    for row in growth.ROWS:
        row.prepare(max(4, row.sizes[0] // 250))()


def test_two_versions_are_compared_in_processes_of_their_own(capsys):
    """Each imports the library from its own tree, and runs the row."""
    root = str(compare.ROOT)
    child = compare.start(root, ["gradient of a number, eager"], calls=3)
    assert child.stdout == "" and child.returncode == 0
    pairs = compare.compare(root, root, ["gradient of a number, eager"], rounds=1)
    assert [*pairs] == ["gradient of a number, eager"] and all(t > 0 for t in pairs["gradient of a number, eager"][0])
    line = compare.line("row", [(2.0, 1.0), (2.0, 3.0), (2.0, 2.0)], "µs")
    assert line.split() == ["row", "2.0", "2.0", "µs", "1.000", "(0.500", "to", "1.500)"]


def test_every_row_of_the_comparison_runs():
    for prepare in compare.rows().values():
        prepare()()


def test_a_field_that_differs_from_loops_by_hand_is_found():
    row = halos.Row("other", 1, lambda: 1.0, lambda: types.SimpleNamespace(data=1.0 + 1e-15))
    with pytest.raises(AssertionError):
        halos.check(row)


def test_eager_programs_are_compared_with_limits(capsys, monkeypatch):
    """A row has a ratio to its baseline; one above its limit is marked."""
    monkeypatch.setattr(eager, "REPEATS", 2)
    results = eager.main(["--only", "shard_map", "--rounds", "2", "--seconds", "0"])
    assert [row["row"] for row in results] == [name for name in eager.rows() if "shard_map" in name]
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.endswith("exceeds its limit") for line in lines] == [row["ratio"] > row["limit"] for row in results]
