"""Predicted against published training steps of Megatron-LM on A100 clusters.

Each row of three tables is a decoder on some devices, and what was measured of it. The decoder is built by
`megatron_3d.py`, for types alone; its tape is priced by `spmd.predict`. The machine has the constants of its data
sheet, and five that are fitted to the step times of all rows at once. No row has constants of its own.

    python -m spmd.examples.scoreboard                    the tables
    python -m spmd.examples.scoreboard --rows FILE.csv    further rows, in the format of any of the tables
    python -m spmd.examples.scoreboard --fit              fit the constants again, and cross-validate
    python -m spmd.examples.scoreboard --plot FILE.svg    predicted against measured
    python -m spmd.examples.scoreboard --large            a decoder of 405 billion parameters on 16,384 H100
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

import minidiff as md
import spmd
from minidiff.core.tape import Tape
from minidiff.core.types import Var
from minidiff.values.aliasing import types_alone
from spmd.examples.megatron_3d import AXES, MegatronConfig, check, megatron_step
from spmd.machines import A100, H100, Efficiency, Machine, link
from spmd.mesh.launch import silence_other_ranks
from spmd.pipeline.library import interleaved, one_f_one_b
from spmd.prices.compiled_tape import rewritten
from spmd.prices.walk import Walk
from spmd.report.predict import costs_on
from spmd.show import Curve, Table, logarithmic_curves

NEAREST = ("feats", "data", "stages")  # as Megatron-LM numbers its ranks

# ---------------------------------------------------------------- constants


class Constants(NamedTuple):
    """The fitted constants: the shares of peaks that products and links reach, and the host's time for an operation."""

    best: float  # of the peak, by large products
    half: float  # the size of a product that reaches half of that
    nvlink: float  # of the bandwidth of links in a node
    infiniband: float  # of those between nodes
    issue: float  # seconds in which the host issues an operation

    def machine(self) -> Machine:
        """An A100 cluster with these constants."""
        near, far = A100.links
        return A100.replace(
            efficiency=Efficiency(self.best, self.half),
            issue=self.issue,
            links=(_slower(near, self.nvlink), _slower(far, self.infiniband)),
        )


#: Of the fit to all three tables (`--fit`).
FITTED = Constants(best=0.8806, half=855.9, nvlink=0.9948, infiniband=0.4020, issue=1.1656e-4)


def _slower(each: Any, share: float) -> Any:
    return link(each.name, each.ranks, each.model.alpha, share / each.model.beta, each.source)


# ---------------------------------------------------------------- rows


class TrainingPlan(NamedTuple):
    """A decoder of GPT's kind, and how it is trained on which mesh."""

    hidden: int
    heads: int
    layers: int
    vocabulary: int
    tokens: int
    tensor: int
    data: int
    stages: int
    batch: int
    microbatch: int
    chunks: int = 1
    recompute: str | None = "full"
    sequence: bool = False

    @property
    def devices(self) -> int:
        return self.tensor * self.data * self.stages

    def __str__(self) -> str:
        extras = [f"{self.chunks} chunks"] * (self.chunks > 1) + ["sequence parallel"] * self.sequence
        extras += [f"recompute {self.recompute}"] * (self.recompute != "full")
        mesh = f"tensor {self.tensor}, data {self.data}, stages {self.stages}"
        return ", ".join([f"{self.layers} × {self.hidden:,}", mesh, f"microbatch {self.microbatch}", *extras])

    def config(self) -> MegatronConfig:
        return MegatronConfig(
            vocabulary=self.vocabulary,
            features=self.hidden,
            heads=self.heads,
            layers=self.layers,
            hidden=4 * self.hidden,
            layer_norm=True,
            swiglu=False,
            tied=True,
            dropout=0.1,
            positions=self.tokens,
        )

    def step(self) -> tuple[Callable, tuple]:
        """A step of training, and the types of its arguments. Raises ValueError if the mesh does not divide them."""
        return step_of(self.config(), self)


