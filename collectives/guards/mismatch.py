"""The mismatch check: find ranks whose calls, or their operands' types, differ.

MPI does not check that. If one rank sends four float32 that another receives as four int32, or if one rank's first sum
meets another rank's second, the numbers are wrong, and nothing reports it. The types of values are local to a rank, and
so are the causes of a mismatch: a file that only one rank has, a dtype that a library chose, an `if`.

So ranks compare the calls that they are about to make: at the first call of each signature (a collective over certain
axes on values of certain types), and after a number of further calls, sooner if they are large. Ranks that have agreed
so far know the same signatures, so they compare at the same calls. If they disagree, one rank may wait for a comparison
that another never makes: the deadlock watchdog (`deadlock.py`) finds that. (If calls of known signatures but of
different sizes meet, MPI may notice first, and end the job with its own error.) When the program ends, the watchdog
compares the remaining calls. Between comparisons, the check costs a look-up and an append per call.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from collectives.tags import Tag
from minidiff.core.types import ShapedArray
from minidiff.errors.location import describe_line

if TYPE_CHECKING:
    from collectives.collective import Collective

OFTEN = 128  # compare after this many small calls: a comparison takes as long as five of them
LARGE = 2**16  # this many bytes count as one more call
MAX_SIGNATURES = 2**12  # remembered ones; then all ranks forget theirs at the same call

#: The error of a rank that an exception took out of a call, which other ranks may have completed.
UNFINISHED = (
    "{} on this rank, so this rank makes no further calls: others may have completed that call, or wait in it, and the "
    "ranks are out of sync. Do not catch exceptions around collectives: let them end the program, on all ranks"
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


class CallSignature(NamedTuple):
    """The description of equal calls, and the program line that first made one."""

    text: str
    line: str
    weight: int  # its size, as a number of small calls
    digest: bytes = b""  # of the text

    def __str__(self) -> str:
        return f"{self.text}; {self.line}" if self.line else self.text


class MismatchCheck:
    """The calls of this rank on a communicator since its ranks last compared theirs, and how ranks compare texts.

    `comm` is the communicator, which also carries the comparisons, under their own tag. `ranks` are the names of its
    ranks in messages. `wait(requests, buffers, arrived)` waits for messages; `arrived` says whether all ranks are known
    to have reached the comparison. With `every_call`, each call that waits for all ranks is compared. `unfinished` has
    the calls, of this process, that an exception left before they were complete: after one there are no others.
    """

    def __init__(
        self,
        comm: Any,
        ranks: Sequence[int],
        wait: Callable[[Iterable[Any], tuple, bool], None],
        every_call: bool = False,
        unfinished: list[str] | None = None,
    ):
        self.comm = comm
        self.ranks = ranks
        self.wait = wait
        self.latest: CallSignature | None = None  # the signature of the latest call
        self.every_call = every_call
        self.unfinished: list[str] = [] if unfinished is None else unfinished
        self.signatures: dict[tuple, CallSignature] = {}
        self.counts: dict[int, int] = {}  # calls whose values ranks compare, by their keys: see `is_due`
        self.calls_since: list[CallSignature] = []  # since ranks last compared theirs
        self._weight = 0  # of these calls: they are compared when it reaches OFTEN
        self._exception = ""  # an exception that left a body, until the next comparison

    def note(self, name: str, params: Mapping[str, Any], *values: Any, synchronizes: bool = True) -> None:
        """Record a call on `values`, or types, which all ranks make, and compare calls if due.

        It `synchronizes` if each rank waits in it for all others.

        Raises DisagreementError on all ranks if this call or an earlier one was not the same on all of them.
        """
        key = (name, *params.values(), *map(_TYPE, values))
        signature = self.signatures.get(key)
        if signature is None:
            weight = OFTEN if self.every_call and synchronizes else 1 + sum(x.nbytes for x in values) // LARGE
            if len(self.signatures) >= MAX_SIGNATURES:
                self.signatures = {}
            text = _text(name, params, values)
            signature = self.signatures[key] = CallSignature(text, _current_line(), weight, _hash(text.encode()))
            self._weight = OFTEN
        self.repeat(signature)

    def repeat(self, signature: CallSignature) -> None:
        """Record a call of a known signature, and compare calls if due."""
        self.latest = signature
        self.calls_since.append(signature)
        self._weight += signature.weight
        if self._weight >= OFTEN:
            self._compare()
            self.latest = signature

    def compare_next(self, error: BaseException) -> None:
        """Compare the next call, since an exception leaves a body: ranks that it does not leave may be elsewhere."""
        self._weight, self._exception = OFTEN, type(error).__name__

    def compare_once(self, name: str, sizes: Mapping[str, int], lines: Sequence[str]) -> dict[int, str]:
        """Compare the `lines` that describe a call, at the first call with these lines.

        Returns {} if they are the same on all ranks, else the first line that differs, by rank. All ranks of the
        communicator must call it; `sizes` are those of the mesh. Raises DisagreementError if some ranks make another
        call, whose name begins with another word.
        """
        types = tuple(line for line in lines if _IS_TYPE.search(line))
        params = {"axes": tuple(sizes), "sizes": tuple(sizes.values()), "types": types, "digest": _digest(lines)}
        return {} if (name, *params.values()) in self.signatures else self._compare_lines(name, params, lines)

    def compare_values(self, sizes: Mapping[str, int], lines: Sequence[str]) -> dict[int, str]:
        """Compare the `lines` that describe values, now, as `compare_once` does those of a call."""
        return self._compare_lines("comparison of values", {"axes": tuple(sizes), "digest": _digest(lines)}, lines)

    def _compare_lines(self, name: str, params: Mapping[str, Any], lines: Sequence[str]) -> dict[int, str]:
        self._weight, counts = OFTEN, self.counts
        try:
            self.note(name, params)
        except DisagreementError as error:
            latest = [calls[-1] for calls in error.calls.values()]
            word = name.split()[0] + " "
            if calls_agree([[call] for call in latest]) or not all(call.startswith(word) for call in latest):
                raise
            texts = self.gather_texts("\n".join([*lines, _current_line()]))
            lists = {rank: text.split("\n") for rank, text in zip(self.ranks, texts)}
            self.counts = counts  # the calls agree
            callers = {rank: texts.pop() for rank, texts in lists.items()}
            return {rank: f"{line}; {callers[rank]}" for rank, line in first_difference(lists).items()}
        return {}

    def is_due(self, key: int) -> bool:
        """Count a call, and return whether it is the first, second, fourth, … of its key, which compare their values.

        Ranks whose calls agree count alike. All forget the counts at the same call: if there are MAX_SIGNATURES, or
        after an error, which may have kept some ranks from a call.
        """
        if len(self.counts) >= MAX_SIGNATURES:
            self.counts = {}
        self.counts[key] = count = self.counts.get(key, 0) + 1
        return not count & (count - 1)

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, in their order, after comparing the calls so far. All ranks must call it."""
        if self.calls_since:
            self._compare()
        with self.critical_section():
            return self._texts(text)

    @contextlib.contextmanager
    def critical_section(self) -> Iterator[None]:
        """Let this process make no further calls if an exception leaves the `with` statement."""
        self.check_finished()
        try:
            yield
        except BaseException as error:
            self.unfinished.append(unfinished_call(error, "a comparison of calls", self.latest))
            raise

    def check_finished(self) -> None:
        """Raise RuntimeError if an exception has left a call before it was complete."""
        if self.unfinished:
            raise RuntimeError(UNFINISHED.format(self.unfinished[0]))

    def _compare(self) -> None:
        self.check_finished()
        calls: dict[int, list[str]] = {}
        if self._exception and self.latest:
            reason = f" (now, because {self._exception} left a body on this mesh)"
            self.latest = self.latest._replace(text=self.latest.text + reason)
        with self.critical_section():
            low, high = self._extremes(_number(b"".join([signature.digest for signature in self.calls_since])))
            if low != high:
                *before, last = self.calls_since  # at most OFTEN
                texts = self._texts("\n".join([*map(str, before), str(last._replace(line=_current_line()))]))
                calls = {rank: text.split("\n") for rank, text in zip(self.ranks, texts)}
                self.signatures, self.counts = {}, {}
            self.calls_since, self._weight, self._exception = [], 0, ""
        if calls:
            raise DisagreementError(mismatch_message(calls), calls)

    def _extremes(self, value: int, arrived: bool = False) -> tuple[int, int]:
        """Return the least and greatest value of all ranks; each step doubles those covered."""
        extremes, received = numpy.array([value, value]), numpy.empty(2, int)
        for count in self._powers_of_two():
            self._send_receive(extremes, received, count, arrived)
            extremes = numpy.array([min(extremes[0], received[0]), max(extremes[1], received[1])])
        return int(extremes[0]), int(extremes[1])

    def _texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, which have all arrived; each step doubles the known ones."""
        rank, size = self.comm.Get_rank(), self.comm.Get_size()
        data = text.encode(errors="backslashreplace")  # it may have half a surrogate pair
        longest = self._extremes(len(data), arrived=True)[1]
        rows = numpy.zeros((size, longest), numpy.uint8)  # row k: the text of the rank k before this one
        rows[0, : len(data)] = numpy.frombuffer(data, numpy.uint8)
        for count in self._powers_of_two():
            self._send_receive(rows[: size - count][:count], rows[count : 2 * count], count, arrived=True)
        return [bytes(rows[(rank - r) % size]).rstrip(b"\0").decode() for r in range(size)]

    def _powers_of_two(self) -> list[int]:
        return [1 << k for k in range((self.comm.Get_size() - 1).bit_length())]

    def _send_receive(self, sent: numpy.ndarray, received: numpy.ndarray, by: int, arrived: bool) -> None:
        """Send to the rank `by` further around the ring, and receive from the one as far before."""
        rank, size = self.comm.Get_rank(), self.comm.Get_size()
        source, destination, tag = (rank - by) % size, (rank + by) % size, Tag.COMPARISON

        def start() -> Iterator[Any]:
            yield self.comm.Irecv(received, source, tag)
            yield self.comm.Isend(sent, destination, tag)

        self.wait(start(), (sent, received), arrived)


def unfinished_call(error: BaseException, call: str, signature: CallSignature | None) -> str:
    """Return the text of a call that an exception left before it was complete."""
    return f"{type(error).__name__} left {call}" + f" ({displayed_call(str(signature))})" * bool(signature)


def note_calls(
    execute: Callable,
    comm: Any,
    primitive: Collective,
    params: Mapping[str, Any],
    types: Sequence[ShapedArray],
    counter: Any,
) -> Callable:
    """Return `execute`, a collective on a communicator, with each call counted and noted before it is made.

    Its signature is looked up once, until the communicator's check forgets its own.
    """
    nbytes = sum(x.nbytes for x in types)
    signature: Any = None
    signatures: Any = None  # of the check, when the signature was looked up

    def noted(*args):
        nonlocal signature, signatures
        counter.calls += 1
        counter.bytes += nbytes
        check = comm.mismatch_check
        if check.signatures is signatures:
            check.repeat(signature)
        else:
            check.note(primitive.name, params, *types, synchronizes=primitive.synchronizes)
            signature, signatures = check.latest, check.signatures
        return execute(*args)

    return noted


def calls_agree(lists: Iterable[Sequence[str]]) -> bool:
    """Whether these ranks made the same calls, whatever the lines that made them.

    >>> calls_agree([["psum over 'i' of f64[]; line 1"], ["psum over 'i' of f64[]; line 2"]])
    True
    """
    return len({tuple(map(_without_line, calls)) for calls in lists}) == 1


def _without_line(call: str) -> str:
    return call.partition("; ")[0]


def first_difference(
    lists: Mapping[int, Sequence[str]], missing: str = "nothing more", key: Callable[[str], str] = str
) -> dict[int, str]:
    """Return the first line, by rank, whose `key` is not the same on all ranks; {} if there is none.

    >>> first_difference({0: ["a", "b"], 1: ["a"]})
    {0: 'b', 1: 'nothing more'}
    """
    columns = itertools.zip_longest(*lists.values(), fillvalue=missing)
    return next((dict(zip(lists, column)) for column in columns if len({*map(key, column)}) > 1), {})


def mismatch_message(calls: Mapping[int, Sequence[str]]) -> str:
    """Return the message for mismatched calls: the first that differ, and their ranks."""
    differing = first_difference(calls, "no further one", _without_line)
    same_name = len({re.sub(" of [^(]*", "", _without_line(call)).strip() for call in differing.values()}) == 1
    advice = _OTHER_TYPES if same_name else _OTHER_CALLS
    return report("ranks do not call the same collective, of values of the same types", differing, advice)


def report(error: str, lines: Mapping[int, str], advice: str) -> str:
    """Format an error, with the line that each rank reports, and advice."""
    return "\n".join([f"{error}:", *[f"  {displayed_call(line)}" for line in group_reports(lines)], advice])


def group_reports(texts: Mapping[int, str]) -> list[str]:
    """Return each distinct text, preceded by the ranks that report it.

    >>> group_reports({0: "a", 1: "b", 2: "a"})
    ['ranks 0, 2: a', 'rank 1: b']
    """
    ranks_by_text = defaultdict(list)
    for rank, text in sorted(texts.items()):
        ranks_by_text[text].append(rank)
    return [f"{describe_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()]


_OTHER_TYPES = (
    "An array has a different shape or dtype there, or the call order differs. Make it the same on all ranks, as in "
    "np.asarray(x, np.float64); spmd.check_invariant(x, mesh) says whether x is"
)
_OTHER_CALLS = (
    "Every rank runs the whole program, and all make the same calls in the same order: do not communicate under an "
    "`if mesh.rank == 0:`, nor in a loop that is longer on some ranks"
)


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text.

    >>> describe_ranks([0, 2])
    'ranks 0, 2'
    """
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"


