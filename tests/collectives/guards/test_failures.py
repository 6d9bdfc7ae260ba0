"""Who waits forever, of ranks that say where they are; and how calls that are not the same are reported.

What becomes of whole jobs is in the fault matrix, `tests/mpi/test_faults_mpi.py`.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidiff as md
from collectives.backends.base import CallCounter
from collectives.guards.deadlock import COMPARISON, PendingCall, State, stuck
from collectives.guards.mismatch import OFTEN, CallSignature, MismatchCheck, calls_agree, mismatch_message, note_calls
from collectives.ops import psum_p
from tests import PATIENCE
from tests.checks.samples import each

#: For programs: Ctrl-C for this process as soon as its main thread waits for other ranks.
INTERRUPTING = """
import os, signal, sys, threading, time
def interrupt_once_it_waits():
    def waits(frame):
        return frame is not None and (frame.f_code.co_name == "wait_for" or waits(frame.f_back))
    def interrupt():
        while not waits(sys._current_frames()[threading.main_thread().ident]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
"""


def launching(ranks, *command):
    """A process that runs a Python command on ranks, as a user does: outside of what this process knows of MPI.

    The launcher is that of this Python's own MPI, if it has one. With None for ranks there is no launcher.
    """
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "MPI_", "HYDRA", "OMPI_COMM"))}
    launched = [launcher, "-n", str(ranks)] if ranks else []
    return subprocess.Popen(
        [*launched, sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def mpiexec(ranks, *command):
    """The outcome of a command on ranks."""
    with launching(ranks, *command) as job:
        try:
            out, err = job.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


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


@pytest.mark.parametrize("second, expected", [(("b", 1), []), (("b", 2), []), (("d", 1), [0, 1])])
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


KINDS = st.builds(CallSignature, st.sampled_from("abc"), st.sampled_from(["", "line 1", "ü" * 900]), st.just(1))


@given(st.lists(st.lists(KINDS, max_size=5), min_size=2, max_size=3))
def test_the_first_call_that_is_not_the_same(result):
    """Whatever the lines of the program are that made the calls."""
    texts = [[kind.text for kind in kinds] for kinds in result]
    message = {rank: [str(kind) for kind in kinds] for rank, kinds in enumerate(result)}
    assert calls_agree(message.values()) == all(t == texts[0] for t in texts)
    if not calls_agree(message.values()):
        same = next(n for n in range(6) if len({tuple(t[: n + 1]) for t in texts}) > 1)
        report = mismatch_message(message)
        for rank, kinds in enumerate(result):
            call = str(kinds[same]) if same < len(kinds) else "no further one"
            assert re.search(rf"  ranks? ([0-9, ]+, )?{rank}(, [0-9, ]+)?: {re.escape(call)}\n", report)


# ---------------------------------------------------------------- calls that are made again and again


class Alone:
    """The communicator of a single rank."""

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 1


@pytest.mark.parametrize("size", [1, 2**20], ids=["small", "large"])
def test_what_notes_a_call_again_does_as_a_call_that_is_looked_up(size):
    """Ranks that run a compiled program, and others that do not, compare at the same calls."""
    x, params = numpy.ones(size), {"axes": ("i",), "size": 2}
    checks = [MismatchCheck(Alone(), [0], wait=None) for _ in range(2)]
    counter = CallCounter()
    again = note_calls(lambda x: x, SimpleNamespace(mismatch_check=checks[0]), psum_p, params, [md.typeof(x)], counter)
    for k in range(3 * OFTEN):
        assert again(x) is x
        assert (counter.calls, counter.bytes) == (k + 1, (k + 1) * x.nbytes)
        checks[1].note("psum", params, x)
        if k % 50 == 7:
            for check in checks:
                check.note("pmax", {**params, "k": k}, x)
        if k % 50 == 23:  # as after a disagreement
            for check in checks:
                check.signatures = {}
        one, other = ((c.calls_since, c.latest, [*c.signatures], c._weight) for c in checks)
        assert [str(kind).partition(";")[0] for kind in one[0]] == [str(kind).partition(";")[0] for kind in other[0]]
        assert one[1].text == other[1].text and one[2:] == other[2:]
