"""Predictions: closed forms of what is counted, and how the time depends on the program and the machine."""

import functools
import math
import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, axis_size, pbroadcast, pmean, psum
from minidiff.compiler import native
from spmd import P
from spmd.machines import A100, H100, Efficiency, link
from spmd.parallel.transformer import (
    Config,
    causal_attention,
    dimensions,
    embed,
    label_cross_entropy,
    mlp,
    next_token_loss,
    normalize,
    sizes,
)
from spmd.pipeline import gpipe, interleaved, one_f_one_b, scheduled, zero_bubble
from spmd.prices.tape_cost import OperationCosts
from spmd.prices.walk import Walk
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

F, H = 64, 256


def types(*shapes, dtype="float32"):
    return [md.ShapedArray(shape, dtype) for shape in shapes]


def perceptron(up, down, x):
    return np.sum((np.tanh(x @ up) @ down) ** 2)


def split_perceptron(data, feats):
    def body(up, down, x):
        return pmean(np.mean(psum(np.tanh(x @ up) @ down, "feats") ** 2), "data")

    return mapped(body, mesh(data, feats, names=("data", "feats")), (P(None, "feats"), P("feats"), P("data")), P())


# ---------------------------------------------------------------- operations


def stack(x, weights, wrap=lambda f: f):
    return np.sum(md.scan(lambda x, w: (wrap(lambda x, w: np.tanh(x @ w))(x, w), None), x, weights)[0])


def branches(flag, x):
    return md.cond(flag, lambda x: x @ x @ x, lambda x: x @ x, x)


LAYERS = types((F, H), (H, F), (32, F))
ONE_STEP = 2 * 8 * F * F

#: Functions, types of their arguments, and their operations.
OPERATIONS = {
    "two layers": (perceptron, LAYERS, 2 * 2 * 32 * F * H),
    "with derivatives, of twice as many products": (
        md.value_and_grad(perceptron, argnums=(0, 1, 2)),
        *(LAYERS, 3 * 2 * 2 * 32 * F * H),
    ),
    **{f"a loop of {n} steps": (stack, types((8, F), (n, F, F)), n * ONE_STEP) for n in (1, 2, 7)},
    "the longest branch": (branches, [md.ShapedArray((), "bool"), *types((F, F))], 2 * 2 * F**3),
}


@each("name", OPERATIONS)
def test_operations_are_counted(name):
    f, args, flops = OPERATIONS[name]
    report = spmd.predict(f, A100)(*args)
    assert report.flops == report.model_flops == flops
    assert any("which branch" in note for note in report.notes) == (f is branches)


def test_seconds_are_those_of_all_steps():
    one, seven = (spmd.predict(stack, A100)(*types((8, F), (n, F, F))).kinds["matrix products"] for n in (1, 7))
    assert seven.seconds == pytest.approx(7 * one.seconds)
    forward, both = (spmd.predict(f, A100)(*args) for f, args, _ in [*OPERATIONS.values()][:2])
    assert both.seconds > 2 * forward.seconds


@each("layers, swiglu, kv_heads", [(1, False, 4), (3, True, 2)])
def test_a_decoder_has_six_operations_a_parameter_and_token_and_its_attention(layers, swiglu, kv_heads):
    config = Config(64, 32, 4, layers, 96, swiglu=swiglu, kv_heads=kv_heads)
    size = sizes(config)
    params = md.tree.map(lambda names: md.ShapedArray([size[n] for n in names.split()], "float32"), dimensions(config))
    batch, tokens = 2, 16
    step = md.value_and_grad(lambda params, x: next_token_loss(config, params, x, x))
    report = spmd.predict(step, A100)(params, md.ShapedArray((batch, tokens), "int64"))
    weights = sum(t.size for t in md.tree.leaves(params) if t.ndim > 1) - 64 * 32  # a look-up multiplies nothing
    attention = 12 * layers * batch * tokens**2 * config.features  # two products, forward and twice backward
    assert report.flops == 6 * weights * batch * tokens + attention
    assert report.kinds["attention"].flops >= attention
    assert report.model_flops == report.flops


def test_what_is_computed_again_counts_for_the_hardware_alone():
    args = types((8, F), (3, F, F))
    plain, again = (
        spmd.predict(md.grad(functools.partial(stack, wrap=wrap), argnums=(0, 1)), A100)(*args)
        for wrap in (lambda f: f, md.checkpoint)
    )
    assert plain.flops == plain.model_flops == again.model_flops
    assert again.flops == again.model_flops * 4 / 3
    assert again.hfu > again.mfu


