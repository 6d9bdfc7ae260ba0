"""Calls that are not the same: how they are compared, and reported."""

import re
from types import SimpleNamespace

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from collectives.backends.base import CallCounter
from collectives.guards.mismatch import OFTEN, CallSignature, MismatchCheck, calls_agree, mismatch_message, note_calls
from collectives.ops import psum_p
from tests.checks.samples import each

KINDS = st.builds(CallSignature, st.sampled_from("abc"), st.sampled_from(["", "line 1", "ü" * 900]), st.just(1))


@settings(max_examples=30)
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


class Alone:
    """The communicator of a single rank."""

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 1


@each("size", [1, 2**20], ids=["small", "large"])
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
