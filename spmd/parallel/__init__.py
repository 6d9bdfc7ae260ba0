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
transformer, causal_attention, vocabulary  nothing: a decoder, its tokens and integer labels
decoder, decoder_params, generate          all of a transformer, along six axes at once; text from it, with a KV cache
megatron, megatron_sequence                the weights of a transformer; between half layers also the tokens
megatron_3d                                a step along data, stages and features, in 16 bits, recomputing as Megatron
attention, sequence                        nothing, or chunks of keys; a sequence, over a ring or by heads
summa, cannon, tensor_2d                   both dimensions of matrices, on a square grid of ranks, or several
tensor_3d                                  rows, columns and terms of a product, on a cube of ranks
recurrence                                 a sequence, whose states ranks combine
schedule, schedules, slots                 stages of a pipeline: GPipe, 1F1B, zero bubble, as data
scheduled, scheduled_network               the same, run by such a schedule
weight_versions                            pipelines without a flush: PipeDream, 2BW
zero, buckets                              optimizer states, gradients, parameters: ZeRO's stages 1, 2 and 3
expert, gates, assigned                    experts, each of which gets the tokens that a gate chooses for it
convolution                                the space of images, whose edges neighbors exchange
dlrm                                       embedding tables: by tables, columns or rows
parameter_server, asynchronous             parameters on one rank; in simulated time without waiting for all workers
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

from spmd.parallel.assigned import assigned_experts
from spmd.parallel.asynchronous import Training, Update, run_parameter_server, simulate_parameter_server
from spmd.parallel.attention import attention, chunked_attention
from spmd.parallel.cannon import cannon, cannon_nt, cannon_tn
from spmd.parallel.convolution import conv
from spmd.parallel.data import data_parallel
from spmd.parallel.decoder import decoder_loss
from spmd.parallel.decoder_params import DecoderConfig, decoder_mesh, decoder_specs, init_decoder
from spmd.parallel.dlrm import dlrm, dlrm_loss, init_dlrm
from spmd.parallel.expert import feed_forward, mixture_of_experts
from spmd.parallel.fully_sharded import fully_sharded, gathered, gathering, gathering_again
from spmd.parallel.fully_sharded_tensor import fully_sharded_tensor_parallel
from spmd.parallel.gates import expert_capacity, gate_weights, load_balancing_loss, routed, router_z_loss, top_experts
from spmd.parallel.generate import beam_search, decode_step, empty_cache, generate
from spmd.parallel.matmul import (
    matmul_all_gather,
    matmul_all_gather_bidirectional,
    matmul_all_gather_overlapped,
    matmul_psum_scatter,
    matmul_psum_scatter_bidirectional,
    matmul_psum_scatter_overlapped,
)
from spmd.parallel.megatron import tensor_parallel_options, tensor_parallel_transformer, transformer_specs
from spmd.parallel.megatron_sequence import sequence_parallel_options, sequence_parallel_transformer
from spmd.parallel.network import cross_entropy, dense, init_params, loss, predict, squared_error
from spmd.parallel.offload import offload
from spmd.parallel.parameter_server import server_step
from spmd.parallel.pipeline import pipeline, pipeline_parallel, stacked_layers, unstacked_layers
from spmd.parallel.recurrence import prefix_scan
from spmd.parallel.schedule import Schedule, Step
from spmd.parallel.scheduled import scheduled, scheduled_training
from spmd.parallel.scheduled_network import blocked_layers, scheduled_value_and_grad, unblocked_layers
from spmd.parallel.schedules import gpipe, interleaved, one_f_one_b, scheduled_orders, zero_bubble
from spmd.parallel.sequence import attention_by_heads, ring_attention, zigzag
from spmd.parallel.summa import summa, summa_nt, summa_tn
from spmd.parallel.tensor import column_parallel, row_parallel, row_parallel_scattered, tensor_parallel
from spmd.parallel.tensor_2d import tensor_parallel_2d
from spmd.parallel.tensor_3d import product_3d, tensor_parallel_3d
from spmd.parallel.transformer import Config, init_transformer, next_token_loss, transformer
from spmd.parallel.vocabulary import embed, label_cross_entropy
from spmd.parallel.weight_versions import double_buffered_versions, pipedream_versions, train_with_versions
from spmd.parallel.zero import zero

__all__ = [
    "Config", "DecoderConfig", "Schedule", "Step", "Training", "Update", "assigned_experts", "attention",
    "attention_by_heads", "beam_search", "blocked_layers", "cannon", "cannon_nt", "cannon_tn", "chunked_attention",
    "column_parallel", "conv", "cross_entropy", "data_parallel", "decode_step", "decoder_loss", "decoder_mesh",
    "decoder_specs", "dense", "dlrm", "dlrm_loss", "double_buffered_versions", "embed", "empty_cache",
    "expert_capacity", "feed_forward", "fully_sharded", "fully_sharded_tensor_parallel", "gate_weights", "gathered",
    "gathering", "gathering_again", "generate", "gpipe", "init_decoder", "init_dlrm", "init_params", "init_transformer",
    "interleaved", "label_cross_entropy", "load_balancing_loss", "loss", "matmul_all_gather",
    "matmul_all_gather_bidirectional", "matmul_all_gather_overlapped", "matmul_psum_scatter",
    "matmul_psum_scatter_bidirectional", "matmul_psum_scatter_overlapped", "mixture_of_experts", "next_token_loss",
    "offload", "one_f_one_b", "pipedream_versions", "pipeline", "pipeline_parallel", "predict", "prefix_scan",
    "product_3d", "ring_attention", "routed", "router_z_loss", "row_parallel", "row_parallel_scattered",
    "run_parameter_server", "scheduled", "scheduled_orders", "scheduled_training", "scheduled_value_and_grad",
    "sequence_parallel_options", "sequence_parallel_transformer", "server_step", "simulate_parameter_server",
    "squared_error", "stacked_layers", "summa", "summa_nt", "summa_tn", "tensor_parallel", "tensor_parallel_2d",
    "tensor_parallel_3d", "tensor_parallel_options", "tensor_parallel_transformer", "top_experts",
    "train_with_versions", "transformer", "transformer_specs", "unblocked_layers", "unstacked_layers", "zero",
    "zero_bubble", "zigzag",
]  # fmt: skip
