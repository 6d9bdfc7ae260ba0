"""Ranks of one program make the same calls, in one order, of values of the same types: found out where they do not.

MPI does not see to it. What one rank sends as four float32 another takes for four int32, or the first of its sums for
the second of the others': the numbers are wrong, and nothing says so. Types of values are local, so are the mistakes
that make them differ from rank to rank: a file that only one of them has, a dtype that a library chose, an `if`.

So ranks compare what they are about to do: when a call is the first of its kind (a collective, over these axes, of
values of this type), and after so many calls of known ones, fewer where they are large. Since ranks that agreed so far
know the same kinds, they compare at the same calls; where they do not, one waits to compare what another never does,
and `watch` finds that. (Where known ones of different sizes meet, MPI may notice first, and end the job in its own
words.) What is left at the end of the program is compared there. Between two comparisons, all that a call does for it
is to look up its kind, and to note it.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff.core import ShapedArray
from minidiff.location import here

OFTEN = 64  # calls are compared, if they are small
LARGE = 2**17  # bytes that count as one call more
ALONE = {"ppermute"}  # in these a rank does not wait for all others
MANY = 2**12  # kinds of calls are remembered; then they are forgotten, on all ranks at once
TAG = 2  # of messages that compare calls
LINE = 2**9  # bytes that a rank says of a call, once they are found to differ

_TYPE = operator.attrgetter("shape", "dtype")


class DisagreementError(RuntimeError):
    """Ranks called different collectives, or the same on values of different types.

    `calls` lists for each rank the calls that were compared.
    """

    def __init__(self, text: str, calls: Mapping[int, Sequence[str]] | None = None):
        super().__init__(text)
        self.calls = calls or {}


class Kind(NamedTuple):
    """What a call does, and the line that asked for it: of several alike, for the first."""

    text: str
    place: str
    weight: int  # in small calls

    def __str__(self) -> str:
        text = f"{self.text}; {self.place}" if self.place else self.text
        return text.encode()[: LINE - 1].decode(errors="ignore")


class MismatchCheck:
    """What this rank called on a communicator since its ranks last compared.

    `comm` is that communicator, for messages about calls: they have a tag of their own. `wait` waits for them, and is
    told whether all ranks are known to be here. They are called `ranks`. With `each`, whatever waits for all ranks is
    compared each time.
    """

    def __init__(
        self,
        comm: Any,
        ranks: Sequence[int],
        wait: Callable[[list, bool], None],
        each: bool = False,
    ):
        self.comm = comm
        self.ranks = ranks
        self.wait = wait
        self.latest: Kind | None = None  # the call noted last
        self.each = each
        self.kinds: dict[tuple, Kind] = {}
        self.since: list[Kind] = []
        self._due = 0

    def note(self, name: str, params: Mapping[str, Any], *values: numpy.ndarray) -> None:
        """Take note of a call of `values`. It may be compared: all ranks of the communicator make it.

        Raises DisagreementError on all of them where it, or one before it, was not the same on all.
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
        """Compare the `lines` that describe a call, if it is the first with these: {} where all ranks have the same.

        Otherwise the first line that differs, by rank. All ranks of the communicator call it; `sizes` are those of the
        mesh. Raises DisagreementError where some make another call, whose name begins with another word.
        """
        params = {"axes": tuple(sizes), "sizes": tuple(sizes.values()), "digest": f"{_digest(lines):014x}"}
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
            if not found:  # it is in what was cut off a long line
                raise
            return found
        return {}

    def _first_difference(self, lines: Sequence[str]) -> dict[int, str]:
        place = _place()
        for start in itertools.count(step=OFTEN):
            page = [str(Kind(line, place, 0)) for line in lines[start : start + OFTEN]]
            said = [text.split("\n") if text else [] for text in self._from_all("\n".join(page))]
            for column in itertools.zip_longest(*said, fillvalue="nothing more"):
                if not agree([[line] for line in column]):
                    return dict(zip(self.ranks, column))
            if not any(said):
                break
        return {}

    def _compare(self) -> None:
        low, high = self._extremes(_digest(kind.text for kind in self.since))
        if low != high:
            *before, last = self.since  # no more than OFTEN
            said = self._from_all("\n".join([*map(str, before), str(last._replace(place=_place()))]))
            self.kinds, self.since = {}, []
            calls = {r: text.split("\n") for r, text in zip(self.ranks, said)}
            raise DisagreementError(disagreement(calls), calls)
        self.since.clear()
        self._due = 0

    def _extremes(self, mine: int) -> tuple[int, int]:
        """The least and the greatest of what ranks have: in each step, of twice as many."""
        here, size = self.comm.Get_rank(), self.comm.Get_size()
        known, coming = numpy.array([mine, mine]), numpy.empty(2, int)
        for step in range((size - 1).bit_length()):
            self._exchange(known, (here + 2**step) % size, coming, (here - 2**step) % size, False)
            known = numpy.array([min(known[0], coming[0]), max(known[1], coming[1])])
        return int(known[0]), int(known[1])

    def _from_all(self, text: str) -> list[str]:
        here, size = self.comm.Get_rank(), self.comm.Get_size()
        said = numpy.zeros((size, LINE * OFTEN), numpy.uint8)
        mine = text.encode()
        said[here, : len(mine)] = numpy.frombuffer(mine, numpy.uint8)
        for step in range(1, size):
            self._exchange(said[here], (here + step) % size, said[here - step], (here - step) % size, True)
        return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in said]

    def _exchange(self, given: numpy.ndarray, to: int, coming: numpy.ndarray, source: int, here: bool) -> None:
        self.wait([self.comm.Irecv(coming, source, TAG), self.comm.Isend(given, to, TAG)], here)


