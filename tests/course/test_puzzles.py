"""The puzzles' messages about wrong answers."""

import re
import sys
from pathlib import Path

import pytest

from collectives import all_gather, all_gather_invariant, psum

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.fixture
def verdict(monkeypatch):
    """Return the verdict on an answer to a puzzle."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(NOTEBOOKS)
    import exercises
    import puzzles

    yield lambda number, answer: repr(exercises.judge(puzzles.PUZZLES[number].judge, (answer,)))
    for name in {"exercises", "puzzles"} - before:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "number, answer, returned, wanted",
    [
        (1, lambda x: x, "f64[4]{i}", "f64[4]"),
        (1, lambda x: all_gather(x, "i").sum(0), "f64[4]{i}", "f64[4]"),
        (9, lambda c, x: c @ x, "f64[2]{i}", "f64[2]"),
    ],
)
def test_ranks_that_may_differ_are_named_by_the_type(verdict, number, answer, returned, wanted):
    text = verdict(number, answer)
    assert text.startswith(f"not yet: a rank returns {returned}, and {wanted} is wanted: ")
    assert "ranks may differ along i" in text and "out_specs" not in text  # no puzzle shows them


def test_other_verdicts_are_as_before(verdict):
    assert verdict(1, lambda x: psum(x, "i")) == "right"
    assert verdict(1, lambda x: psum(x.sum(), "i")) == "not yet: a rank returns f64[], and f64[4] is wanted"
    assert verdict(1, ...) == "your turn"


def test_the_line_that_sends_too_much_is_named(verdict):
    text = verdict(1, lambda x: all_gather_invariant(x, "i").sum(0) + 0 * psum(x, "i"))
    assert re.match(
        r"not yet: this is right, and a rank sends \d+ bytes; the best known is 48\. test_puzzles.py:\d+: ", text
    )
    assert text.endswith(" passes 2 times as many bytes as it must to all_gather_invariant")
