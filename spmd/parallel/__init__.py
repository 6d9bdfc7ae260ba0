"""Parallel training: what each strategy splits, and what it communicates.

Each file has the building blocks of one parallelism, for use in bodies of `shard_map`, and the loss of one network
built from them, as a function of (params, (inputs, targets)). The network is that of `network.py`, with the squared
error. The matrix products of such layers, with one collective or step by step, are in `matmul.py`. The gradient of each
loss communicates:

=============================  =========  ============  ======  =============  ===========================
loss                           direction  collective    axes    count          numbers per rank
=============================  =========  ============  ======  =============  ===========================
data_parallel                  forward    psum          batch   1              1
data_parallel                  backward   psum          batch   1              params

fully_sharded                  forward    all_gather    batch   2*L            params/p
fully_sharded                  forward    psum          batch   1              1
fully_sharded                  backward   all_gather    batch   L-1            (weights-first)/p
fully_sharded                  backward   psum_scatter  batch   2*L            params

tensor_parallel                forward    psum_scatter  feats   L              N*outputs
tensor_parallel                forward    psum          feats   1              N
tensor_parallel                backward   all_gather    feats   L              N*outputs/p

fully_sharded_tensor_parallel  forward    all_gather    batch   2*L            params/(p*q)
fully_sharded_tensor_parallel  forward    psum_scatter  feats   L              N/p*outputs
fully_sharded_tensor_parallel  forward    psum          feats   1              N/p
fully_sharded_tensor_parallel  forward    psum          batch   1              1
fully_sharded_tensor_parallel  backward   all_gather    batch   L-1            (weights-first)/(p*q)
fully_sharded_tensor_parallel  backward   all_gather    feats   L              N/p*outputs/q
fully_sharded_tensor_parallel  backward   psum_scatter  batch   2*L            params/q

pipeline_parallel              forward    ppermute      stages  M+p-2+2*(p-1)  (M+p-2)*N/M*F + 2*(p-1)*N/p*F
pipeline_parallel              forward    psum          stages  1              1
pipeline_parallel              backward   ppermute      stages  M+p-2+2*(p-1)  (M+p-2)*N/M*F + 2*(p-1)*N/p*F
pipeline_parallel              backward   psum          stages  1              ends
=============================  =========  ============  ======  =============  ===========================

The last column counts all array elements that one rank passes to these collectives. There are L layers, N examples, p
ranks along the mesh's first axis and q along its second. params is the number of all parameters, weights the number
without biases, first that of the first layer's weights, and ends that of the first and last layers' parameters. outputs
is the sum of the layers' output sizes. A pipeline has M microbatches and F features. (Axes of size 1 communicate
nothing.)

Where these counts come from:

- The gradient of a value that is the same on all ranks, and used on different blocks, is the sum over the ranks: the
  parameters of `data_parallel`, and of the ends of a pipeline. One all-reduce sums all of them.
- A gather and a `psum_scatter` are each other's transposes; the transpose of a `ppermute` sends the other way.
- In the backward pass, `fully_sharded` gathers again only what it needs: not the biases, and not the first layer's
  weights.

More files have other networks and layers, and document what these communicate:

=========================================  ==========================================================================
files                                      what is split, or sent
=========================================  ==========================================================================
transformer                                nothing: a decoder, its tokens and integer labels
decoder, generate                          all of a transformer, along six axes at once; text from it, with a KV cache
tensor                                     features; the weights of a transformer; between half layers also the tokens
attention                                  nothing, or chunks of keys; a sequence, over a ring or by heads
matmul                                     products of matrices along an axis, with one collective or step by step
pipeline, spmd.pipeline                    layers, as stages: one after the other; and in the order of a schedule
zero                                       optimizer states, gradients, parameters: ZeRO's stages 1, 2 and 3
expert                                     experts, each of which gets the tokens that a gate chooses for it
convolution                                the space of images, whose edges neighbors exchange
=========================================  ==========================================================================

>>> import minidiff as md, numpy as np, spmd
>>> mesh = spmd.make_mesh((4,), ('batch',), backend='simulated')
>>> params = init_params(np.random.default_rng(0), (8, 4, 4))
>>> batch = np.ones((16, 8)), np.zeros((16, 4))
>>> value, gradients = md.value_and_grad(fully_sharded(mesh))(params, batch)
>>> [[g.spec for g in layer] for layer in gradients]
[[P('batch'), P('batch')], [P('batch'), P('batch')]]
>>> bool(np.isclose(value, loss(params, batch)))
True
"""

import typing as _typing

