"""Levels of links in a walk of a published training plan; `machines.md` shows what runs side by side."""

from spmd.examples.fitted_constants import FITTED
from spmd.examples.published import LLAMA_STYLE, TrainingPlan
from spmd.examples.scoreboard import predict
from spmd.machines import H100


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