def test_fused_operations_move_their_operands_once():
    x = md.ShapedArray((1 << 20,), "float32")
    f = lambda x, y: np.tanh(x * y + x) * y  # noqa: E731
    fused, single = (spmd.predict(f, A100, optimized=fused)(x, x) for fused in (True, False))
    assert fused.kinds["elementwise"].bytes == pytest.approx(3 * x.nbytes)
    assert single.kinds["elementwise"].bytes == (4 * 3 - 1) * x.nbytes
    assert fused.seconds < single.seconds


#: A machine that computes nothing in no time, and moves a byte a second; its loops are those of `jit`.
MOVER = A100.replace(elementwise=math.inf, bandwidth=1.0, launch=0.0, fuses=frozenset(), hides_memory=False)


def seconds_of(f, *args, **constants):
    return spmd.predict(f, MOVER.replace(**constants))(*args).seconds


IMAGE, LINE, INNER = md.ShapedArray((258, 258), "float32"), md.ShapedArray((1 << 16,), "float32"), 4 * 256 * 256
RATES = {"elementwise": 1.0, "bandwidth": math.inf, "steps": {"exp": 40.0}, "steps_in_loops": {"exp": 5.0}}


def sides(x):
    return (x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2]) * 0.25


#: Functions, types, changed constants, and seconds: of bytes, or of operations.
SECONDS = {
    "an array that is sliced several times is read once": (sides, IMAGE, {}, IMAGE.nbytes + INNER),
    "a function by itself": (np.exp, LINE, RATES, 40 * LINE.size),
    "a function in a loop": (lambda x: (np.exp(x) + 1) * x, LINE, RATES, (5 + 2) * LINE.size),
    "arithmetic beside moving bytes": (np.sqrt, LINE, {"elementwise": 1.0, "hides_memory": True}, 2 * LINE.nbytes),
    "arithmetic after moving them": (np.sqrt, LINE, {"elementwise": 1.0}, 2 * LINE.nbytes + LINE.size),
}


@pytest.mark.skipif(not native.is_available(), reason="loops are compiled with llvmlite")
@each("name", SECONDS)
def test_seconds_of_loops_of_jit(name):
    f, x, constants, seconds = SECONDS[name]
    assert seconds_of(f, x, **constants) == seconds


def test_each_operation_moves_its_operands_where_nothing_is_fused():
    assert seconds_of(sides, IMAGE, fuses=None) >= 11 * INNER


def test_compiled_loops_copy_what_their_steps_return_into_one_array():
    x, weights = types((8, F), (3, F, F))
    loop = lambda x, weights: md.scan(lambda x, w: (x @ w, x), x, weights)  # noqa: E731
    entries = spmd.predict(loop, MOVER)(x, weights).cost.entries
    assert [e.seconds for key, e in entries.items() if key.operation == "stack"] == [2 * 3 * x.nbytes]


# ---------------------------------------------------------------- types and sizes


def test_types_and_arrays_give_the_same():
    step = md.value_and_grad(split_perceptron(2, 4), argnums=(0, 1))
    shapes = (F, H), (H, F), (16, F)
    of_types, of_arrays = spmd.predict(step, A100)(*types(*shapes)), spmd.predict(step, A100)(*map(np.ones, shapes))
    assert of_types.flops == of_arrays.flops
    doubles = spmd.predict(step, A100)(*types(*shapes, dtype="float64"))
    assert doubles.seconds == of_arrays.seconds
    assert doubles.memory == of_arrays.memory


# ---------------------------------------------------------------- machines


STEP, ARGS = md.value_and_grad(split_perceptron(4, 8), argnums=(0, 1)), types((512, 2048), (2048, 512), (4096, 512))


@each(
    "worse",
    [
        *({"bandwidth": A100.bandwidth / 10}, {"flops": {"float32": 1e12}}, {"launch": 1e-4}, {"elementwise": 1e9}),
        {"efficiency": Efficiency(0.1, 300)},
        {"links": (link("NVLink", 8, 4e-6, 1e9), A100.links[1])},
        {"links": (A100.links[0], link("InfiniBand", math.inf, 1e-3, 25e9))},
    ],
)
def test_a_worse_machine_is_slower(worse):
    assert spmd.predict(STEP, A100.replace(**worse))(*ARGS).seconds > spmd.predict(STEP, A100)(*ARGS).seconds


# ---------------------------------------------------------------- overlap and pipelines