from minidiff.errors.other_libraries import module_getattr as _module_getattr
from spmd.parallel.attention import attention, attention_by_heads, chunked_attention, ring_attention, zigzag
from spmd.parallel.convolution import conv
from spmd.parallel.data import data_parallel, fully_sharded
from spmd.parallel.decoder import DecoderConfig, decoder_loss, decoder_mesh, decoder_specs, init_decoder
from spmd.parallel.expert import expert_capacity, feed_forward, load_balancing_loss, mixture_of_experts, router_z_loss
from spmd.parallel.generate import decode_step, empty_cache, generate
from spmd.parallel.matmul import OLD_NAMES as _OLD_NAMES
from spmd.parallel.matmul import matmul_all_gather, matmul_psum_scatter
from spmd.parallel.network import cross_entropy, init_params, loss, predict, squared_error
from spmd.parallel.pipeline import pipeline, pipeline_parallel, stacked_layers, unstacked_layers
from spmd.parallel.tensor import (
    column_parallel,
    fully_sharded_tensor_parallel,
    pad_vocabulary,
    row_parallel,
    tensor_parallel,
    tensor_parallel_options,
    tensor_parallel_transformer,
    transformer_specs,
)
from spmd.parallel.transformer import Config, embed, init_transformer, label_cross_entropy, next_token_loss, transformer
from spmd.parallel.zero import zero

__all__ = [
    "Config", "DecoderConfig", "attention", "attention_by_heads", "chunked_attention", "column_parallel", "conv",
    "cross_entropy", "data_parallel", "decode_step", "decoder_loss", "decoder_mesh", "decoder_specs", "embed",
    "empty_cache", "expert_capacity", "feed_forward", "fully_sharded", "fully_sharded_tensor_parallel", "generate",
    "init_decoder", "init_params", "init_transformer", "label_cross_entropy", "load_balancing_loss", "loss",
    "matmul_all_gather", "matmul_psum_scatter", "mixture_of_experts", "next_token_loss", "pad_vocabulary",
    "pipeline", "pipeline_parallel", "predict", "ring_attention", "router_z_loss", "row_parallel", "squared_error",
    "stacked_layers", "tensor_parallel", "tensor_parallel_options", "tensor_parallel_transformer", "transformer",
    "transformer_specs", "unstacked_layers", "zero", "zigzag",
]  # fmt: skip

#: Modules of studies -> the names that this module had before they moved to `spmd.examples`.
_STUDIES = {
    "assigned_experts": "assigned_experts",
    "beam_search": "beam_search",
    "cannon": "cannon cannon_nt cannon_tn summa",
    "dlrm": "dlrm dlrm_loss init_dlrm",
    "offload": "offload",
    "parameter_server": "Training Update run_parameter_server simulate_parameter_server server_step",
    "recurrence": "prefix_scan",
    "scheduled_network": "blocked_layers unblocked_layers scheduled_value_and_grad",
    "tensor_2d": "tensor_parallel_2d",
    "tensor_3d": "tensor_parallel_3d product_3d",
    "weight_versions": "pipedream_versions double_buffered_versions train_with_versions scheduled_training",
}
#: Modules of this package that moved.
_MODULES = {
    "assigned": "spmd.examples.assigned_experts",
    "asynchronous": "spmd.examples.parameter_server",
    "plan": "spmd.report.plan",
    "schedule": "spmd.pipeline.tables",
    "schedules": "spmd.pipeline.library",
    "slots": "spmd.pipeline.tables",
}
_SAME_NAMES = "megatron_3d parameter_server recurrence scheduled_network tensor_2d tensor_3d weight_versions"
_MODULES |= {name: f"spmd.examples.{name}" for name in _SAME_NAMES.split()}
#: Functions that are others with an option now.
_OPTIONS = {
    **_OLD_NAMES,
    "row_parallel_scattered": "spmd.parallel.row_parallel(scattered=True)",
    "sequence_parallel_options": "spmd.parallel.tensor_parallel_options(sequence_parallel=True)",
    "sequence_parallel_transformer": "spmd.parallel.tensor_parallel_transformer(sequence_parallel=True)",
    "summa_nt": "spmd.examples.cannon.summa(transposed='b')",
    "summa_tn": "spmd.examples.cannon.summa(transposed='a')",
}
#: Modules outside the examples -> the names that this module had before.
_ELSEWHERE = {
    "parallel.data": "gathered gathering gathering_again",
    "parallel.expert": "gate_weights routed top_experts",
    "parallel.network": "dense",
    "pipeline": "Schedule Step gpipe interleaved one_f_one_b scheduled scheduled_orders zero_bubble",
}
_HOMES = {**{f"examples.{study}": names for study, names in _STUDIES.items()}, **_ELSEWHERE}
_MOVED = {name: f"spmd.{module}.{name}" for module, names in _HOMES.items() for name in names.split()}

if not _typing.TYPE_CHECKING:  # a type checker that saw __getattr__ would accept any name
    __getattr__ = _module_getattr(__name__, moved={**_MODULES, **_MOVED, **_OPTIONS})