def _text(name: str, params: Mapping[str, Any], values: Iterable[numpy.ndarray]) -> str:
    types = ", ".join(str(ShapedArray(x.shape, x.dtype)) for x in values)
    shown = [f"{k}={v}" for k, v in params.items() if k not in ("axes", "size", "types", "digest")]
    options = ", ".join([*shown, *params.get("types", ())])
    text = f"{name} over {', '.join(map(repr, params['axes']))}"
    text += f" of {types}" * bool(types) + f" ({options})" * bool(options)
    text = text if len(text) <= 150 else f"{text[:140]}… {_digest([text]) % 10**6:06}"
    return f"{text} #{params['digest']:014x}" if "digest" in params else text


def displayed_call(call: str) -> str:
    """Return a call as users see it: without the digest of what it does not show.

    >>> displayed_call("shard_map of f over 'i' (sizes=(2,), args[0]: f64[4]) #00ed160278f4c7; line 1")
    "shard_map of f over 'i' (sizes=(2,), args[0]: f64[4]); line 1"
    """
    return re.sub(" #[0-9a-f]{14}", "", call)


def _current_line() -> str:
    return describe_line(sys._getframe(1))


def _digest(texts: Iterable[str]) -> int:
    """Return a hash of these texts, the same on all ranks."""
    return _number("\n".join(texts).encode())


def _number(data: bytes) -> int:
    return int.from_bytes(_hash(data), "big")


def _hash(data: bytes) -> bytes:
    import hashlib  # it loads OpenSSL, and most programs run on one rank

    return hashlib.blake2b(data, digest_size=7).digest()
