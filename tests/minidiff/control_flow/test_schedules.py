"""Schedules of checkpoints: lists of actions, how often each step is advanced, and their picture."""

import math
import xml.etree.ElementTree

import pytest

import minidiff as md
from tests.checks.samples import each

SCHEDULES = [md.revolve(1), md.revolve(3), md.revolve(30), md.multistage(1, 2), md.online(3)]


def griewank(n, slots):
    """The least number of advances, and of those of one step: Griewank and Walther's formula."""
    r = next(r for r in range(n + 1) if math.comb(slots + r, r) >= n)
    return r * n - math.comb(slots + r, r - 1) if r else 0, r


def advances(schedule, n):
    """Follow a list of actions, and check each one; return how often each step is advanced."""
    slots, at, left, often = {}, 0, n, [0] * n
    for name, step, where in schedule.actions(n):
        if name == "restore":
            assert slots[where] == step
            at = step
            continue
        assert at == step
        if name == "store":
            assert 0 <= where < schedule.slots
            slots[where] = step
        elif name == "advance":
            assert where > step
            often[step:where] = [k + 1 for k in often[step:where]]
            at = where
        else:
            assert name == "reverse" and step == left - 1
            left, at = step, None
    assert left == 0
    return often


@each("slots", [1, 2, 3, 5, 8, 13, 30])
def test_as_many_advances_as_the_formula(slots):
    for n in (*range(60), 100, 500):
        often = advances(md.revolve(slots), n)
        assert (sum(often), max(often, default=0)) == griewank(n, slots)
        assert md.revolve(slots).advances(n) == sum(often)


@each("slots", [1, 2, 3, 7, 20])
def test_online_knows_no_length(slots):
    sweep = lambda n: [a for a in md.online(slots).actions(n) if a.name in ("advance", "store")]  # noqa: E731
    for n in (1, 2, 9, 40, 90):
        often, (total, most) = advances(md.online(slots), n), griewank(n, slots)
        assert max(often) == most and total <= sum(often) <= 1.5 * total
        first = [a for a in md.online(slots).actions(n + 30) if a.name == "store"][:slots]
        assert [a for a in sweep(n) if a.name == "store"][:slots] == first[: min(n - 1 or 1, slots)]


def test_multistage_puts_least_used_states_on_disk():
    schedule = md.multistage(2, 3)
    assert advances(schedule, 40) == advances(md.revolve(5), 40)
    uses = [a.where for a in schedule.actions(40) if a.name in ("store", "restore")]
    counts = [uses.count(slot) for slot in range(5)]
    assert counts[1] >= max(counts[2:]) > 0  # slot 0 has the initial state, which is there anyway


def test_a_picture_has_all_actions(tmp_path):
    schedule = md.multistage(2, 2)
    path = md.draw(schedule)(30).render(tmp_path / "schedule.svg")
    drawn = [x.get("stroke") for x in xml.etree.ElementTree.parse(path).iter() if x.tag.endswith("path")]
    names = [a.name for a in schedule.actions(30)]
    assert [drawn.count(color) for color in ("#4c78a8", "#e45756")] == [names.count("advance"), 30]
    assert drawn.count("#9aa5b1") + drawn.count("#b8860b") == names.count("restore")
    assert f"30 steps, 4 slots: {sum(advances(schedule, 30))} steps again" in path.read_text()
    with pytest.raises(ValueError, match=r"is drawn as \.svg, not \.png"):
        md.draw(schedule)(30).render(tmp_path / "schedule.png")


def test_tables_of_fewer_steps_fit_into_those_of_more():
    for schedule in SCHEDULES:
        advances = [schedule.advances(n) for n in range(80)]
        assert advances == sorted(advances)
