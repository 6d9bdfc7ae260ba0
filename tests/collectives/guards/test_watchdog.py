"""The deadlock watchdog: its effects on a program's threads, and the rank to which it reports."""

import gc
import itertools
import threading
import weakref
from types import SimpleNamespace

import numpy as np

from collectives.guards.deadlock import Channel, Watchdog


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