def agree(made: Iterable[Sequence[str]]) -> bool:
    """Whether these ranks made the same calls, in whatever lines.

    >>> agree([["psum over 'i' of f64[]; line 1"], ["psum over 'i' of f64[]; line 2"]])
    True
    """
    return len({tuple(map(_without_place, calls)) for calls in made}) == 1


def _without_place(call: str) -> str:
    return call.partition("; ")[0]


def disagreement(calls: Mapping[int, Sequence[str]]) -> str:
    """What is said of ranks whose calls are not the same: the first that is not, and who makes which."""
    ranks = sorted(calls)
    columns = itertools.zip_longest(*[calls[r] for r in ranks], fillvalue="no further one")
    made = next(column for column in columns if len({*map(_without_place, column)}) > 1)
    alike = len({re.sub(" of [^(]*", "", _without_place(call)).strip() for call in made}) == 1
    advice = _OTHER_TYPES if alike else _OTHER_CALLS
    return report("ranks do not call the same collective, of values of the same types", dict(zip(ranks, made)), advice)


def report(what: str, said: Mapping[int, str], advice: str) -> str:
    """The message of an error: what is wrong, which ranks say what, and what to write instead."""
    return "\n".join([f"{what}:", *[f"  {line}" for line in who_says(said)], advice])


def who_says(said: Mapping[int, str]) -> list[str]:
    """Each text that ranks say, after the ranks that say it.

    >>> who_says({0: "a", 1: "b", 2: "a"})
    ['ranks 0, 2: a', 'rank 1: b']
    """
    who = defaultdict(list)
    for rank, text in sorted(said.items()):
        who[text].append(rank)
    return [f"{ranks_named(ranks)}: {text}" for text, ranks in who.items()]


_OTHER_TYPES = (
    "An array has another shape or dtype there, or calls have another order. Make it the same on all ranks, as in "
    "np.asarray(x, np.float64); spmd.check_invariant(x, mesh) says whether x is"
)
_OTHER_CALLS = (
    "Every rank runs the whole program, and all call the same, in one order: what communicates does not stand under "
    "an `if mesh.rank == 0:`, nor in a loop that is longer on some"
)


def ranks_named(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> ranks_named([0, 2])
    'ranks 0, 2'
    """
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"


def _text(name: str, params: Mapping[str, Any], values: Iterable[numpy.ndarray]) -> str:
    types = ", ".join(str(ShapedArray(x.shape, x.dtype)) for x in values)
    rest = ", ".join(f"{k}={v}" for k, v in params.items() if k not in ("axes", "size"))
    text = f"{name} over {', '.join(map(repr, params['axes']))}"
    text += f" of {types}" * bool(types) + f" ({rest})" * bool(rest)
    return text if len(text) <= 150 else f"{text[:140]}… {_digest([text]) % 10**6:06}"


def _place() -> str:
    return str(here() or "")


def _digest(texts: Iterable[str]) -> int:
    """A number that differs where any of these do."""
    return int.from_bytes(hashlib.blake2b("\n".join(texts).encode(), digest_size=7).digest(), "big")
