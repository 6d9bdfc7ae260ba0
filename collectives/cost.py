"""Communication costs: steps and bytes by formula, or counted on a tape.

This is the usual alpha-beta model. A step, in which ranks send messages at the same time, takes a latency of `alpha`
seconds plus `beta` seconds for each byte of its longest message; adding arrays takes `gamma` seconds for each byte:

    T = steps * alpha + bytes * beta + reduced * gamma

It ignores congestion, links of different speeds, and overlap with computation.

>>> ring = ALGORITHMS["ring_all_reduce"]
>>> print(ring.steps, "|", ring.bytes)
2*(N - 1) | 2*(N - 1)*K/N
>>> ring(N=8, K=1000)
Cost(steps=14, bytes=1750, sent=1750, received=1750, reduced=875)
>>> ring(N=8, K=1000).seconds(alpha=1e-6, beta=1e-9)
1.575e-05

The server of `parameter_server_all_reduce` is a bottleneck. For short arrays the algorithm with the fewest steps wins,
for long ones the algorithm with the fewest bytes:

>>> [ALGORITHMS["parameter_server_all_reduce"](N, 1000).sent for N in (2, 8, 64)]
[1000, 7000, 63000]
>>> [fastest("psum", N, K, alpha=1e-6, beta=1e-9) for N, K in ((64, 100), (64, 1_000_000), (48, 1_000_000))]
['recursive_doubling_all_reduce', 'halving_doubling_all_reduce', 'ring_all_reduce']

Sources: R. W. Hockney, "The communication challenge for MPP", 1994 (the model); R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of Collective Communication Operations in MPICH", 2005 (the model with gamma, for these algorithms).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from collectives.collective import Collective
from collectives.exact import pcopies_p
from collectives.in_flight import IN_FLIGHT, ppermute_start_p
from collectives.ops import COLLECTIVES, ppermute_p
from collectives.reductions import REDUCTIONS
from collectives.rooted import ROOTED
from minidiff.control_flow.loops import run_count
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var, typeof

__all__ = ["Cost", "Formula", "Formulas", "counted", "fastest", "message_steps", "price"]

Number = int | float

# ---------------------------------------------------------------- costs


@dataclass(frozen=True)
class Cost:
    """The cost of some communication: a number of sequential `steps`, and bytes.

    `bytes` are those on the critical path: the longest message of each step, summed over steps. `sent` and `received`
    are the bytes of the rank that sends, or receives, most; `reduced` is the number of bytes of sums that a rank
    computes. Costs can be added, and multiplied by a count.

    >>> 3 * Cost(steps=2, bytes=100, sent=100, received=100)
    Cost(steps=6, bytes=300, sent=300, received=300, reduced=0)
    """

    steps: Number = 0
    bytes: Number = 0
    sent: Number = 0
    received: Number = 0
    reduced: Number = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(sum, zip(astuple(self), astuple(other))))

    def __mul__(self, times: int) -> Cost:
        return Cost(*[times * x for x in astuple(self)])

    __rmul__ = __mul__

    def seconds(self, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """Return the time in seconds: `alpha` seconds a step, `beta` and `gamma` seconds a byte."""
        return self.steps * alpha + self.bytes * beta + self.reduced * gamma


class Formula:
    """A formula in `N` ranks and `K` bytes, written as Python: prints as written, a call evaluates it.

    `P` is the largest power of two at most N, `C` the smallest at least N; `log2` and `max` are functions. The result
    is exact for integers. A call raises ValueError unless N is a positive integer.

    >>> f = Formula("(N - 1)*K/N")
    >>> f, f(N=4, K=12), f(N=4, K=1)
    ((N - 1)*K/N, 9, 0.75)
    """

    def __init__(self, text: str):
        self.text = text
        self._code = compile(text, "<formula>", "eval")

    def __call__(self, N: int, K: Number = 0) -> Number:
        if N < 1 or int(N) != N:
            raise ValueError(f"{self}: N must be a number of ranks, at least 1; got {N!r}")
        N = int(N)
        names = {"N": N, "K": Fraction(K), "P": 1 << N.bit_length() - 1, "C": 1 << (N - 1).bit_length()}
        value = Fraction(eval(self._code, {"log2": _log2, "max": max}, names))
        return int(value) if value.denominator == 1 else float(value)

    def __repr__(self) -> str:
        return self.text


def _log2(power: int) -> int:
    return power.bit_length() - 1


class Formulas(NamedTuple):
    """The cost of an algorithm by formulas in `N` and `K`; a call gives a `Cost`.

    Each field of `Cost` has its formula here. `ports` is how many messages a rank sends, and how many it receives, at
    the same time. K is the size in bytes of the whole array: the result of an all-gather or a gather; the operand of a
    reduce-scatter, a scatter or an all-to-all; the array that is summed or sent. (For arrays that are padded before
    they are split, K includes the padding.)

    >>> ALGORITHMS["ring_all_reduce"].bytes, ALGORITHMS["ring_all_reduce"](N=4, K=1000).bytes
    (2*(N - 1)*K/N, 1500)
    """

    steps: Formula
    bytes: Formula
    sent: Formula
    received: Formula
    reduced: Formula
    ports: int

    def __call__(self, N: int, K: Number) -> Cost:
        return Cost(*[formula(N, K) for formula in self[:5]])

    def runs_on(self, N: int) -> bool:
        """Whether N ranks can run it: `log2(N)` steps need a power of two (`log2(P)`, `log2(C)` do not)."""
        return "log2(N)" not in self.steps.text or N & (N - 1) == 0


def _formulas(
    steps: str, bytes: str, reduced: str = "0", *, sent: str = "", received: str = "", ports: int = 1
) -> Formulas:
    """Return formulas from text. By default every rank sends `bytes`, and receives as many as it sends."""
    sent = sent or bytes
    received = received or sent
    return Formulas(Formula(steps), Formula(bytes), Formula(sent), Formula(received), Formula(reduced), ports)


_AROUND = "(N - 1)*K/N"
_BRANCH = "(N > 1)*max(N - C//2, C//4)*K/N"  # the blocks of the largest branch of a binomial tree

#: The cost of each algorithm of `collectives.algorithms`, and of a `ppermute`'s single message.
ALGORITHMS: dict[str, Formulas] = {
    "ring_all_gather": _formulas("N - 1", _AROUND),
    "bidirectional_ring_all_gather": _formulas("N - 1", "(N - 1)*K/(2*N)", sent=_AROUND, ports=2),
    "recursive_doubling_all_gather": _formulas("log2(N)", _AROUND),
    "bruck_all_gather": _formulas("log2(C)", _AROUND),
    "ring_reduce_scatter": _formulas("N - 1", _AROUND, _AROUND),
    "bidirectional_ring_reduce_scatter": _formulas("N - 1", "(N - 1)*K/(2*N)", _AROUND, sent=_AROUND, ports=2),
    "recursive_halving_reduce_scatter": _formulas("log2(N)", _AROUND, _AROUND),
    "ring_all_reduce": _formulas("2*(N - 1)", "2*(N - 1)*K/N", _AROUND),
    "bidirectional_ring_all_reduce": _formulas("2*(N - 1)", _AROUND, _AROUND, sent="2*(N - 1)*K/N", ports=2),
    "recursive_doubling_all_reduce": _formulas(
        "log2(P) + 2*(P < N)",
        "K*(log2(P) + 2*(P < N))",
        "K*(log2(P) + (P < N))",
        sent="K*(log2(P) + (P < N))",
    ),
    "halving_doubling_all_reduce": _formulas(
        "2*log2(P) + 2*(P < N)",
        "2*(P - 1)*K/P + 2*K*(P < N)",
        "(P - 1)*K/P + K*(P < N)",
        sent="2*(P - 1)*K/P + K*(P < N)",
    ),
    "tree_all_reduce": _formulas("2*log2(C)", "2*K*log2(C)", "K*log2(C)", sent="K*log2(C)"),
    "parameter_server_all_reduce": _formulas("2*(N - 1)", "2*(N - 1)*K", "(N - 1)*K", sent="(N - 1)*K"),
    "binomial_tree_broadcast": _formulas("log2(C)", "K*log2(C)", received="K*(N > 1)"),
    "binomial_tree_reduce": _formulas("log2(C)", "K*log2(C)", "K*log2(C)", sent="K*(N > 1)", received="K*log2(C)"),
    "binomial_tree_scatter": _formulas("log2(C)", _AROUND, received=_BRANCH),
    "binomial_tree_gather": _formulas("log2(C)", _AROUND, sent=_BRANCH, received=_AROUND),
    "pairwise_all_to_all": _formulas("N - 1", _AROUND),
    "recursive_doubling_scan": _formulas("log2(C)", "K*log2(C)", "K*log2(C)"),
    "point_to_point": _formulas("1", "K"),
}

#: The collectives by name.
BY_NAME: dict[str, Collective] = {p.name: p for p in (*COLLECTIVES, *REDUCTIONS, *IN_FLIGHT, *ROOTED, pcopies_p)}

#: The algorithm that prices each collective, as declared. (An MPI library chooses its own, by message size.)
PRICED_AS: dict[str, str] = {name: p.cost for name, p in BY_NAME.items() if p.cost is not None}

#: The operations that algorithms implement, as suffixes of their names: a longer suffix before one that it ends with.
_OPERATIONS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("broadcast", "reduce", "scatter", "gather", "scan", "point_to_point"),
)


def _operation_of(algorithm: str) -> str:
    return next(operation for operation in _OPERATIONS if algorithm.endswith(operation))


def price(collective: str, N: int, nbytes: Number, algorithm: str | None = None) -> Cost:
    """Return the cost of a collective over N ranks whose operands have `nbytes` bytes each.

    It is the cost of `algorithm`, by default the one in `PRICED_AS`. Raises ValueError for an unknown name, and for an
    algorithm of another operation.

    >>> price("all_gather", 4, 100)
    Cost(steps=3, bytes=300, sent=300, received=300, reduced=0)
    >>> price("psum", 4, 100, "tree_all_reduce").steps
    4
    """
    priced = _algorithms_of(collective)
    name = PRICED_AS[collective] if algorithm is None else algorithm
    if name not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {name!r}; those with formulas are {', '.join(ALGORITHMS)}")
    if name not in priced:
        raise ValueError(f"{collective} cannot use the algorithm {name}; choose from {', '.join(priced)}")
    return ALGORITHMS[name](N, nbytes * N if BY_NAME[collective].growth > 0 else nbytes)


def fastest(collective: str, N: int, nbytes: Number, alpha: float, beta: float, gamma: float = 0.0) -> str:
    """Return the algorithm with the least time: MPI libraries choose by ranks and bytes, too.

    `nbytes` are those of each operand. Algorithms that send several messages at once are left out.

    >>> fastest("all_gather", 8, 100, alpha=1e-6, beta=1e-9), fastest("all_gather", 6, 100, alpha=1e-6, beta=1e-9)
    ('recursive_doubling_all_gather', 'bruck_all_gather')
    """
    names = [name for name in _algorithms_of(collective) if ALGORITHMS[name].ports == 1 and ALGORITHMS[name].runs_on(N)]
    return min(names, key=lambda name: price(collective, N, nbytes, name).seconds(alpha, beta, gamma))


def _algorithms_of(collective: str) -> list[str]:
    """Return the algorithms of the same operation."""
    if collective not in PRICED_AS:
        raise ValueError(f"no price is known for {collective!r}; the priced ones are {', '.join(PRICED_AS)}")
    return [name for name in ALGORITHMS if _operation_of(name) == _operation_of(PRICED_AS[collective])]


# ---------------------------------------------------------------- counting


def counted(tape: Tape, ports: int = 1) -> Cost:
    """Count the communication on a tape.

    A `ppermute` counts as its messages, other collectives by their `price`. In one step each rank can send `ports`
    messages and receive as many; a message that depends on another one goes in a later step. (`reduced` is not counted:
    an addition on a tape need not belong to a reduction.) The body of a `shard_map` counts once, that of a `scan` once
    per step of the loop. Raises ValueError if the amount of communication depends on values.

    >>> import numpy as np
    >>> from collectives import algorithms
    >>> from minidiff import make_tape
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> f = shard_map(lambda x: algorithms.ring_all_reduce(x, 'i'), mesh=mesh, in_specs=P('i'), out_specs=P('i'))
    >>> counted(make_tape(f)(np.ones(32)))  # blocks of 64 bytes
    Cost(steps=6, bytes=96, sent=96, received=96, reduced=0)
    """
    messages = Messages(ports)
    return _count(tape, messages) + messages.cost()


def _count(tape: Tape, messages: Messages) -> Cost:
    """Put the messages of a tape in steps, and count all else."""
    total = Cost()
    ready: dict[Var, int] = {}  # the first step in which a value is available
    for eqn in tape.equations:
        start = max((ready.get(a, 0) for a in eqn.inputs if isinstance(a, Var)), default=0)
        if eqn.primitive in (ppermute_p, ppermute_start_p):
            nbytes = sum(typeof(a).nbytes for a in eqn.inputs)
            start = messages.send(eqn.params["axes"], eqn.params["perm"], nbytes, start)
        elif eqn.primitive.sends(eqn.params):
            collective: Any = eqn.primitive
            nbytes = sum([typeof(a).nbytes for a in eqn.inputs[: collective.linear_operands]])
            total += price(collective.name, eqn.params["size"], nbytes)
        else:
            total += _cost_of_bodies(eqn, messages.ports)
        ready.update(dict.fromkeys(eqn.outputs, start))
    return total


def message_steps(tape: Tape) -> list[list[tuple[int, int, int]]]:
    """Return the messages of a body in steps, as `counted` has them: source, destination and bytes of each.

    >>> import numpy as np
    >>> from collectives import ppermute
    >>> from minidiff import make_tape
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((3,), ('i',), backend='simulated')
    >>> f = shard_map(lambda x: ppermute(x, 'i', [(0, 1), (1, 2)]), mesh=mesh, in_specs=P('i'), out_specs=P('i'))
    >>> message_steps(make_tape(f)(np.ones(3)).equations[0].bodies[0])
    [[(0, 1, 8), (1, 2, 8)]]
    """
    _count(tape, messages := Messages(1))
    return [step.sent for step in messages.steps]


def _cost_of_bodies(eqn: Equation, ports: int) -> Cost:
    costs = [counted(body, ports) for body in eqn.bodies]
    costs = [c for c in costs if c != Cost()] if len(costs) > 1 else costs
    if not costs:
        return Cost()
    if len(costs) > 1 or len(eqn.bodies) > 1:
        raise ValueError(
            f"{eqn.primitive} communicates an amount that depends on values: count the tapes of its branches or steps"
        )
    return costs[0] * run_count(eqn)


class Messages:
    """Messages in steps: in each a rank sends at most `ports`, and receives as many."""

    def __init__(self, ports: int):
        self.ports = ports
        self.steps: list[CostStep] = []

    def send(self, axes: Sequence[str], perm: Sequence[tuple[int, int]], nbytes: int, start: int) -> int:
        """Put messages in the first step from `start` with room; return the next step."""
        messages = [(source, destination, nbytes) for source, destination in perm if source != destination]
        if not messages:
            return start
        while start < len(self.steps) and not self.has_room(self.steps[start], CostStep(axes, messages)):
            start += 1
        if start == len(self.steps):
            self.steps.append(CostStep(axes, []))
        self.steps[start].sent.extend(messages)
        return start + 1

    def has_room(self, step: CostStep, more: CostStep) -> bool:
        both = [*step.sent, *more.sent]
        return step.axes == more.axes and all(max(Counter(ranks).values()) <= self.ports for ranks in [*zip(*both)][:2])

    def cost(self) -> Cost:
        totals: tuple[Counter, Counter] = Counter(), Counter()  # of each rank: sent, and received
        for step in self.steps:
            for *ends, nbytes in step.sent:
                for total, rank in zip(totals, ends):
                    total[rank] += nbytes
        longest = sum(max(nbytes for *_, nbytes in step.sent) for step in self.steps)
        return Cost(len(self.steps), longest, *[max(total.values(), default=0) for total in totals])


class CostStep(NamedTuple):
    """One step: its messages along some axes, each with source, destination and bytes."""

    axes: Sequence[str]
    sent: list[tuple[int, int, int]]