def step_of(config: MegatronConfig, plan: TrainingPlan) -> tuple[Callable, tuple]:
    """A step of a decoder on the mesh of a plan, and the types of its arguments."""
    if plan.batch % (plan.data * plan.microbatch):
        raise ValueError(f"{plan}: {plan.batch} examples cannot be split into microbatches on {plan.data} replicas")
    microbatches = plan.batch // plan.data // plan.microbatch
    mesh = spmd.make_mesh((plan.data, plan.stages, plan.tensor), AXES, backend="simulated")
    chunks = plan.chunks
    check(mesh, config, plan.stages, chunks, plan.recompute)  # before its schedule, which takes long
    schedule = interleaved(plan.stages, microbatches, chunks) if chunks > 1 else one_f_one_b(plan.stages, microbatches)
    init, step = megatron_step(mesh, config, schedule, plan.recompute, plan.sequence)
    text = md.ShapedArray((plan.batch, plan.tokens), "int32")
    key = md.eval_shape(md.random.key, 0)
    return step, (md.eval_shape(init, key), text, text, key)


def tape_of(plan: TrainingPlan) -> Tape:
    """The tape of a plan's step, after the rewrites of `jit`; no array is made."""
    step, types = plan.step()
    with types_alone():
        return rewritten(step)(*types)


class Case(NamedTuple):
    """A plan, and the seconds that its step took."""

    plan: TrainingPlan
    seconds: float


@dataclass
class PublishedRow:
    """A row of a table: what was measured, of one or several plans; bytes and shares of them if it has those."""

    cases: list[Case]
    state: float | None = None  # bytes of a rank
    activations: dict[TrainingPlan, float] = field(default_factory=dict)  # bytes of a rank
    shares: dict[TrainingPlan, float] = field(default_factory=dict)  # per cent of those without recomputation


def pad_vocabulary(vocabulary: int, tensor: int) -> int:
    """Megatron-LM pads the vocabulary to a multiple of 128 on each rank."""
    return math.ceil(vocabulary / (128 * tensor)) * 128 * tensor


def _of_vtrain(row: dict[str, float]) -> PublishedRow:
    return PublishedRow([Case(_plan(row, 50257), row["step_ms"] / 1e3)])


def _of_sc21(row: dict[str, float]) -> PublishedRow:
    plan = _plan(row, 51200)
    return PublishedRow([Case(plan, paper_flops(plan) / plan.devices / (row["tflops_per_gpu"] * 1e12))])


def _of_sequence_parallel(row: dict[str, float]) -> PublishedRow:
    full = _plan(row, 51200)
    none, selective = (full._replace(recompute=recompute) for recompute in (None, "selective"))
    split, both = (plan._replace(sequence=True) for plan in (none, selective))
    gib = {name: row[name] * 2**30 for name in row if "_gib" in name}
    percent = {split: "sequence_parallel", selective: "selective", both: "both", full: "full_recompute"}
    return PublishedRow(
        [Case(full, row["step_s_full_recompute"]), Case(both, row["step_s_selective_and_sequence_parallel"])],
        state=gib["state_gib"],
        activations={
            none: gib["activation_gib_no_recompute"],
            both: gib["activation_gib_selective_and_sequence_parallel"],
        },
        shares={plan: row[f"activation_percent_{name}"] for plan, name in percent.items()},
    )


