"""Predictions of steps that overlap, and of pipelines; `predictions.md` shows what is counted."""

import functools
import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, axis_size, pbroadcast, pmean, psum
from spmd import P
from spmd.machines import A100, H100
from spmd.parallel.transformer import (
    Config,
    causal_attention,
    dimensions,
    embed,
    label_cross_entropy,
    mlp,
    normalize,
    sizes,
)
from spmd.pipeline import gpipe, interleaved, one_f_one_b, scheduled, zero_bubble
from tests.checks.meshes import mapped, mesh


def types(*shapes):
    return [md.ShapedArray(shape, "float32") for shape in shapes]


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


def test_the_picture_has_each_kind():
    pytest.importorskip("matplotlib").use("Agg")
    report = spmd.predict(md.grad(lambda x, w: np.sum(np.tanh(x @ w))), A100)(*types((512, 2048), (2048, 512)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of a legend without entries
        assert [label.get_text() for label in report.plot().get_yticklabels()] == [*report.kinds]
