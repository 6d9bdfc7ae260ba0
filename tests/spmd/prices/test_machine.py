"""Machines: the time of an operation, and of communication over links of several levels."""

import pytest

from spmd.machines import A100, H100, TPU_V5E, TPU_V5P, Link, link
from spmd.prices.work import Work
from tests.checks.samples import each


def test_an_operation_that_fits_into_a_cache_has_its_bandwidth():
    machine = A100.replace(caches=((1000, 4e12), (8000, 2e12)), bandwidth=1e12, launch=0.0)
    seconds = {nbytes: machine.seconds(Work(0, nbytes), "float32") for nbytes in (1000, 1001, 8000, 8001)}
    assert seconds == {1000: 1000 / 4e12, 1001: 1001 / 2e12, 8000: 8000 / 2e12, 8001: 8001 / 1e12}


@each("machine", [A100, H100, TPU_V5E, TPU_V5P])
def test_each_constant_has_a_source(machine):
    assert {*machine.sources} == {"flops", "elementwise", "bandwidth", "memory", "launch", "efficiency"}
    assert all(isinstance(each, Link) and each.source for each in machine.links)


def test_axes_use_the_links_on_which_they_are_placed():
    shape = {"stages": 4, "data": 8, "feats": 4}
    inner = A100.on(shape)
    assert [(each.name, n) for each, n in inner.levels(("feats",))] == [("NVLink", 4)]
    assert [(each.name, n) for each, n in inner.levels(("data",))] == [("NVLink", 2), ("InfiniBand", 4)]
    assert [(each.name, n) for each, n in inner.levels(("stages",))] == [("InfiniBand", 4)]
    assert [n for _, n in inner.levels(("stages", "data"))] == [2, 16]
    outer = A100.on(shape, nearest=("data", "stages", "feats"))
    assert [(each.name, n) for each, n in outer.levels(("data",))] == [("NVLink", 8)]
    assert outer.seconds("psum", 4, 10**8, ("feats",)) > inner.seconds("psum", 4, 10**8, ("feats",))


def test_over_two_levels_slow_links_carry_a_part():
    """Eight in a node: each adapter carries an eighth of the sum."""
    placed = A100.on({"i": 64})
    flat = A100.links[1].model.seconds("psum", 64, 10**9)
    assert flat / 8 < placed.seconds("psum", 64, 10**9, ("i",)) < flat / 2


def test_over_three_levels_each_carries_a_part_of_the_one_before():
    links = [link(f"level {n}", n, 1e-6 * n, 1e11 / n) for n in (2, 4, 8)]
    fast, middle, slow = (link.model for link in links)
    for name in ("psum", "psum_scatter"):
        first = fast.seconds("psum_scatter", 2, 800) + (name == "psum") * fast.seconds("all_gather", 2, 400)
        expected = first + middle.seconds(name, 2, 400) + slow.seconds(name, 2, 200)
        placed = A100.replace(links=tuple(links)).on({"i": 8})
        assert placed.seconds(name, 8, 800, ("i",)) == pytest.approx(expected)


def test_blocks_are_gathered_over_slow_links_first():
    fast, slow = (link.model for link in A100.links)
    expected = slow.seconds("all_gather", 8, 10**6) + fast.seconds("all_gather", 8, 8 * 10**6)
    assert A100.on({"i": 64}).seconds("all_gather", 64, 10**6, ("i",)) == pytest.approx(expected)


def test_more_ranks_of_a_sum_take_longer():
    times = [A100.on({"i": n}).seconds("psum", n, 10**7, ("i",)) for n in (2, 4, 8, 16, 64, 512)]
    assert times == sorted(times)
