"""Tables of docstrings that say how often a program communicates, and how many numbers; compared with reports."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import minidiff as md
import spmd
from tests.checks.results import assert_trees_close
from tests.checks.whole import whole

#: What a program communicates: how often, and how many bytes, by a label such as (direction, collective, axis).
Traffic = dict[tuple[str, ...], tuple[int, float]]


def rows(documented: ModuleType | Callable, number: int = 0) -> list[list[str]]:
    """Return the cells of a table of a module's docstring, below its head. A function stands for its module.

    Columns begin where those of the rules, lines of =, do.
    """
    lines = inspect.getdoc(inspect.getmodule(documented)).splitlines()
    rules = [k for k, line in enumerate(lines) if line.startswith("===")]
    starts = [m.start() for m in re.finditer("=+", lines[rules[3 * number]])]
    ends = [*starts[1:], None]
    below = lines[rules[3 * number + 1] + 1 : rules[3 * number + 2]]
    return [[line[a:b].strip() for a, b in zip(starts, ends)] for line in below if line.strip()]


def value(formula: str, names: dict[str, float]) -> float:
    """Return the number that a cell's formula has for these sizes.

    >>> value("2 * (n - 1)", {"n": 4})
    6
    """
    return eval(formula, {"__builtins__": {}}, names)


def traffic(table: Iterable[list[str]], names: dict[str, float], times: int = 1) -> Traffic:
    """Return the counts and bytes of lines that end with a count and a number of float64s; equal labels add up."""
    total: Traffic = {}
    for *label, axes, count, numbers in table:
        add(total, (*label, *axes.split(",")), times * value(count, names), times * 8 * value(numbers, names))
    return total


def add(total: Traffic, label: tuple[str, ...], count: int, nbytes: float) -> None:
    before = total.get(label, (0, 0))
    total[label] = before[0] + count, before[1] + nbytes


def communicated(*reports: Any, label: Callable[[tuple], tuple] = lambda label: label) -> Traffic:
    """Return the counts and bytes of reports, by (direction, collective, *axes) or a label made of these."""
    total: Traffic = {}
    for row in (row for report in reports for row in report.rows):
        add(total, label((row.direction, row.collective, *row.axes)), row.count, row.bytes)
    return total


def check_traffic(f: Callable, mesh: spmd.Mesh, expected: Traffic | None, *args: Any, **options: Any) -> Any:
    """Return `f(*args)`, having checked that its report is as expected, and that the mesh counts the same.

    With `expected=None` any report is right. The compiled program has the same results.
    """
    report = spmd.communication(f)(*args)
    assert expected is None or communicated(report, **options) == expected
    mesh.reset_calls()
    out = f(*args)
    assert (mesh.calls, sum(mesh.bytes.values())) == (report.counts, report.bytes)
    assert_trees_close(md.tree.map(whole, md.jit(f)(*args)), md.tree.map(whole, out), rtol=1e-10, atol=1e-12)
    return out
