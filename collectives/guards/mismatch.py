"""The mismatch check: find ranks whose calls, or their operands' types, differ.

MPI does not check that. If one rank sends four float32 that another receives as four int32, or if one rank's first sum
meets another rank's second, the numbers are wrong, and nothing reports it. The types of values are local to a rank, and
so are the causes of a mismatch: a file that only one rank has, a dtype that a library chose, an `if`.

So ranks compare the calls that they are about to make: at the first call of each kind (a collective over certain axes
on values of certain types), and after a number of calls of known kinds, sooner if they are large. Ranks that have
agreed so far know the same kinds, so they compare at the same calls. If they disagree, one rank may wait for a
comparison that another never makes: the deadlock watchdog (`deadlock.py`) finds that. (If calls of known kinds but of
different sizes meet, MPI may notice first, and end the job with its own error.) When the program ends, the watchdog
compares the remaining calls. Between comparisons, the check costs a look-up and an append per call.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff.core.types import ShapedArray
from minidiff.diagnostics.location import here

OFTEN = 64  # compare after this many small calls
LARGE = 2**17  # this many bytes count as one more call
ALONE = {"ppermute"}  # calls in which a rank does not wait for all others
MANY = 2**12  # the number of kinds that are remembered; then all ranks forget theirs at the same call
TAG = 2  # message tag of comparisons; the next one is that of their texts
LINE = 2**9  # the most bytes in a description of a call

#: The error of a thread that Ctrl-C has interrupted in the middle of what makes sense to other ranks only as a whole.
UNFINISHED = (
    "Ctrl-C interrupted this rank while it was beginning a collective, which other ranks may have completed. The ranks "
    "are no longer in step, so it can make no further calls. Do not catch KeyboardInterrupt around collectives: let it "
    "end the program, which ends all ranks"
)
_TYPE = operator.attrgetter("shape", "dtype")
_IS_TYPE = re.compile(r": \w+\[[\d,]*\]")  # a line of a description that has the type of an argument


class DisagreementError(RuntimeError):
    """Ranks called different collectives, or one with operands of different types.

    `calls` lists the compared calls of each rank.
    """

    def __init__(self, text: str, calls: Mapping[int, Sequence[str]] | None = None):
        super().__init__(text)
        self.calls = calls or {}


class Kind(NamedTuple):
    """A kind of call: its description, and the program line that first made one."""

    text: str
    place: str
    weight: int  # its size, as a number of small calls

    def __str__(self) -> str:
        text = f"{self.text}; {self.place}" if self.place else self.text
        return text.encode()[: LINE - 1].decode(errors="ignore")


class MismatchCheck:
    """The calls of this rank on a communicator since its ranks last compared theirs.

    `comm` is the communicator, which also carries the comparisons, under their own tag. `ranks` are the names of its
    ranks in messages. `wait(requests, here)` waits for messages; `here` says whether all ranks are known to have
    reached the comparison. With `each`, every call that waits for all ranks is compared. A thread is in `unfinished`
    while it compares, and stays there if Ctrl-C interrupts it.
    """

    def __init__(
        self,
        comm: Any,
        ranks: Sequence[int],
        wait: Callable[[list, bool], None],
        each: bool = False,
        unfinished: set[int] | None = None,
    ):
        self.comm = comm
        self.ranks = ranks
        self.wait = wait
        self.latest: Kind | None = None  # the kind of the latest call
        self.each = each
        self.unfinished = set() if unfinished is None else unfinished
        self.kinds: dict[tuple, Kind] = {}
        self.since: list[Kind] = []
        self._due = 0

    def note(self, name: str, params: Mapping[str, Any], *values: numpy.ndarray) -> None:
        """Record a call on `values`, which all ranks make, and compare calls if due.

        Raises DisagreementError on all ranks if this call or an earlier one was not the same on all of them.
        """
        key = (name, *params.values(), *map(_TYPE, values))
        kind = self.kinds.get(key)
        if kind is None:
            weight = OFTEN if self.each and name not in ALONE else 1 + sum(x.nbytes for x in values) // LARGE
            if len(self.kinds) >= MANY:
                self.kinds.clear()
            kind = self.kinds[key] = Kind(_text(name, params, values), _place(), weight)
            self._due = OFTEN
        self.latest = kind
        self.since.append(kind)
        self._due += kind.weight
        if self._due >= OFTEN:
            self._compare()

    def compare_once(self, name: str, sizes: Mapping[str, int], lines: Sequence[str]) -> dict[int, str]:
        """Compare the `lines` that describe a call, at the first call with these lines.

        Returns {} if they are the same on all ranks, else the first line that differs, by rank. All ranks of the
        communicator must call it; `sizes` are those of the mesh. Raises DisagreementError if some ranks make another
        call, whose name begins with another word.
        """
        types = tuple(line for line in lines if _IS_TYPE.search(line))
        params = {"axes": tuple(sizes), "sizes": tuple(sizes.values()), "types": types, "digest": _digest(lines)}
        if (name, *params.values()) in self.kinds:
            return {}
        try:
            self.note(name, params)
        except DisagreementError as error:
            latest = [calls[-1] for calls in error.calls.values()]
            word = name.split()[0] + " "
            if agree([[call] for call in latest]) or not all(call.startswith(word) for call in latest):
                raise
            found = self._first_difference(lines)
            if not found:  # the difference is in the truncated part of a long line
                raise
            return found
        return {}

    def _first_difference(self, lines: Sequence[str]) -> dict[int, str]:
        place, found = _place(), {}
        self.unfinished.add(threading.get_ident())
        for start in itertools.count(step=OFTEN):
            page = [str(Kind(line, place, 0)) for line in lines[start : start + OFTEN]]
            said = [text.split("\n") if text else [] for text in self._from_all("\n".join(page))]
            columns = itertools.zip_longest(*said, fillvalue="nothing more")
            found = next((dict(zip(self.ranks, c)) for c in columns if not agree([[line] for line in c])), {})
            if found or not any(said):
                break
        self.unfinished.discard(threading.get_ident())
        return found

    def _compare(self) -> None:
        thread, calls = threading.get_ident(), {}
        if thread in self.unfinished:
            raise RuntimeError(UNFINISHED)
        self.unfinished.add(thread)
        low, high = self._extremes(_digest(kind.text for kind in self.since))
        if low != high:
            *before, last = self.since  # at most OFTEN
            said = self._from_all("\n".join([*map(str, before), str(last._replace(place=_place()))]))
            calls = {r: text.split("\n") for r, text in zip(self.ranks, said)}
            self.kinds = {}
        self.since, self._due = [], 0
        self.unfinished.discard(thread)
        if calls:
            raise DisagreementError(disagreement(calls), calls)

    def _extremes(self, mine: int) -> tuple[int, int]:
        """The least and greatest value of all ranks; each step doubles those covered."""
        here, size = self.comm.Get_rank(), self.comm.Get_size()
        known, coming = numpy.array([mine, mine]), numpy.empty(2, int)
        for step in range((size - 1).bit_length()):
            self._send_receive(known, (here + 2**step) % size, coming, (here - 2**step) % size, False)
            known = numpy.array([min(known[0], coming[0]), max(known[1], coming[1])])
        return int(known[0]), int(known[1])

    def _from_all(self, text: str) -> list[str]:
        here, size = self.comm.Get_rank(), self.comm.Get_size()
        said = numpy.zeros((size, LINE * OFTEN), numpy.uint8)
        mine = text.encode()
        said[here, : len(mine)] = numpy.frombuffer(mine, numpy.uint8)
        for step in range(1, size):
            self._send_receive(said[here], (here + step) % size, said[here - step], (here - step) % size, True)
        return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in said]

    def _send_receive(self, given: numpy.ndarray, to: int, coming: numpy.ndarray, source: int, here: bool) -> None:
        tag = TAG + here  # a text is never taken for a number
        self.wait([self.comm.Irecv(coming, source, tag), self.comm.Isend(given, to, tag)], here)


def agree(made: Iterable[Sequence[str]]) -> bool:
    """Whether these ranks made the same calls, whatever the lines that made them.

    >>> agree([["psum over 'i' of f64[]; line 1"], ["psum over 'i' of f64[]; line 2"]])
    True
    """
    return len({tuple(map(_without_place, calls)) for calls in made}) == 1


def _without_place(call: str) -> str:
    return call.partition("; ")[0]


def disagreement(calls: Mapping[int, Sequence[str]]) -> str:
    """The message for mismatched calls: the first that differ, and their ranks."""
    ranks = sorted(calls)
    columns = itertools.zip_longest(*[calls[r] for r in ranks], fillvalue="no further one")
    made = next(column for column in columns if len({*map(_without_place, column)}) > 1)
    alike = len({re.sub(" of [^(]*", "", _without_place(call)).strip() for call in made}) == 1
    advice = _OTHER_TYPES if alike else _OTHER_CALLS
    return report("ranks do not call the same collective, of values of the same types", dict(zip(ranks, made)), advice)


def report(what: str, said: Mapping[int, str], advice: str) -> str:
    """Format an error: what is wrong, what each rank reports, and advice."""
    return "\n".join([f"{what}:", *[f"  {shown(line)}" for line in who_says(said)], advice])


def who_says(said: Mapping[int, str]) -> list[str]:
    """Each distinct text, preceded by the ranks that report it.

    >>> who_says({0: "a", 1: "b", 2: "a"})
    ['ranks 0, 2: a', 'rank 1: b']
    """
    who = defaultdict(list)
    for rank, text in sorted(said.items()):
        who[text].append(rank)
    return [f"{ranks_named(ranks)}: {text}" for text, ranks in who.items()]


_OTHER_TYPES = (
    "An array has another shape or dtype there, or calls come in another order. Make it the same on all ranks, as in "
    "np.asarray(x, np.float64); spmd.check_invariant(x, mesh) says whether x is"
)
_OTHER_CALLS = (
    "Every rank runs the whole program, and all make the same calls in the same order: do not communicate under an "
    "`if mesh.rank == 0:`, nor in a loop that is longer on some ranks"
)


def ranks_named(ranks: Sequence[int]) -> str:
    """Ranks as text.

    >>> ranks_named([0, 2])
    'ranks 0, 2'
    """
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"


def _text(name: str, params: Mapping[str, Any], values: Iterable[numpy.ndarray]) -> str:
    types = ", ".join(str(ShapedArray(x.shape, x.dtype)) for x in values)
    rest = ", ".join(
        [f"{k}={v}" for k, v in params.items() if k not in ("axes", "size", "types", "digest")]
        + [*params.get("types", ())]
    )
    text = f"{name} over {', '.join(map(repr, params['axes']))}"
    text += f" of {types}" * bool(types) + f" ({rest})" * bool(rest)
    text = text if len(text) <= 150 else f"{text[:140]}… {_digest([text]) % 10**6:06}"
    return f"{text} #{params['digest']:014x}" if "digest" in params else text


def shown(call: str) -> str:
    """A call as users see it: without the digest of what it does not show.

    >>> shown("shard_map of f over 'i' (sizes=(2,), args[0]: f64[4]) #00ed160278f4c7; line 1")
    "shard_map of f over 'i' (sizes=(2,), args[0]: f64[4]); line 1"
    """
    return re.sub(" #[0-9a-f]{14}", "", call)


def _place() -> str:
    return str(here() or "")


def _digest(texts: Iterable[str]) -> int:
    """A hash of these texts, the same on all ranks."""
    return int.from_bytes(hashlib.blake2b("\n".join(texts).encode(), digest_size=7).digest(), "big")
