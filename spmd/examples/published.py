"""Published training steps: the rows of five tables, and the decoder and the mesh of each.

The decoders are built by `megatron_3d.py`, for types alone: `tape_of(plan)` is the tape of a step.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple

import minidiff as md
import spmd
from minidiff.core.tape import Tape
from minidiff.values.aliasing import types_alone
from spmd.examples.megatron_3d import ALL_AXES, AXES, MegatronConfig, Options, check, megatron_step
from spmd.pipeline.library import interleaved, one_f_one_b
from spmd.prices.compiled_tape import rewritten


class Style(NamedTuple):
    """The norms, positions and perceptrons of a decoder."""

    layer_norm: bool = True
    learned: bool = True  # positions, and biases, as GPT; else rotary ones, without biases
    swiglu: bool = False
    activation: str = "gelu"
    tied: bool = True
    dropout: float = 0.0


GPT, MPT = Style(), Style(learned=False)  # MPT adds a bias to scores (ALiBi), for which rotary positions stand
MEGATRON = GPT._replace(dropout=0.1)
LLAMA_STYLE = Style(layer_norm=False, learned=False, swiglu=True, tied=False)
NEMOTRON = Style(learned=False, activation="squared relu", tied=False)


class TrainingPlan(NamedTuple):
    """A decoder, and how it is trained on which mesh. Without sizes of its own, its perceptron is as GPT's."""

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
    context: int = 1
    flash: bool = False
    sharded: bool = False
    overlap: bool = False
    pods: int = 1
    perceptron: int | None = None
    kv_heads: int | None = None
    style: Style = MEGATRON
    program: str = "Megatron-LM"

    @property
    def devices(self) -> int:
        return self.tensor * self.data * self.stages * self.context * self.pods

    @property
    def options(self) -> Options:
        return Options(self.recompute, self.sequence, self.flash, self.sharded, self.overlap)

    def __str__(self) -> str:
        extras = [f"{self.chunks} chunks"] * (self.chunks > 1) + ["sequence parallel"] * self.sequence
        extras += [f"recompute {self.recompute}"] * (self.recompute != "full")
        extras += [f"context {self.context}"] * (self.context > 1) + ["fully sharded"] * self.sharded
        extras += [f"{self.pods} pods"] * (self.pods > 1) + ["overlapped products"] * self.overlap
        extras += [f"{self.tokens:,} tokens"] * (self.tokens != 2048)
        mesh = f"tensor {self.tensor}, data {self.data}, stages {self.stages}"
        return ", ".join([f"{self.layers} × {self.hidden:,}", mesh, f"microbatch {self.microbatch}", *extras])

    def config(self) -> MegatronConfig:
        return MegatronConfig(
            vocabulary=self.vocabulary,
            features=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            layers=self.layers,
            hidden=self.perceptron or 4 * self.hidden,
            layer_norm=self.style.layer_norm,
            swiglu=self.style.swiglu,
            activation=self.style.activation,
            tied=self.style.tied,
            dropout=self.style.dropout,
            positions=self.tokens * self.style.learned,
        )

    def step(self) -> tuple[Callable, tuple]:
        """A step of training, and the types of its arguments. Raises ValueError if the mesh does not divide them."""
        return step_of(self.config(), self)


def step_of(config: MegatronConfig, plan: TrainingPlan) -> tuple[Callable, tuple]:
    """A step of a decoder on the mesh of a plan, and the types of its arguments."""
    replicas = plan.data * plan.pods
    if plan.batch % (replicas * plan.microbatch):
        raise ValueError(f"{plan}: {plan.batch} examples cannot be split into microbatches on {replicas} replicas")
    microbatches = plan.batch // replicas // plan.microbatch
    sizes = dict(zip(ALL_AXES, (plan.pods, plan.data, plan.stages, plan.context, plan.tensor)))
    axes = [axis for axis in ALL_AXES if axis in AXES or sizes[axis] > 1]
    mesh = spmd.make_mesh([sizes[axis] for axis in axes], axes, backend="simulated")
    chunks = plan.chunks
    check(mesh, config, plan.stages, chunks, plan.options)  # before its schedule, which takes long
    schedule = interleaved(plan.stages, microbatches, chunks) if chunks > 1 else one_f_one_b(plan.stages, microbatches)
    init, step = megatron_step(mesh, config, schedule, *plan.options)
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
    model: str = ""
    state: float | None = None  # bytes of a rank
    activations: dict[TrainingPlan, float] = field(default_factory=dict)  # bytes of a rank
    shares: dict[TrainingPlan, float] = field(default_factory=dict)  # per cent of those without recomputation


