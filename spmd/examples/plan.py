"""Plans for published models of Megatron-LM on A100 clusters, beside the plans that were published.

Each model of the scoreboard's tables was trained on a number of devices, in one or several ways. `spmd.plan` searches
for a faster way, among those of `megatron_step`: the mesh, the microbatch, the chunks of an interleaved
schedule, and what is recomputed. Both are predicted with the scoreboard's constants.

    python -m spmd.examples.plan                          all models, a line each
    python -m spmd.examples.plan 39.1 --devices 512       the best plans of a model, and why others take longer
    python -m spmd.examples.plan 39.1 --plot FILE.svg     the front of time against memory
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import minidiff as md
import spmd
from spmd.examples.fitted_constants import FITTED
from spmd.examples.megatron_3d import AXES, parameters, state_specs
from spmd.examples.published import TrainingPlan, pad_vocabulary, read_tables
from spmd.examples.scoreboard import predict
from spmd.mesh.launch import silence_other_ranks
from spmd.sharding.sharded_array import Sharding
from spmd.show import Table, show_seconds

Model = tuple[int, int, int]  # parameters, devices, examples of a batch


def published_plans() -> dict[Model, list[TrainingPlan]]:
    """The plans in the scoreboard's tables, by model, devices and batch."""
    plans: dict[Model, list[TrainingPlan]] = {}
    for rows in read_tables().values():
        for case in (case for row in rows for case in row.cases):
            key = parameters(case.plan._replace(vocabulary=51200).config()), case.plan.devices, case.plan.batch
            plans.setdefault(key, []).append(case.plan)
    return plans


def make_step_of(published: TrainingPlan) -> Callable:
    """The function that `spmd.plan` asks for a step of this model.

    >>> from spmd.report.plan import Choice
    >>> make_step = make_step_of(TrainingPlan(64, 4, 4, 128, 16, tensor=1, data=1, stages=1, batch=8, microbatch=1))
    >>> step, (state, *_) = make_step(Choice(data=2, feats=2, recompute="full"))
    >>> weight = state["weights"]["layers"]["down"][0]
    >>> weight, weight.sharding.spec
    (f16[1,4,256,64], P(None, 'stages', 'feats', None))
    """

    def make_step(choice: Any) -> tuple[Callable, tuple]:
        chosen = published._replace(
            vocabulary=pad_vocabulary(published.vocabulary, choice.feats),
            data=choice.data,
            stages=choice.stages,
            tensor=choice.feats,
            microbatch=choice.microbatch,
            chunks=choice.chunks,
            recompute=choice.recompute,
            sequence=choice.feats > 1,
        )
        step, (state, *rest) = chosen.step()
        mesh = spmd.make_mesh((choice.data, choice.stages, choice.feats), AXES, backend="simulated")
        sharded = lambda t, spec: md.ShapedArray(t.shape, t.dtype, sharding=Sharding(mesh, spec))  # noqa: E731
        return step, (md.tree.map(sharded, state, state_specs(chosen.config(), state)), *rest)

    return make_step


def find(published: TrainingPlan, devices: int, **options: Any) -> Any:
    """The `spmd.plan` of a model on so many devices."""
    return spmd.plan(
        make_step_of(published),
        FITTED.machine(),
        devices=devices,
        axes=("data", "stages", "feats"),
        zero=(0,),
        overlap=False,
        **options,
    )


def show_all(models: dict[Model, list[TrainingPlan]]) -> None:
    """Print, for each model, the fastest of the published plans by prediction, and the plan that is found."""
    rows = []
    for (size, devices, _), plans in models.items():
        published, theirs = min(((predict(plan), plan) for plan in plans), key=lambda each: each[0].seconds)
        start = time.perf_counter()
        # What fits is judged by one measure: what the published plan needs, the devices had.
        best = find(theirs, devices, memory=max(FITTED.machine().memory, sum(published.memory.values())))
        took = f"{time.perf_counter() - start:.0f} s"
        faster = f"{published.seconds / best.best.seconds:.2f}"
        row = [f"{size / 1e9:.1f}", devices, str(theirs).split(", ", 1)[1], show_seconds(published.seconds)]
        rows.append([*row, str(best.best.choice), show_seconds(best.best.seconds), faster, took])
    header = ["billion", "devices", "published", "predicted", "found", "predicted", "times as fast", "search"]
    print(Table(header, rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script."""
    parser = argparse.ArgumentParser("python -m spmd.examples.plan", description=__doc__.split("\n\n    python", 1)[0])
    parser.add_argument("billion", nargs="?", type=float, help="parameters of a model; all models if left out")
    parser.add_argument("--devices", type=int, help="those of the published plan if left out")
    parser.add_argument("--memory", type=float, metavar="GIB", help="of a device")
    parser.add_argument("--plot", metavar="FILE", help="draw time against memory")
    args = parser.parse_args(argv)
    models = published_plans()
    if args.billion is None:
        show_all(models)
        return
    (_, devices, _), plans = min(
        models.items(),
        key=lambda item: (abs(item[0][0] / 1e9 - args.billion) > 1, abs(item[0][1] - (args.devices or 0))),
    )
    memory = None if args.memory is None else args.memory * 2**30
    plan = find(plans[0], args.devices or devices, memory=memory)
    print(plan)
    if args.plot:
        plan.plot().figure.savefig(args.plot, bbox_inches="tight")


if __name__ == "__main__":
    with silence_other_ranks():
        main()
