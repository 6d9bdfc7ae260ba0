"""Who waits forever, of ranks that say where they are; and the watchdog, which asks them.

What becomes of whole jobs is in the fault matrix, `tests/mpi/faults.md`.
"""

import gc
import itertools
import threading
import weakref
from collections import Counter
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from collectives.guards.deadlock import COMPARISON, Channel, PendingCall, State, Watchdog, stuck
from tests.checks.samples import each


def call(number, *ranks, on="a", method="Allreduce", collective="psum"):
    return PendingCall((on,), number, method, ranks, collective)


@each(
    "states, expected",
    [
        ([(0, call(5, 0, 1), {"a": 5})], []),  # 1 computes
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(5, 0, 1), {"a": 5})], []),  # they are at it
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(5, 0, 1, method="Bcast"), {"a": 5})], [0, 1]),
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(5, 0, 1, collective="pmax"), {"a": 5})], [0, 1]),
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(6, 0, 1), {"a": 6})], []),  # 0 is about to come to 6
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(1, 0, 1, on="b"), {"a": 4, "b": 1})], [0, 1]),
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(1, 0, 1, on="b"), {"a": 5, "b": 1})], []),
        ([(0, call(5, 0, 1), {"a": 5}), (1, None, {"a": 4})], [0]),
        ([(0, call(5, 0, 1), {"a": 5}), (1, None, {"a": 5})], [0]),  # what it came to was something else
        ([(0, call(5, 0, 1, 2), {"a": 5}), (1, None, {"a": 5})], []),  # 2 computes
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(1, 1, 2, on="b"), {"a": 4, "b": 1})], []),  # 2 computes
        (
            [
                (0, call(1, 0, 1), {"a": 1}),
                (1, call(1, 1, 2, on="b"), {"b": 1}),
                (2, call(1, 0, 2, on="c"), {"c": 1}),
            ],
            [0, 1, 2],
        ),
    ],
)
def test_who_waits_for_ever(states, expected):
    assert stuck({rank: state(rank, call and [call], begun) for rank, call, begun in states}) == expected


@each(
    "result, expected",
    [
        (("Allreduce", "psum"), []),  # it has left 5 behind, and will be left behind at 6
        (("Allgather", "all_gather"), [0, 1]),  # which 0 does not come to, as 1 never does to 5
        (("Allreduce", "pmax"), [0, 1]),
        ((COMPARISON, "psum"), [0, 1]),
        (None, []),  # longer ago than it remembers
    ],
)
def test_a_rank_that_is_ahead_by_another_call(result, expected):
    zero = State(0, (call(5, 0, 1),), {("a",): 5})
    one = State(
        1, (call(6, 0, 1),), {("a",): 6}, recent={("a",): {5: result, 6: ("Allreduce", "psum")} if result else {}}
    )
    assert stuck({0: zero, 1: one}) == expected


def test_a_comparison_is_the_same_whatever_is_compared():
    zero = State(0, (call(5, 0, 1, method=COMPARISON, collective="psum"),), {("a",): 5})
    one = State(1, (call(6, 0, 1),), {("a",): 6}, recent={("a",): {5: (COMPARISON, "pmax")}})
    assert stuck({0: zero, 1: one}) == []


def state(rank, calls, begun):
    return State(rank, calls and tuple(calls), {(on,): n for on, n in begun.items()})


@each("second, expected", [(("b", 1), []), (("b", 2), []), (("d", 1), [0, 1])])
def test_a_rank_comes_if_one_of_its_threads_goes_on(second, expected):
    """The first threads of two ranks wait for each other. The second ones meet, or do not."""
    on, number = second
    zero = state(0, [call(5, 0, 1), call(1, 0, 1, on="b")], {"a": 5, "b": 1})
    one = state(1, [call(1, 0, 1, on="c"), call(number, 0, 1, on=on)], {"a": 4, "c": 1, on: number})
    assert stuck({0: zero, 1: one}) == expected


@given(st.data(), st.integers(1, 2))
def test_ranks_of_one_program_never_wait_for_ever(data, threads):
    """Ranks, each with so many threads, that make the same calls in one order, as far as they have come; some compute.

    (One that all others of a call have left behind, and the program too, is about to be through.)
    """
    ranks = range(4)
    group = st.sampled_from([(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)])
    groups = [data.draw(st.lists(group, max_size=8)) for _ in range(threads)]
    done = [dict.fromkeys(ranks, 0) for _ in range(threads)]  # how many of the groups' calls are behind each rank
    for _ in range(data.draw(st.integers(0, 20))):
        r, t = data.draw(st.sampled_from(ranks)), data.draw(st.integers(0, threads - 1))
        k = done[t][r]
        if k < len(groups[t]) and (r not in groups[t][k] or all(done[t][m] >= k for m in groups[t][k])):
            done[t][r] += 1
    left = {r for r in ranks if all(done[t][r] == len(groups[t]) for t in range(threads))}
    states = {}
    for r in ranks:
        begun = Counter((t, g) for t in range(threads) for g in groups[t][: done[t][r] + 1] if r in g)
        at = [(t, groups[t][done[t][r]]) for t in range(threads) if done[t][r] < len(groups[t])]
        recent = {on: dict.fromkeys(range(1, n + 1), ("Allreduce", "")) for on, n in begun.items()}
        if r in left:
            states[r] = State(r, None, begun, recent=recent)
        elif all(r in g and not left.issuperset({*g} - {r}) for _, g in at) and data.draw(st.booleans()):
            states[r] = State(
                r, tuple(PendingCall((t, g), begun[t, g], "Allreduce", g) for t, g in at), begun, recent=recent
            )
    assert stuck(states) == []


# ---------------------------------------------------------------- the watchdog


def test_looking_at_threads_keeps_none_of_their_values():
    watchdog, looked = Watchdog(lambda text, code: None), []

    def program():
        dropped, last = np.ones(3), np.ones(3)
        refs = weakref.ref(dropped), weakref.ref(last)
        threading.Thread(target=lambda: looked.append(watchdog._waiting_calls()), daemon=True).start()
        while not looked:
            pass
        del dropped
        assert refs[0]() is None
        return refs[1]

    gc.disable()
    try:
        assert program()() is None
    finally:
        gc.enable()


class Wire(list):
    """A communicator of rank 2 among `ranks`, which lists the ranks that it sends to."""

    def __init__(self, ranks):
        self.ranks = ranks

    def Get_rank(self):
        return self.ranks.index(2)

    def isend(self, _, destination, tag):
        self.append(self.ranks[destination])
        return SimpleNamespace(Test=lambda: True)


def test_a_rank_reports_once_to_each_coordinator():
    """The coordinator ends when it knows, by any communicator, that all have ended: it would not receive the rest."""
    watchdog = Watchdog(lambda text, code: None)
    watchdog.rank = 2
    wires = [Wire(ranks) for ranks in ((0, 2), (2, 0, 1), (1, 2), (2, 3))]
    watchdog.channels = [Channel(wire, wire.ranks) for wire in wires]
    watchdog._record(watchdog._state(None), 0.0)
    watchdog._send()
    assert sorted(itertools.chain(*wires)) == [0, 1]
