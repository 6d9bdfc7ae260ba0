"""A decoder on all axes of a mesh: numbers and communication, on simulated and real ranks."""

import dataclasses
import functools
import math

import numpy

import minidiff as md
import spmd
from minidiff.nn import silu, softmax
from spmd.examples.beam_search import beam_search
from spmd.parallel import decoder, next_token_loss
from spmd.parallel.decoder import AXES, DecoderConfig, decoder_mesh, init_decoder
from spmd.parallel.generate import decode_step, empty_cache, generate
from spmd.parallel.transformer import causal_attention, label_cross_entropy, normalize
from tests.checks.documented import check_traffic, communicated, rows, traffic
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close, by_rank_0
from tests.checks.whole import whole

CONFIG = DecoderConfig(vocabulary=8, features=8, heads=4, layers=2, hidden=8)
EXAMPLES, TOKENS = 8, 8

#: For each number of ranks, the sizes of axes, and the microbatches of each stage. Eight have every axis.
MESHES = {
    1: [({}, 2)],
    2: [],
    4: [({"stages": 2, "tokens": 2}, 1)],
    8: [({"data": 2, "stages": 2, "feats": 2}, 2), ({"shards": 2, "tokens": 2, "feats": 2}, 1), ({"shards": 8}, 1)],
}
WITH_EXPERTS = {
    1: [({}, 1)],
    2: [({"experts": 2}, 1)],
    4: [({"experts": 2, "stages": 2}, 2)],
    8: [({"shards": 2, "experts": 2, "tokens": 2}, 1), ({"experts": 4, "data": 2}, 1)],
}


#: By the number of ranks: sizes of meshes on which text is generated.
GENERATED = {1: [{}], 2: [{"data": 2}, {"feats": 2}]}


def example(config=CONFIG):
    text = numpy.random.default_rng(0).integers(config.vocabulary, size=(EXAMPLES, TOKENS + 1))
    return init_decoder(md.random.key(1), config), (text[:, :-1], text[:, 1:])


@functools.cache
def of_one_device(config):
    """Loss and gradient of the same parameters as a list of layers, by `transformer.py`."""
    params, batch = example(config)

    def loss(params):
        layers = [md.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(config.layers)]
        return next_token_loss(config, {**params, "layers": layers}, *batch)

    return by_rank_0(lambda: md.value_and_grad(loss)(params))


