"""When resources of a walk are busy, which communication is exposed, and which kernels run as one."""

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd.examples.fitted_constants import FITTED
from spmd.examples.published import LLAMA_STYLE, TrainingPlan
from spmd.examples.scoreboard import predict
from spmd.machines import H100
from spmd.prices.tape_cost import COMPUTE, Category, OperationCosts
from spmd.prices.walk import TapeRun, Walk

FIRST, SECOND = (Category(name, "psum", ("i",), None) for name in ("first", "second"))


def test_collectives_that_overlap_are_not_exposed_twice():
    run = TapeRun(Walk(OperationCosts()))
    run.free[COMPUTE] = 1.0
    run.sent = [(0.0, 0.5, FIRST), (0.0, 2.0, FIRST), (1.5, 4.0, SECOND)]
    run.wait(3.0)
    assert run.free[COMPUTE] == 3.0
    assert {key.kind: entry.exposed for key, entry in run.cost.entries.items()} == {"first": 1.0, "second": 1.0}


def test_a_collective_that_does_not_overlap_begins_after_computation():
    run = TapeRun(Walk(OperationCosts()))
    run.free[COMPUTE] = 2.0
    assert run.occupy("link", 1.0, ready=0.5) == (0.5, 1.5)
    assert run.occupy("link", 1.0, ready=0.5, blocks=True) == (2.0, 3.0)
    assert run.occupy("link", 1.0, ready=0.5) == (3.0, 4.0)


IDEAL = H100.replace(launch=0.0, issue=0.0)


def seconds_of_products(f, *shapes):
    """Return the predicted seconds of products on a machine whose small products are far from the peak."""
    types = [md.ShapedArray(shape, "float16") for shape in shapes]
    return spmd.predict(f, IDEAL)(*types).kinds["matrix products"].seconds


def test_products_of_blocks_by_one_matrix_run_side_by_side():
    """They take as long as one of all rows; not if each waits for another, or if their matrices differ."""
    block, weights = (512, 8192), (8192, 8192)
    side = seconds_of_products(lambda x, y, w: (x @ w, y @ w), block, block, weights)
    one = seconds_of_products(lambda x, w: x @ w, (1024, 8192), weights)
    each = seconds_of_products(lambda x, w: x @ w, block, weights)
    waiting = seconds_of_products(lambda x, w: x @ w @ w, block, weights)
    other = seconds_of_products(lambda x, y, v, w: (x @ v, y @ w), block, block, weights, weights)
    assert np.isclose(side, one) and one < 1.9 * each
    assert np.isclose(waiting, 2 * each) and np.isclose(other, 2 * each)


def test_an_optimizer_that_is_not_fused_moves_each_operand_again():
    """And nothing else of a step takes longer."""
    optimizer = md.optim.adam(1e-3)
    params = md.ShapedArray((4096, 4096), "float32")

    def step(params, state, x):
        loss, gradient = md.value_and_grad(lambda w: np.sum(np.tanh(x @ w) ** 2))(params)
        updates, state = optimizer.update(gradient, state, params)
        return loss, md.optim.apply_updates(params, updates), state

    args = params, md.eval_shape(optimizer.init, params), params
    fused, unfused = (spmd.predict(step, IDEAL, fused_optimizer=fused)(*args).kinds for fused in (None, False))
    assert unfused["optimizer"].seconds > 2.5 * fused["optimizer"].seconds > 0
    assert all(np.isclose(fused[kind].seconds, unfused[kind].seconds) for kind in fused if kind != "optimizer")


def test_gradients_along_two_axes_are_priced_in_levels():
    """Shards are gathered in a node, and sums of shards between nodes carry a part."""
    plan = TrainingPlan(256, 4, 2, 256, 64, 1, 8, 1, 64, 1, recompute=None, sharded=True, style=LLAMA_STYLE)
    pods = plan._replace(pods=4, batch=256)
    kinds = predict(pods, FITTED).kinds
    assert kinds["all_gather along data"].bytes == predict(plan, FITTED).kinds["all_gather along data"].bytes
    one = predict(plan._replace(data=32, batch=256, sharded=False), FITTED).kinds["psum along data"]
    assert 7 < one.bytes / kinds["psum along pod"].bytes < 9
    placed = H100.on({"pod": 4, "data": 8}, nearest=("data", "pod"))
    assert [(link.name, n) for link, n in placed.levels(("pod", "data"))] == [("NVLink", 8), ("InfiniBand", 4)]
    assert [link.name for link, _ in placed.levels(("pod",))] == ["InfiniBand"]
