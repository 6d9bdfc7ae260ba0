"""Predicted against published training steps, on clusters of A100s and of H100s.

Each row of five tables is a decoder on some devices, and what was measured of it (`published.py`). The decoder is built
by `megatron_3d.py`, for types alone; its tape is priced by `spmd.predict`. The machine has the constants of its data
sheet, and a few that are fitted to the step times of all rows at once (`fitted_constants.py`). No row has constants of
its own.

    python -m spmd.examples.scoreboard                    all tables
    python -m spmd.examples.scoreboard --machine H100     those of one machine
    python -m spmd.examples.scoreboard --rows FILE.csv    further rows, in the format of any of the tables
    python -m spmd.examples.scoreboard --fit              fit the constants again, and cross-validate
    python -m spmd.examples.scoreboard --plot FILE.svg    predicted against measured
    python -m spmd.examples.scoreboard --large            a decoder of 405 billion parameters on 16,384 H100

With --fit and --machine H100, rows of each model are predicted by constants that were fitted to the other models.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import minidiff as md
import spmd
from minidiff.core.tape import Tape
from minidiff.core.types import Var
from minidiff.values.aliasing import types_alone
from spmd.examples.fitted_constants import (
    FITTED,
    KERNELS,
    NEAREST,
    RANGES,
    Constants,
    HeldOut,
    Kernels,
    constants_for,
    cross_validate,
    fit,
    five_folds,
    placement,
    price_plan,
    without_each,
)
from spmd.examples.published import (
    FORMATS,
    LLAMA,
    LLAMA_PLAN,
    TABLES,
    Case,
    PublishedRow,
    TrainingPlan,
    read_rows,
    read_tables,
    step_of,
    tape_of,
)
from spmd.machines import H100
from spmd.mesh.launch import silence_other_ranks
from spmd.show import Curve, Table, logarithmic_curves

# ---------------------------------------------------------------- predictions


def predict_large() -> Any:
    """The prediction of a step of Llama 3.1 405B on 16,384 H100, by the constants of the data sheet alone."""
    step, types = step_of(LLAMA, LLAMA_PLAN)
    return spmd.predict(step, H100, nearest=NEAREST, overlap=False)(*types)


class Bytes(NamedTuple):
    """Return the states and activations of the layers on a rank of a middle stage, from the tape."""

    state: int
    activations: int


def predict(plan: TrainingPlan, constants: Constants | Kernels | None = None) -> Any:
    """Return the `spmd.predict` of a plan's step, on the machine with these constants or with the fitted ones."""
    constants = constants_for(plan) if constants is None else constants
    return spmd.predict(tape_of(plan), constants.machine(), **placement(plan))


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


