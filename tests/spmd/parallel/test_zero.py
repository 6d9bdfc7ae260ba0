"""ZeRO's stages on simulated ranks: the whole network's training, communication and memory as documented, buckets."""

import minidiff as md
import spmd
from spmd.parallel import loss, zero
from tests.checks.meshes import mesh
from tests.checks.rewrites import lowered
from tests.checks.samples import each
from tests.programs.zero import EVERYTHING, OPTIMIZERS, STAGES, network, trained


@each("stage, sums", zip(STAGES, ("psum", "psum_scatter", "psum_scatter")))
def test_buckets_hold_as_many_leaves_as_fit(stage, sums):
    params, batch = network()
    largest = max(x.nbytes for x in md.tree.leaves(params))
    for size, count in ((1, 6), (largest, 3), (EVERYTHING, 1)):
        init, step = zero(loss, OPTIMIZERS["adam"], mesh(4, names=("ranks",)), stage, 1, size)
        rows = [row for row in spmd.communication(step)(*init(params), batch).rows if row.bytes > 8]
        assert sum(row.count for row in rows if row.collective == sums) == count
        assert all(row.bytes <= max(size, largest) * row.count for row in rows)


def test_buckets_are_on_their_way_during_the_backward_pass():
    params, batch = network()
    init, step = zero(loss, OPTIMIZERS["adam"], mesh(4, names=("ranks",)), 1, 1, 4000)
    (text,) = lowered(md.jit(step, bucket_bytes=4000), *init(params), batch)  # the step is one shard_map
    lines = [line for line in text.splitlines() if "psum" in line or " @ " in line]
    places = {label: [k for k, x in enumerate(lines) if label in x] for label in ("psum_start", "psum_wait", " @ ")}
    assert len(places["psum_start"]) == 3 and places["psum_start"][0] < places[" @ "][-1] < min(places["psum_wait"])


def test_buckets_are_of_one_dtype():
    (params, batch), on = network(), mesh(2, names=("ranks",))
    params = [(W, b.astype("f4")) for W, b in params]
    for stage in STAGES:
        init, step = zero(loss, OPTIMIZERS["adam"], on, stage)
        _, params, state = trained(step, *init(params), batch, steps=1)
        assert {x.dtype.name for x in md.tree.leaves(params)} == {"float32", "float64"}
        counts = spmd.communication(step)(params, state, batch).counts
        assert counts["psum" if stage == 1 else "psum_scatter"] == (3 if stage == 1 else 2)