def test_overlap_hides_communication():
    def body(weights, x):
        for w in weights:
            x = np.tanh(x @ w)
        return psum(x.sum(), "i")

    loss = mapped(body, mesh(8), (P(), P("i")), P())
    step = lambda *args: spmd.rewritten(md.grad(loss), bucket_bytes=1 << 20)(*args)  # noqa: E731
    tape = step(types(*[(1024, 1024)] * 6), md.ShapedArray((65536, 1024), "float32"))
    beside, none, other = (spmd.predict(tape, A100, overlap=overlap) for overlap in (True, False, ()))
    assert beside.hidden > 0
    assert none.hidden == pytest.approx(0, abs=1e-12)
    assert beside.seconds < none.seconds == other.seconds
    assert none.seconds == pytest.approx(
        none.exposed + sum(e.seconds for k, e in none.kinds.items() if "psum" not in k)
    )


def pipelined_decoder(config, data, stages, feats, microbatches, size, tokens, make=one_f_one_b, stage=None):
    """A step in a pipeline, with types for its arguments: Megatron's parallelism, in 16 bits."""
    over = mesh(data, stages, feats, names=("data", "stages", "feats"))
    schedule, names, whole = make(stages, microbatches), dimensions(config), sizes(config)
    split = dict.fromkeys(("vocabulary", "heads", "kv_heads", "hidden"), "feats")

    def type_of(names, *leading):
        return md.ShapedArray((*leading, *[whole[n] for n in names.split()]), "float16")

    def spec_of(names, *leading):
        return P(*leading, *[split.get(n) for n in names.split()])

    trees = {"embedding": names["embedding"]}, names["layers"][0], {"norm": names["norm"], "head": names["head"]}
    layers = config.layers
    leading = schedule.chunks, layers // schedule.chunks
    params = [md.tree.map(lambda n, k=k: type_of(n, *k), t) for t, k in zip(trees, ((), leading, ()))]
    specs = [md.tree.map(lambda n, k=k: spec_of(n, *k), t) for t, k in zip(trees, ((), (None, "stages"), ()))]

    def block(x, p):
        x = x + psum(causal_attention(p["attention"], normalize(config, p["attention_norm"], x)), "feats")
        return x + psum(mlp(p["mlp"], normalize(config, p["mlp_norm"], x)), "feats"), None

    layers = (
        lambda p, t: embed(p["embedding"], t, "feats"),
        functools.partial(stage or (lambda block, p, x: md.scan(block, x, p)[0]), block),
        lambda p, x, y: np.mean(label_cross_entropy(normalize(config, p["norm"], x) @ p["head"], y, "feats")),
    )

    def body(params, text, labels):
        batch = (x.reshape(microbatches, size, tokens) for x in (text, labels))
        loss, gradients = scheduled(schedule, layers, pbroadcast(params, "data"), *batch, "stages")
        return pmean(loss, "data"), psum(gradients, "data")

    specs = tuple(specs)
    step = mapped(body, over, (specs, P("data"), P("data")), (P(), specs))
    text = md.ShapedArray((data * microbatches * size, tokens), "int64")
    return step, (tuple(params), text, text)


def test_a_pipelined_decoder_has_the_operations_of_the_paper():
    """With all activations computed again: Narayanan et al., section 5.1."""
    data, stages, feats, microbatches, s, h, V, L = 2, 4, 2, 8, 128, 256, 512, 8
    step, args = pipelined_decoder(Config(V, h, 4, L, 4 * h, swiglu=False), data, stages, feats, microbatches, 2, s)
    report = spmd.predict(step, A100, nearest=("feats", "data", "stages"))(*args)
    examples = data * microbatches * 2
    paper = 96 * examples * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
    # The paper counts the logits' forward pass once; here the last stage computes them again, too.
    head_again = 2 * examples * s * h * V
    expected = (paper + head_again) / (data * stages * feats)
    assert report.flops == pytest.approx(expected, rel=1e-9)
    model = 72 * examples * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h)) / (data * stages * feats)
    assert report.model_flops == pytest.approx(model, rel=1e-9)
    (timed,) = report.schedules
    bubble = report.kinds["pipeline bubble"].seconds
    assert bubble > 0
    assert bubble == pytest.approx(timed.seconds - max(map(timed.busy, range(stages))))
    pytest.importorskip("matplotlib").use("Agg")
    assert len(timed.plot().get_yticklabels()) == stages
    assert "psum along data" in report.kinds
    assert report.seconds == pytest.approx(
        sum(e.seconds for k, e in report.kinds.items() if "along" not in k) + report.exposed, rel=1e-6
    )


