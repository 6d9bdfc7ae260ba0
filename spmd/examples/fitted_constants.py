"""The constants that the scoreboard fits to published steps, and how well they predict other steps.

Five constants are fitted to the steps on A100s. Three of them serve on H100s unchanged: the size of a product that
reaches half of the best share, in operations for each byte of memory bandwidth, and the shares of the bandwidth of
links. Two more are fitted for each of the two programs that ran on H100s: the shares of the peak that the kernels of
products and of attention reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.examples.published import TrainingPlan, tape_of
from spmd.machines import A100, H100, Efficiency, Machine, link
from spmd.prices.walk import Walk
from spmd.report.predict import costs_on

NEAREST = ("feats", "data", "stages")  # as Megatron-LM numbers its ranks; context comes after feats


class Constants(NamedTuple):
    """The shares of peaks that products and links reach on A100s, and the host's time for an operation."""

    best: float  # of the peak, by large products
    half: float  # the size of a product that reaches half of that
    nvlink: float  # of the bandwidth of links in a node
    infiniband: float  # of those between nodes
    issue: float  # seconds in which the host issues an operation

    def machine(self) -> Machine:
        """Return an A100 cluster with these constants."""
        return _with_shares(A100, self).replace(efficiency=Efficiency(self.best, self.half), issue=self.issue)


class Kernels(NamedTuple):
    """The shares of the peak that the kernels of a program reach on H100s."""

    best: float  # by large products
    attention: float

    def machine(self) -> Machine:
        """Return an H100 cluster with these kernels, and with what was fitted to A100s."""
        size = FITTED.half * (_operations_a_byte(H100) / _operations_a_byte(A100))
        machine = _with_shares(H100, FITTED)
        return machine.replace(efficiency=Efficiency(self.best, size), attention=self.attention)


#: Of the fit to the three tables of A100s (`--fit`).
FITTED = Constants(best=0.8924, half=947.3, nvlink=0.9660, infiniband=0.3999, issue=1.0958e-4)
#: Of the fits to the two tables of H100s, by program.
KERNELS = {"NeMo": Kernels(best=1.0, attention=0.345), "LLM Foundry": Kernels(best=0.756, attention=0.202)}

#: Half the width of the range that has 80 % of held-out rows, relative to the prediction, by program (`--fit`).
RANGES = {"Megatron-LM": 0.151, "NeMo": 0.077, "LLM Foundry": 0.068}


def _operations_a_byte(machine: Machine) -> float:
    return machine.peak("float16") / machine.bandwidth


def _with_shares(machine: Machine, constants: Constants) -> Machine:
    slower = lambda each, share: link(each.name, each.ranks, each.model.alpha, share / each.model.beta, each.source)  # noqa: E731
    near, far = machine.links
    return machine.replace(links=(slower(near, constants.nvlink), slower(far, constants.infiniband)))


def constants_for(plan: TrainingPlan) -> Constants | Kernels:
    """Return the constants of the machine and the program that a plan ran on."""
    return KERNELS.get(plan.program, FITTED)


def placement(plan: TrainingPlan) -> dict[str, Any]:
    """Return the options of a prediction: the order of axes, and those whose messages overlap with computation.

    Megatron-LM on A100s overlapped none, the programs on H100s all that can be. LLM Foundry's optimizer is not fused.
    """
    feats, *others = NEAREST
    nearest = feats, *["context"] * (plan.context > 1), *others
    fused = plan.program != "LLM Foundry"
    return {"nearest": nearest, "overlap": plan.program in KERNELS, "fused_optimizer": fused}


# ---------------------------------------------------------------- the fit


def parameters_of(constants: Constants | Kernels) -> np.ndarray:
    """Return the parameters in which seconds are linear, where the same operations and links decide.

    >>> constants = Constants(best=0.8, half=400, nvlink=0.5, infiniband=0.25, issue=1e-4)
    >>> [round(float(x), 6) for x in parameters_of(constants)]
    [1.25, 500.0, 2.0, 4.0, 0.0001]
    """
    if isinstance(constants, Kernels):
        return 1 / np.array(constants)
    best, half, near, far, issue = constants
    return np.array([1 / best, half / best, 1 / near, 1 / far, issue])


def constants_of(parameters: np.ndarray) -> Constants | Kernels:
    """Return the constants of these parameters."""
    if len(parameters) == 2:
        return Kernels(*map(float, 1 / parameters))
    a, b, near, far, issue = map(float, parameters)
    return Constants(1 / a, b / a, 1 / near, 1 / far, issue)


Priced = Callable[[Any], float]