def _plan(row: dict[str, float], vocabulary: int) -> TrainingPlan:
    tensor, stages = int(row["tensor"]), int(row["pipeline"])
    return TrainingPlan(
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        layers=int(row["layers"]),
        vocabulary=pad_vocabulary(vocabulary, tensor),
        tokens=int(row.get("sequence", 2048)),
        tensor=tensor,
        data=int(row.get("data", row["gpus"] // (tensor * stages))),
        stages=stages,
        batch=int(row["batch"]),
        microbatch=int(row["microbatch"]),
        chunks=int(row.get("interleaving", 1)),
    )


def paper_flops(plan: TrainingPlan) -> float:
    """The floating-point operations of a step, with all layers computed again: Narayanan et al., equation 3."""
    h, _, layers, vocabulary, tokens, *_ = plan
    return 96 * plan.batch * tokens * layers * h**2 * (1 + tokens / (6 * h) + vocabulary / (16 * layers * h))


#: The formats: the file, the column that tells it from others, how a row is read, and the error that is asked for.
FORMATS = {
    "megatron_a100_step_times.csv": ("step_ms", _of_vtrain),
    "sc21_table1.csv": ("tflops_per_gpu", _of_sc21),
    "sequence_parallel.csv": ("step_s_full_recompute", _of_sequence_parallel),
}


def read_rows(lines: Iterable[str], name: str) -> list[PublishedRow]:
    """The rows of a table in any of the formats. Raises ValueError, with the line, for one that it cannot read.

    >>> read_rows(["a,b", "1,2"], "rows.csv")
    Traceback (most recent call last):
    ...
    ValueError: rows.csv: no column step_ms, tflops_per_gpu or step_s_full_recompute; the columns are a, b
    """
    table = csv.DictReader(lines)
    columns = list(table.fieldnames or ())
    read = next((read for column, read in FORMATS.values() if column in columns), None)
    if read is None:
        *names, last = (column for column, _ in FORMATS.values())
        raise ValueError(f"{name}: no column {', '.join(names)} or {last}; the columns are {', '.join(columns)}")
    rows = []
    for row in table:
        where = f"{name}, line {table.line_num}"
        try:
            numbers = {column: float(x) for column, x in row.items() if column != "model"}
            rows.append(read(numbers))
            for case in rows[-1].cases:
                _check(case)
        except KeyError as missing:
            raise ValueError(f"{where}: there is no column {missing}") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None
    if not rows:
        raise ValueError(f"{name}: there are no rows below the columns' names")
    return rows


def _check(case: Case) -> None:
    plan = case.plan
    if wrong := [name for name, n in plan._asdict().items() if type(n) is int and n < 1]:
        raise ValueError(f"{wrong[0]} must be at least 1, got {getattr(plan, wrong[0])}")
    if not case.seconds > 0:
        raise ValueError(f"the seconds of a step must be positive, got {case.seconds}")


def read_tables() -> dict[str, list[PublishedRow]]:
    """The rows of the three tables."""
    data = resources.files("spmd.examples") / "data"
    return {name: read_rows((data / name).read_text().splitlines(), name) for name in FORMATS}


#: Llama 3.1 405B: Grattafiori et al., "The Llama 3 herd of models", tables 3 and 4.
LLAMA = MegatronConfig(vocabulary=128256, features=16384, heads=128, kv_heads=8, layers=126, hidden=53248)
SIZES = LLAMA.features, LLAMA.heads, LLAMA.layers, LLAMA.vocabulary
LLAMA_PLAN = TrainingPlan(*SIZES, tokens=8192, tensor=8, data=128, stages=16, batch=2048, microbatch=1, sequence=True)


# ---------------------------------------------------------------- predictions


def predict_large() -> Any:
    """The prediction of a step of Llama 3.1 405B on 16,384 H100, by the constants of the data sheet alone."""
    step, types = step_of(LLAMA, LLAMA_PLAN)
    return spmd.predict(step, H100, nearest=NEAREST, overlap=False)(*types)


class Bytes(NamedTuple):
    """Return the states and activations of the layers on a rank of a middle stage, from the tape."""

    state: int
    activations: int


def predict(plan: TrainingPlan, constants: Constants = FITTED) -> Any:
    """The `spmd.predict` of a plan's step on the machine with these constants."""
    return spmd.predict(tape_of(plan), constants.machine(), nearest=NEAREST, overlap=False)


def held(plan: TrainingPlan) -> Bytes:
    """The bytes of a rank's layers at the peak: weights, gradients, masters and moments; and activations.

    They are sizes of values on the tape: arguments, and what `scheduled` names. Embeddings and the other parameters
    that are not of a layer are left out, as in the papers' figures: middle stages need none.

    >>> plan = TrainingPlan(64, 4, 2, 128, 16, tensor=2, data=1, stages=1, batch=2, microbatch=2, recompute=None)
    >>> held(plan).activations > held(plan._replace(recompute="full")).activations
    True
    """
    step, types = plan.step()
    with types_alone():
        tape = md.make_tape(step)(*types)
    (mapped,) = (eqn for eqn in tape.equations if eqn.primitive.name == "shard_map")
    body = mapped.params["body"]
    paths = dict(zip(tape.inputs, (path for path, _ in md.tree.flatten_with_paths(types, "")[0])))
    blocks = [v for a, v in zip(mapped.inputs, body.inputs) if isinstance(a, Var) and "'layers'" in paths[a]]
    state = sum(v.type.nbytes for v in blocks)
    named = {name: sum(_named(body, name)) for name in ("gradients", "activations")}
    return Bytes(state + named["gradients"], named["activations"])


def _named(tape: Tape, name: str) -> Iterable[int]:
    for eqn in tape.equations:
        if eqn.primitive.name == "name" and eqn.params["name"] == name:
            yield eqn.outputs[0].type.nbytes
        elif eqn.primitive.name in ("jit", "call"):
            yield from (n for body in eqn.bodies for n in _named(body, name))


# ---------------------------------------------------------------- the fit


def parameters_of(constants: Constants) -> np.ndarray:
    """The parameters in which seconds are linear, where the same operations and links decide.

    >>> constants = Constants(best=0.8, half=400, nvlink=0.5, infiniband=0.25, issue=1e-4)
    >>> [round(float(x), 6) for x in parameters_of(constants)]
    [1.25, 500.0, 2.0, 4.0, 0.0001]
    """
    best, half, near, far, issue = constants
    return np.array([1 / best, half / best, 1 / near, 1 / far, issue])


def constants_of(parameters: np.ndarray) -> Constants:
    a, b, near, far, issue = map(float, parameters)
    return Constants(1 / a, b / a, 1 / near, 1 / far, issue)


Priced = Callable[[Constants], float]


def price_plan(plan: TrainingPlan) -> Priced:
    """A function that prices a plan's step, recorded once, by constants."""
    tape = tape_of(plan)

    def price(constants: Constants) -> float:
        _, costs = costs_on(tape, constants.machine(), NEAREST)
        return Walk(costs, overlap=False).price(tape, is_step=True).seconds

    return price


class Linearized(NamedTuple):
    """The relative errors of some rows at some parameters, and their slopes in relative changes of these."""

    at: np.ndarray
    errors: np.ndarray
    slopes: np.ndarray
    shares: np.ndarray  # how much each row counts


def linearize(groups: Sequence[Sequence[tuple[Priced, float]]], constants: Constants) -> Linearized:
    """Price all rows, and again with each parameter 1 % larger. Each group of rows counts the same."""
    at, rows = parameters_of(constants), [row for group in groups for row in group]
    nearby = [constants, *map(constants_of, at * (1 + 0.01 * np.eye(5)))]
    errors, *changed = np.array([[price(each) / seconds - 1 for price, seconds in rows] for each in nearby])
    shares = np.array([1 / len(group) for group in groups for _ in group])
    return Linearized(at, errors, (np.transpose(changed) - errors[:, None]) / 0.01, shares)


def improve(rows: Linearized) -> Constants:
    """The constants with the least mean absolute error, if seconds were linear, by reweighted least squares.

    Shares of peaks are at most 1, and no constant changes by more than 30 %.
    """
    change = np.zeros(5)
    for _ in range(60):
        weights = np.sqrt(rows.shares / np.maximum(abs(rows.errors + rows.slopes @ change), 1e-3))
        change = np.linalg.lstsq(weights[:, None] * rows.slopes, -weights * rows.errors, rcond=None)[0]
    return constants_of(np.maximum(rows.at * (1 + np.clip(change, -0.3, 0.3)), [1.0, 0.0, 1.0, 1.0, 0.0]))


def fit(groups: Sequence[Sequence[tuple[Priced, float]]], start: Constants = FITTED) -> Constants:
    """The constants with the least mean absolute error of the steps' times, by two Gauss-Newton steps."""
    for _ in range(2):
        start = improve(linearize(groups, start))
    return start


def cross_validate(groups: Sequence[Sequence[tuple[Priced, float]]], start: Constants) -> list[list[float]]:
    """The relative errors of each row, by constants that are fitted without its fold: every fifth row of its group."""
    everything = linearize(groups, start)
    fold = np.array([i % 5 for group in groups for i in range(len(group))])
    fitted = [improve(Linearized(everything.at, *(x[fold != k] for x in everything[1:]))) for k in range(5)]
    return [[price(fitted[i % 5]) / seconds - 1 for i, (price, seconds) in enumerate(group)] for group in groups]


# ---------------------------------------------------------------- what is printed


def score(errors: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean absolute value of relative errors, the largest one, and their mean, the bias."""
    sizes = np.abs(errors)
    return float(np.mean(sizes)), float(np.max(sizes)), float(np.mean(errors))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's: of the ranks of predicted and measured times.

    >>> rank_correlation([(1.0, 10.0), (2.0, 40.0), (3.0, 20.0)])
    0.5
    """
    ranks = np.argsort(np.argsort(np.array(pairs), axis=0), axis=0)
    return round(float(np.array(np.corrcoef(ranks.T))[0, 1]), 3)


def show_rows(rows: Sequence[PublishedRow], constants: Constants) -> list[tuple[Case, Any]]:
    """Print a line that compares each row with its predictions, then the score."""
    predictions = []
    for row in rows:
        texts = []
        for case in row.cases:
            prediction = predict(case.plan, constants)
            predictions.append((case, prediction))
            error = prediction.seconds / case.seconds - 1
            texts.append(f"{prediction.seconds:.3f} s, measured {case.seconds:.3f} s ({error:+.1%})")
        texts += [] if row.state is None else _bytes(row)
        print(f"{row.cases[0].plan}: {'; '.join(texts)}", flush=True)
    mean, most, _ = score([prediction.seconds / case.seconds - 1 for case, prediction in predictions])
    print(f"mean absolute error {100 * mean:.1f} %, max {100 * most:.1f} %")
    return predictions


def _bytes(row: PublishedRow) -> Iterable[str]:
    sizes = {plan: held(plan) for plan in {*row.activations, *row.shares}}
    most = sizes[next(iter(row.activations))]
    published = row.state or math.nan
    yield f"states {most.state / 2**30:.2f} GiB, published {published / 2**30:.2f} ({most.state / published - 1:+.1%})"
    for plan, published in row.activations.items():
        actual = sizes[plan].activations
        text = f"{actual / 2**30:.2f} GiB, published {published / 2**30:.2f} ({actual / published - 1:+.1%})"
        yield f"activations, {_kept(plan)}, {text}"
    for plan, published in row.shares.items():
        share = 100 * sizes[plan].activations / most.activations
        yield f"share, {_kept(plan)}, {share:.1f} %, published {published:.1f} % ({share - published:+.1f} points)"


def _kept(plan: TrainingPlan) -> str:
    text = f"recompute {plan.recompute}" if plan.recompute else "no recomputation"
    return text + " and sequence parallel" * plan.sequence


def show_misses(results: Sequence[tuple[Case, Any]]) -> None:
    """Print the three plans with the largest errors, and what the prediction is made of."""
    print("\nThe 3 worst misses")
    for case, prediction in sorted(results, key=lambda each: -abs(each[1].seconds / each[0].seconds - 1))[:3]:
        missing = case.seconds - prediction.seconds
        parts = [f"{kind} {entry.seconds:.2f} s" for kind, entry in [*prediction.kinds.items()][:4]]
        rate = prediction.flops / case.seconds / 1e12
        more = "more" if missing > 0 else "less"
        print(f"{case.plan}: {prediction.seconds:.2f} s, measured {case.seconds:.2f} s, {rate:.0f} TFLOP/s a device")
        print(f"    predicted: {', '.join(parts)}")
        print(f"    {abs(missing):.2f} s {more} were measured: {_why(case, results)}")


def _why(case: Case, results: Sequence[tuple[Case, Any]]) -> str:
    """Compare a miss with those of other rows with the same mesh, or the same tensor parallelism."""
    plan = case.plan
    others = [(each, prediction.seconds / each.seconds - 1) for each, prediction in results if each.plan != plan]
    same_mesh = [error for each, error in others if each.plan._replace(microbatch=plan.microbatch) == plan]
    models = [error for each, error in others if each.plan.tensor == plan.tensor and each.plan.hidden != plan.hidden]
    show = lambda errors: ", ".join(f"{error:+.0%}" for error in errors) or "there are none"  # noqa: E731
    return (
        f"with other microbatches on this mesh the prediction is off by {show(same_mesh)}; for other models with "
        f"tensor {plan.tensor} by {show(models)}"
    )


def show_ranks(results: Sequence[tuple[Case, Any]]) -> None:
    """Print how well the order of plans for one model is predicted."""
    models: dict[Any, list] = {}
    for case, prediction in results:
        plan = case.plan
        models.setdefault((plan.layers, plan.hidden), []).append((prediction.seconds, case.seconds))
    for (layers, hidden), pairs in models.items():
        if len(pairs) > 3:
            print(f"rank correlation of {len(pairs)} plans, {layers} × {hidden:,}: {rank_correlation(pairs):.2f}")


def plot(results: Sequence[tuple[str, Case, Any]], ax: Any = None) -> Any:
    """Draw predicted over measured seconds, on logarithmic axes; returns the axes."""
    colors = dict(zip(FORMATS, ("#4878a8", "#d08020", "#508050")))
    ends = [min(case.seconds for _, case, _ in results), max(case.seconds for _, case, _ in results)]
    curves = [Curve("equal", ends, ends, "-", "#999999")]
    for name, color in colors.items():
        x, y = zip(*[(case.seconds, prediction.seconds) for table, case, prediction in results if table == name])
        curves.append(Curve(name.removesuffix(".csv"), x, y, "o", color))
    ax = logarithmic_curves(ax, curves, "measured seconds")
    ax.set(ylabel="predicted seconds")
    return ax


def show_fit(tables: dict[str, list[PublishedRow]]) -> None:
    """Fit the constants to all tables, and cross-validate."""
    groups = [[(price_plan(case.plan), case.seconds) for row in rows for case in row.cases] for rows in tables.values()]
    constants = fit(groups)
    print(Table(["constant", "fitted"], [[name, f"{x:.6g}"] for name, x in constants._asdict().items()]))
    inside = [[price(constants) / seconds - 1 for price, seconds in group] for group in groups]
    for kind, errors in (("in sample", inside), ("five-fold cross-validated", cross_validate(groups, constants))):
        scores = [[name, *(f"{x:+.1%}" for x in score(each))] for name, each in zip(tables, errors)]
        print(f"\n{kind}\n{Table(['table', 'mean absolute error', 'max', 'bias'], scores)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script."""
    about, _ = __doc__.split("\n\n    python", 1)
    parser = argparse.ArgumentParser("python -m spmd.examples.scoreboard", description=about)
    parser.add_argument("--rows", metavar="FILE.csv", help="price these rows, in the format of any of the tables")
    parser.add_argument("--fit", action="store_true", help="fit the constants again, and cross-validate")
    parser.add_argument("--large", action="store_true", help="predict a step of Llama 3.1 405B on 16,384 H100")
    parser.add_argument("--plot", metavar="FILE", help="draw predicted against measured")
    args = parser.parse_args(argv)
    try:
        if args.rows is not None:
            with open(args.rows, newline="") as lines:
                rows = read_rows(lines, args.rows)
            show_rows(rows, FITTED)
            return
    except (OSError, ValueError) as error:
        sys.exit(f"scoreboard: {error}")
    if args.large:
        print(predict_large())
        return
    tables = read_tables()
    if args.fit:
        show_fit(tables)
        return
    print(Table(["constant", "fitted"], [[name, f"{x:.6g}"] for name, x in FITTED._asdict().items()]))
    predictions: list[tuple[str, Case, Any]] = []
    for name, rows in tables.items():
        print(f"\n{name}")
        predictions.extend((name, *each) for each in show_rows(rows, FITTED))
    cases = [(case, prediction) for _, case, prediction in predictions]
    show_misses(cases)
    show_ranks(cases)
    if args.plot:
        plot(predictions).figure.savefig(args.plot, bbox_inches="tight")


if __name__ == "__main__":
    with silence_other_ranks():
        main()
