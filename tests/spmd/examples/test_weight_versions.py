"""Versions of the weights in pipelines without a flush, and training with them."""

import pytest

from spmd.examples import weight_versions
from spmd.pipeline.library import gpipe, one_f_one_b


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [5, 13])
def test_the_table_of_the_documentation(stages, microbatches):
    versions = weight_versions.pipedream_versions(one_f_one_b(stages, microbatches))
    expected = [[max(0, m - (stages - 1 - i)) for m in range(microbatches)] for i in range(stages)]
    assert versions == expected
    schedule = one_f_one_b(stages, microbatches)
    assert schedule.stashed == [min(microbatches, stages - i) for i in range(stages)]  # a version for each, at most
    assert weight_versions.pipedream_versions(gpipe(stages, microbatches)) == [[0] * microbatches] * stages
    vertical = weight_versions.pipedream_versions(schedule, vertical=True)
    assert vertical == [expected[0]] * stages
    double = weight_versions.double_buffered_versions(stages, microbatches, group=stages)
    for rule, group, most in ((versions, 1, stages), (vertical, 1, stages), (double, stages, 2)):
        count, read, written = weight_versions.version_slots(schedule, rule, group)
        assert count == most if microbatches > 2 * stages else count <= most
        for stage, row in enumerate(schedule.table):  # every step finds the version that it should see
            slots, updates = [0] * count, 0
            for step, seen, result in zip(row, read[stage], written[stage]):
                assert step is None or slots[seen] == rule[stage][step.microbatch]
                if result >= 0:
                    updates += 1
                    slots[result] = updates
            assert updates == microbatches // group
    assert double == [[max(0, m // stages - 1) for m in range(microbatches)]] * stages


def test_a_stale_gradient_by_hand():
    """Two stages, rate 1: the first stage's second gradient is of its weights before the first update."""
    loss = lambda params, x: params[0] * params[1] * x  # noqa: E731
    versions = weight_versions.pipedream_versions(one_f_one_b(2, 2))
    assert versions == [[0, 0], [0, 1]]
    params, losses = weight_versions.train_with_versions(loss, [2.0, 3.0], [1.0, 1.0], versions, rate=1.0)
    # First gradient (3, 2): weights (-1, 1). Second, seen at (2, 1): (1, 2), weights (-2, -1).
    assert [float(p) for p in params] == [-2.0, -1.0] and [float(x) for x in losses] == [6.0, 2.0]