def pad_vocabulary(vocabulary: int, tensor: int) -> int:
    """Megatron-LM pads the vocabulary to a multiple of 128 on each rank."""
    return math.ceil(vocabulary / (128 * tensor)) * 128 * tensor


def _of_vtrain(row: dict[str, Any]) -> PublishedRow:
    return PublishedRow([Case(_plan(row, 50257), row["step_ms"] / 1e3)])


def _of_sc21(row: dict[str, Any]) -> PublishedRow:
    plan = _plan(row, 51200)
    return PublishedRow([Case(plan, paper_flops(plan) / plan.devices / (row["tflops_per_gpu"] * 1e12))])


def _of_sequence_parallel(row: dict[str, Any]) -> PublishedRow:
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


def _of_h100(row: dict[str, Any]) -> PublishedRow:
    sharded = row["fsdp"] > 1
    styles = {"swiglu": LLAMA_STYLE, "relu2": NEMOTRON, "gelu": MPT if sharded else GPT}
    if row["feed_forward"] not in styles:
        raise ValueError(f"feed_forward is {row['feed_forward']!r}; write {', '.join(styles)}")
    ways = {
        "program": "LLM Foundry" if sharded else "NeMo",
        "context": int(row["context"]),
        "chunks": int(row["virtual_stages"]),
        "flash": True,
        "sharded": sharded,
        "sequence": row["tensor"] > 1,
        "overlap": row["tensor"] > 1,  # as NeMo's recipes
        "recompute": "full" if row["recompute"] == "full" else None,
        "perceptron": int(row["ffn_hidden"]),
        "kv_heads": int(row["kv_heads"]),
        "style": styles[row["feed_forward"]],
    }
    plan = _plan({**row, "data": row["data"] * row["fsdp"]}, int(row["vocab"]))._replace(**ways)
    return PublishedRow([Case(plan, row["step_s"])], model=row["model"])


def _plan(row: dict[str, Any], vocabulary: int) -> TrainingPlan:
    tensor, stages = int(row["tensor"]), int(row["pipeline"])
    return TrainingPlan(
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        layers=int(row["layers"]),
        vocabulary=pad_vocabulary(vocabulary, tensor),
        tokens=int(row.get("sequence", 2048)),
        tensor=tensor,
        data=int(row["data"] if "data" in row else row["gpus"] // (tensor * stages)),
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
    "h100_nemo.csv": ("step_s", _of_h100),
    "h100_fsdp.csv": ("step_s", _of_h100),
}
TABLES = {"A100": [*FORMATS][:3], "H100": [*FORMATS][3:]}  # by machine
TEXTS = "model", "recompute", "feed_forward"  # columns that are no numbers


def read_rows(lines: Iterable[str], name: str) -> list[PublishedRow]:
    """The rows of a table in any of the formats. Raises ValueError, with the line, for one that it cannot read.

    >>> read_rows(["a,b", "1,2"], "rows.csv")
    Traceback (most recent call last):
    ...
    ValueError: rows.csv: no column step_ms, tflops_per_gpu, step_s_full_recompute or step_s; the columns are a, b
    """
    table = csv.DictReader(lines)
    columns = list(table.fieldnames or ())
    read = next((read for column, read in FORMATS.values() if column in columns), None)
    if read is None:
        *names, last = dict.fromkeys(column for column, _ in FORMATS.values())
        raise ValueError(f"{name}: no column {', '.join(names)} or {last}; the columns are {', '.join(columns)}")
    rows = []
    for row in table:
        where = f"{name}, line {table.line_num}"
        try:
            rows.append(read({column: x if column in TEXTS else float(x) for column, x in row.items()}))
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


def read_tables(machine: str = "A100") -> dict[str, list[PublishedRow]]:
    """Return the rows of the tables of a machine."""
    data = resources.files("spmd.examples") / "data"
    return {name: read_rows((data / name).read_text().splitlines(), name) for name in TABLES[machine]}


#: Llama 3.1 405B: Grattafiori et al., "The Llama 3 herd of models", tables 3 and 4.
LLAMA = MegatronConfig(vocabulary=128256, features=16384, heads=128, kv_heads=8, layers=126, hidden=53248)
SIZES = LLAMA.features, LLAMA.heads, LLAMA.layers, LLAMA.vocabulary
LLAMA_PLAN = TrainingPlan(*SIZES, tokens=8192, tensor=8, data=128, stages=16, batch=2048, microbatch=1, sequence=True)