def test_the_first_and_last_stages_of_a_pipeline_do_more_than_the_others():
    t = lambda *shape: md.ShapedArray(shape, "float32")  # noqa: E731
    layers = lambda w, x: x @ w, lambda w, x: np.tanh(x @ w[0]), lambda w, x, y: np.mean((x @ w - y) ** 2)
    body = lambda params, x, y: scheduled(gpipe(4, 2), layers, params, x, y, "stages")  # noqa: E731
    specs = P(), P(None, "stages"), P()
    step = mapped(body, mesh(4, names=("stages",)), (specs, P(), P()), (P(), specs))
    params = t(4096, 64), t(1, 4, 64, 64), t(64, 4096)
    (timed,) = spmd.predict(step, A100)(params, t(2, 8, 4096), t(2, 8, 4096)).schedules
    first, *inner, last = map(timed.busy, range(4))
    assert inner[0] == pytest.approx(inner[1])
    assert inner[0] < 0.95 * min(first, last)


def test_the_bubble_shrinks_from_schedule_to_schedule():
    """The papers' numbers; operations agree, except for the recomputed head of the last stage."""
    config = Config(64, 1024, 8, 8, 4096, swiglu=False)
    makes = one_f_one_b, functools.partial(interleaved, chunks=2), zero_bubble
    plain, chunked, split = (
        spmd.predict(step, A100, nearest=("feats", "data", "stages"))(*args)
        for step, args in (pipelined_decoder(config, 1, 4, 2, 8, 1, 1024, make) for make in makes)
    )
    bubbles = [report.kinds["pipeline bubble"].seconds for report in (plain, chunked, split)]
    assert bubbles[0] > bubbles[1] > 0
    assert bubbles[0] > bubbles[2] > 0
    assert chunked.flops == pytest.approx(plain.flops)
    assert split.flops == pytest.approx(plain.flops, rel=0.02)
    assert split.model_flops == pytest.approx(plain.model_flops, rel=0.02)
    assert chunked.seconds < plain.seconds


def test_stages_may_have_different_layers():
    """Known by the number of the stage: 14 layers on 4 stages, the first and the last of which have one less."""
    config = Config(128256, 16384, 128, 16, 53248, kv_heads=8)

    def stage(block, w, x):
        ends = (axis_index("stages") == 0) | (axis_index("stages") == axis_size("stages") - 1)
        short = lambda x: md.scan(block, x, md.tree.map(lambda leaf: leaf[:-1], w))[0]  # noqa: E731
        return md.cond(ends, short, lambda x: md.scan(block, x, w)[0], x)

    step, args = pipelined_decoder(config, 8, 4, 8, 4, 1, 8192, stage=stage)
    report = spmd.predict(step, H100, nearest=("feats", "data", "stages"))(*args)
    h, s, examples = config.features, 8192, 8 * 4
    weights = 14 * (2 * h * h + 2 * h * h // 16 + 3 * h * config.hidden)
    forward = 2 * examples * s * weights + 4 * 14 * examples * s**2 * h
    head = 2 * examples * s * h * config.vocabulary
    assert report.flops == pytest.approx((4 * forward + 4 * head) / 256, rel=1e-6)
    assert report.ranks == 256 and not report.notes


def test_a_trillion_parameters_are_priced_from_their_types():
    config = Config(51200, 25600, 160, 128, 4 * 25600, swiglu=False)
    step, args = pipelined_decoder(config, 6, 64, 8, 64, 1, 2048)
    report = spmd.predict(step, A100, nearest=("feats", "data", "stages"))(*args)
    assert report.ranks == 3072
    parameters = sum(t.size for t in md.tree.leaves(args[0]))
    assert parameters > 1e12
    assert 2 * parameters / 512 < report.memory["params"] < 2.4 * parameters / 512  # every stage has both ends
    assert 0.1 < report.mfu < report.hfu < 0.5  # as many microbatches as stages: half the time is a bubble


def test_the_table_and_the_picture_have_each_kind():
    report = spmd.predict(STEP, A100)(*ARGS)
    assert all(kind in str(report) for kind in report.kinds)
    assert "MFU" in str(report)
    assert len(report.lines) > 1
    assert sum(entry.seconds for entry in report.lines.values()) == pytest.approx(
        sum(entry.seconds for entry in report.kinds.values())
    )
    assert "np.tanh(x @ u" in str(report.by_line)
    pytest.importorskip("matplotlib").use("Agg")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of a legend without entries
        assert [label.get_text() for label in report.plot().get_yticklabels()] == [*report.kinds]


def test_prices_are_all_that_a_walk_asks_for():
    costs = OperationCosts(compute=lambda work, dtype: 1.0, send=lambda *call: (10.0, "wire"))
    tape = md.make_tape(split_perceptron(2, 2))(*types((F, H), (H, F), (16, F)))
    cost = Walk(costs, fused=False, record=True).price(tape)
    assert cost.seconds == max(end for *_, end, _ in cost.operations)
    assert cost.total("exposed") == 20.0  # nothing else can run