def show_rows(rows: Sequence[PublishedRow]) -> list[tuple[Case, Any]]:
    """Print a line that compares each row with its predictions, then the score."""
    predictions = []
    for row in rows:
        texts = []
        for case in row.cases:
            prediction = predict(case.plan)
            predictions.append((case, prediction))
            error = prediction.seconds / case.seconds - 1
            low, high = (prediction.seconds * (1 + k * RANGES[case.plan.program]) for k in (-1, 1))
            texts.append(f"{prediction.seconds:.3f} s, measured {case.seconds:.3f} s ({error:+.1%})")
            texts[-1] += f", 80 % range {low:.3f} to {high:.3f}"
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
    print("The 3 worst misses")
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
    alike = [each for each in others if (each[0].plan.tensor, each[0].plan.devices) == (plan.tensor, plan.devices)]
    models = [error for each, error in alike if each.plan.hidden != plan.hidden]
    show = lambda errors: ", ".join(f"{error:+.0%}" for error in errors) or "there are none"  # noqa: E731
    return (
        f"with other microbatches on this mesh the prediction is off by {show(same_mesh)}; for other models with "
        f"tensor {plan.tensor} on as many devices by {show(models)}"
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
    colors = dict(zip(FORMATS, ("#4878a8", "#d08020", "#508050", "#8858a0", "#b04050")))
    ends = [min(case.seconds for _, case, _ in results), max(case.seconds for _, case, _ in results)]
    curves = [Curve("equal", ends, ends, "-", "#999999")]
    for name in dict.fromkeys(table for table, _, _ in results):
        x, y = zip(*[(case.seconds, prediction.seconds) for table, case, prediction in results if table == name])
        curves.append(Curve(name.removesuffix(".csv"), x, y, "o", colors[name]))
    ax = logarithmic_curves(ax, curves, "measured seconds")
    ax.set(ylabel="predicted seconds")
    return ax


def show_fit(machine: str) -> None:
    """Fit the constants to the tables of a machine, cross-validate, and print what each constant is worth."""
    tables = read_tables(machine)
    rows = {name: [(row.model, case) for row in rows for case in row.cases] for name, rows in tables.items()}
    priced = {name: [(price_plan(case.plan), case.seconds) for _, case in each] for name, each in rows.items()}
    fits = [[*rows]] if machine == "A100" else [[name] for name in rows]  # tables with constants in common
    for names in fits:
        groups = [priced[name] for name in names]
        start = constants_for(rows[names[0]][0][1].plan)
        constants = fit(groups, start)
        print(Table(["constant", "fitted"], [[name, f"{x:.6g}"] for name, x in constants._asdict().items()]))
        errors = {name: [price(constants) / seconds - 1 for price, seconds in priced[name]] for name in names}
        print(f"\nin sample\n{_scores(errors)}")
        models = [model for name in names for model, _ in rows[name]]
        folds = models if all(models) else five_folds(groups)
        held_out = iter(cross_validate(groups, constants, folds))
        by_table = {name: [next(held_out) for _ in rows[name]] for name in names}
        how = "each model by the others" if all(models) else "five-fold cross-validated"
        print(f"\n{how}\n{_scores({name: [each.error for each in by_table[name]] for name in names})}")
        print(_ranges(by_table))
        for name, without in without_each(constants):
            losses = {table: [price(without) / seconds - 1 for price, seconds in priced[table]] for table in names}
            print(f"without {name}: " + ", ".join(f"{score(each)[0]:.1%}" for each in losses.values()))
        print()


def _scores(errors: Mapping[str, Sequence[float]]) -> Table:
    rows = [[name, *(f"{x:+.1%}" for x in score(each))] for name, each in errors.items()]
    return Table(["table", "mean absolute error", "max", "bias"], rows)


def _ranges(held_out: dict[str, list[HeldOut]]) -> str:
    """Return the widths of 80 % ranges, and the share of rows inside of theirs.

    The variance of a row's error is that due to the constants, and that of all errors of its table.
    """
    lines = []
    for name, rows in held_out.items():
        spread = np.sqrt(np.mean([row.error**2 for row in rows]))
        widths = [1.2816 * math.hypot(row.deviation, spread) for row in rows]
        inside = np.mean([abs(math.log1p(row.error)) <= width for row, width in zip(rows, widths)])
        lines.append(f"{name}: 80 % ranges of ±{np.mean(widths):.1%} on average; {inside:.0%} of the rows are inside")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script."""
    about, _ = __doc__.split("\n\n    python", 1)
    parser = argparse.ArgumentParser("python -m spmd.examples.scoreboard", description=about)
    parser.add_argument("--rows", metavar="FILE.csv", help="price these rows, in the format of any of the tables")
    parser.add_argument("--fit", action="store_true", help="fit the constants again, and cross-validate")
    parser.add_argument("--machine", choices=TABLES, help="the machine of the tables; both if left out")
    parser.add_argument("--large", action="store_true", help="predict a step of Llama 3.1 405B on 16,384 H100")
    parser.add_argument("--plot", metavar="FILE", help="draw predicted against measured")
    args = parser.parse_args(argv)
    try:
        if args.rows is not None:
            with open(args.rows, newline="") as lines:
                rows = read_rows(lines, args.rows)
            show_rows(rows)
            return
    except (OSError, ValueError) as error:
        sys.exit(f"scoreboard: {error}")
    if args.large:
        print(predict_large())
        return
    machines = [*TABLES] if args.machine is None else [args.machine]
    if args.fit:
        for machine in machines:
            show_fit(machine)
        return
    predictions: list[tuple[str, Case, Any]] = []
    for machine in machines:
        constants: Mapping[str, Constants | Kernels] = {"Megatron-LM": FITTED} if machine == "A100" else KERNELS
        fields = next(iter(constants.values()))._fields
        print(Table([machine, *fields], [[name, *(f"{x:.6g}" for x in each)] for name, each in constants.items()]))
        for name, rows in read_tables(machine).items():
            print(f"\n{name}")
            predictions.extend((name, *each) for each in show_rows(rows))
        print()
    cases = [(case, prediction) for _, case, prediction in predictions]
    show_misses(cases)
    show_ranks(cases)
    if args.plot:
        plot(predictions).figure.savefig(args.plot, bbox_inches="tight")


if __name__ == "__main__":
    with silence_other_ranks():
        main()