def price_plan(plan: TrainingPlan) -> Priced:
    """Return a function that prices a plan's step, recorded once, by constants."""
    tape, options = tape_of(plan), placement(plan)

    def price(constants: Constants | Kernels) -> float:
        _, costs = costs_on(tape, constants.machine(), options["nearest"])
        walk = Walk(costs, overlap=options["overlap"], fused_optimizer=options["fused_optimizer"])
        return walk.price(tape, is_step=True).seconds

    return price


class Linearized(NamedTuple):
    """The relative errors of some rows at some parameters, and their slopes in relative changes of these."""

    at: np.ndarray
    errors: np.ndarray
    slopes: np.ndarray
    shares: np.ndarray  # how much each row counts


Rows = Sequence[tuple[Priced, float]]  # how a step is priced, and the seconds that it took


def linearize(groups: Sequence[Rows], constants: Constants | Kernels) -> Linearized:
    """Price all rows, and again with each parameter 1 % larger.

    A group counts as the square root of the number of its rows.
    """
    at, rows = parameters_of(constants), [row for group in groups for row in group]
    nearby = [constants, *map(constants_of, at * (1 + 0.01 * np.eye(len(at))))]
    errors, *changed = np.array([[price(each) / seconds - 1 for price, seconds in rows] for each in nearby])
    shares = np.array([1 / math.sqrt(len(group)) for group in groups for _ in group])
    return Linearized(at, errors, (np.transpose(changed) - errors[:, None]) / 0.01, shares)


def improve(rows: Linearized) -> Constants | Kernels:
    """Return the constants with the least mean absolute error, if seconds were linear, by reweighted least squares.

    Shares of peaks are at most 1, and no constant changes by more than 30 %.
    """
    least = np.array([1.0, 0.0, 1.0, 1.0, 0.0] if len(rows.at) == 5 else [1.0, 1.0]) / rows.at - 1
    change, free = np.zeros(len(rows.at)), np.full(len(rows.at), True)
    for _ in range(60):
        weights = np.sqrt(rows.shares / np.maximum(abs(rows.errors + rows.slopes @ change), 1e-3))
        rest = rows.errors + rows.slopes[:, ~free] @ change[~free]
        change[free] = np.linalg.lstsq(weights[:, None] * rows.slopes[:, free], -weights * rest, rcond=None)[0]
        free &= change > least  # a share that reaches 1 stays there
        change = np.maximum(change, least)
    return constants_of(rows.at * (1 + np.clip(change, -0.3, 0.3)))


def fit(groups: Sequence[Rows], start: Constants | Kernels = FITTED, steps: int = 2) -> Constants | Kernels:
    """Return the constants with the least mean absolute error of the steps' times, by Gauss-Newton steps."""
    for _ in range(steps):
        start = improve(linearize(groups, start))
    return start


def cross_validate(groups: Sequence[Rows], start: Constants | Kernels, folds: Sequence[Any]) -> list[HeldOut]:
    """Predict each row by constants that are fitted without its fold, for the fold of each row in all groups."""
    everything, rows = linearize(groups, start), [row for group in groups for row in group]
    which = np.array([*map(str, folds)])
    fitted = {k: improve(Linearized(everything.at, *(x[which != k] for x in everything[1:]))) for k in {*which}}
    errors = np.array([price(fitted[k]) / seconds - 1 for (price, seconds), k in zip(rows, which)])
    spread = np.log([[price(each) for each in fitted.values()] for price, _ in rows])
    n = len(fitted)
    jackknife = np.sqrt((n - 1) / n * np.sum((spread - spread.mean(axis=1, keepdims=True)) ** 2, axis=1))
    return [HeldOut(*each) for each in zip(errors, jackknife)]


class HeldOut(NamedTuple):
    """The relative error of a row to which constants were not fitted, and its standard deviation due to these."""

    error: float
    deviation: float


def five_folds(groups: Sequence[Rows]) -> list[int]:
    """Return the folds of rows: every fifth row of its group."""
    return [i % 5 for group in groups for i in range(len(group))]


def without_each(constants: Constants | Kernels) -> Iterator[tuple[str, Constants | Kernels]]:
    """Yield, for each constant, its name and the constants without it: a share is 1, a size or a time 0.

    >>> [(name, getattr(each, name)) for name, each in without_each(Kernels(best=0.8, attention=0.4))]
    [('best', 1.0), ('attention', 1.0)]
    """
    for name in constants._fields:
        yield name, constants._replace(**{name: 0.0 if name in ("half", "issue") else 1.0})