@shows("reference", "derivatives", "modes", "counts")
def check_numbers(line, case, config=None):
    """Loss and gradient are those of one device, compiled and as they are.

    What the report says is what the documentation's table says, and what the mesh counts.
    """
    (sizes, microbatches), config = case, config or CONFIG
    mesh, (params, batch) = decoder_mesh(line.backend, **sizes), example(config)
    f = md.value_and_grad(decoder.decoder_loss(mesh, config, microbatches))
    expected = mixture_of_one_device() if config is MIXTURE else of_one_device(config)
    if config not in (CONFIG, MIXTURE) or (config.experts and mesh.shape["stages"] > 1):
        table = None  # it is that of untied embeddings; through stages, the balancing loss moves with its example
    else:
        table = documented(mesh, config, microbatches)
    actual = check_traffic(f, mesh, table, params, batch)
    assert_trees_close(actual, expected, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- generated text

PROMPTS = [[3, 1, 4, 1, 5, 2, 6], [6, 5], [3, 5, 0], [7]]


@functools.cache
def generated(context):
    """Tokens that follow each of the prompts, drawn for each alone on one rank."""
    config, key = dataclasses.replace(CONFIG, kv_heads=2), md.random.key(2)
    params = init_decoder(md.random.key(1), config)
    drawn = {"temperature": 0.8, "top_k": 6, "top_p": 0.9}
    keys = md.random.split(md.random.clone(key), len(PROMPTS))
    alone = [generate(config, params, p, 8, context, k, **drawn) for p, k in zip(PROMPTS, keys)]
    return config, params, key, drawn, numpy.array(alone)


@shows("reference", "counts", "memory")
def check_generated(line, sizes, context):
    """Prompts of different lengths in one call, with a cache that is split, are continued as each alone."""
    mesh, (config, params, key, drawn, alone) = decoder_mesh(line.backend, **sizes), generated(context)
    numpy.testing.assert_array_equal(generate(config, params, PROMPTS, 8, context, key, mesh=mesh, **drawn), alone)
    tokens = numpy.zeros((4, 3), int)
    _, cache = decode_step(config, mesh)(params, empty_cache(config, 4, context), 0, tokens)
    held, feats = 2 * 4 * context * 2 * 2, mesh.shape["feats"]
    for x in cache:
        assert x.shape == (2, 4, context, 2, 2)
        assert numpy.size(x.local if mesh.backend == "mpi" else x.local[0]) == held // (mesh.shape["data"] * feats)
    counts = spmd.communication(decode_step(config, mesh))(params, cache, 3, tokens[:, 0]).counts
    assert counts == ({"psum": 1 + 2 * config.layers} if feats > 1 else {})  # the embedding, and the halves of layers
    best, scores = beam_search(config, params, PROMPTS[0], 3, 8, 4, mesh)
    one, expected = beam_search(config, params, PROMPTS[0], 3, 8, 4)
    numpy.testing.assert_array_equal(best, one)
    numpy.testing.assert_allclose(scores, expected, rtol=1e-10)


# ---------------------------------------------------------------- communication


def documented(mesh, config, microbatches):
    """Return (count, bytes) of each collective of loss and gradient, from the table of the module's docstring."""
    d, s, e, g, t, f = (mesh.shape[axis] for axis in AXES)
    n, heads = EXAMPLES * TOKENS // (d * s * e * g * t), 2 * config.features
    names = {**dict(zip("dsegtf", (d, s, e, g, t, f))), "F": config.features, "K": config.features // f, "n": n}
    names |= {"M": microbatches, "m": n // microbatches, "L": config.layers, "leaves": 10 if config.experts else 9}
    names["R"] = config.layers // g * (microbatches * g + g - 1)
    names["C"] = names["m"]
    if config.capacity_factor is not None:
        names["C"] = math.ceil(config.capacity_factor * config.chosen * names["m"] / config.experts)
    names |= {"E": config.experts, "B": EXAMPLES // (d * s * e * g)}
    local = 3 * config.features * config.hidden // f * max(1, config.experts // e)
    names["layer"] = 4 * config.features**2 // f + heads + local + config.features * config.experts
    names |= {"own": local, "ends": 2 * config.vocabulary * config.features // f + config.features}
    actual = {}
    for number in (1, 2) if config.experts else (1,):  # the second table replaces lines of the first
        table = [[cell.replace("…", ",".join(AXES[1:4])) for cell in cells] for cells in rows(decoder, number)]
        actual |= traffic((c for c in table if math.prod(mesh.shape[axis] for axis in c[2].split(",")) > 1), names)
    return actual


# ---------------------------------------------------------------- experts


MIXTURE = DecoderConfig(vocabulary=8, features=8, heads=2, layers=2, hidden=8, experts=4)


def mixture_by_hand(config, params, x):
    """A layer of experts for one example, [tokens, features], token by token; and its balancing loss."""
    probabilities = softmax(x @ params["router"])
    result = []
    for token, row in zip(x, probabilities):
        best = numpy.argsort(-md.stop_gradient(row))[: config.chosen].tolist()
        total = sum(row[i] for i in best)
        up, gate, down = (params["experts"][name] for name in ("up", "gate", "down"))
        result.append(sum(row[i] / total * ((silu(token @ gate[i]) * (token @ up[i])) @ down[i]) for i in best))
    first = numpy.argmax(md.stop_gradient(probabilities), axis=-1)
    busy = numpy.bincount(numpy.asarray(first), minlength=config.experts) / len(x)
    balance = config.balance * config.experts * (busy * probabilities.mean(axis=0)).sum()
    return md.numpy.stack(result), balance


@functools.cache
def mixture_of_one_device():
    """Loss and gradient of a decoder with experts, example by example, layer by layer."""
    params, batch = example(MIXTURE)

    def loss(params):
        total = 0.0
        for tokens, labels in zip(*batch):
            x = params["embedding"][tokens]
            for i in range(MIXTURE.layers):
                layer = md.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
                normed = normalize(MIXTURE, layer["attention_norm"], x)
                x = x + causal_attention(layer["attention"], normed[None])[0]
                result, balance = mixture_by_hand(MIXTURE, layer["mlp"], normalize(MIXTURE, layer["mlp_norm"], x))
                x, total = x + result, total + balance
            logits = normalize(MIXTURE, params["norm"], x) @ params["head"]
            total = total + label_cross_entropy(logits, labels).mean()
        return total / EXAMPLES

    return by_rank_0(lambda: md.value_and_grad(loss)(params))


@shows("reference", "counts")
def check_capacity(line):
    """With a capacity factor, less is sent, as documented; tokens are dropped as on ranks with the same tokens."""
    limited, params_and_batch = dataclasses.replace(MIXTURE, capacity_factor=1.0), example(MIXTURE)
    meshes = decoder_mesh(line.backend, experts=2), decoder_mesh(line.backend, data=2)
    losses = [decoder.decoder_loss(mesh, limited)(*params_and_batch) for mesh in meshes]
    numpy.testing.assert_allclose(*losses, rtol=1e-12)
    whole_loss = decoder.decoder_loss(meshes[0], MIXTURE)(*params_and_batch)
    assert abs(losses[0] - whole_loss) > 1e-6
    enough = decoder.decoder_loss(meshes[0], dataclasses.replace(MIXTURE, capacity_factor=2.0))(*params_and_batch)
    numpy.testing.assert_allclose(enough, whole_loss, rtol=1e-12)
    report = spmd.communication(md.value_and_grad(decoder.decoder_loss(meshes[0], limited)))(*params_and_batch)
    assert communicated(report) == documented(meshes[0], limited, 1)
    one, (params, _) = decoder_mesh(backend="simulated"), params_and_batch
    logits, _ = decode_step(limited, one)(params, empty_cache(limited, 1, 8), 0, numpy.array([PROMPTS[0]]))
    expected, _ = decode_step(MIXTURE, one)(params, empty_cache(MIXTURE, 1, 8), 0, numpy.array([PROMPTS[0]]))
    numpy.testing.assert_array_equal(whole(logits), whole(expected))  # a text is generated from all of its tokens


# ---------------------------------------------------------------- the example

#: A small network, as options of `gpt`.
OPTIONS = {"features": 8, "heads": 4, "layers": 2, "hidden": 8, "batch": 8, "context": 8, "every": 4}
SMALL = [f"--{name}={value}" for name, value in OPTIONS.items()]
