"""The topologies of the course: routes, and the times of messages that share links."""

from pathlib import Path

import pytest

from collectives.cost import ALGORITHMS
from notebooks.topologies import Topology
from spmd.machines import link

ALPHA, BETA, BYTES = 4e-6, 1 / 300e9, 2**20
WIRE = link("wire", 64, latency=ALPHA, bandwidth=1 / BETA)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_a_ring_on_a_ring_takes_what_its_formula_says(n):
    nbytes = n * 2**16
    expected = ALGORITHMS["ring_all_reduce"](n, nbytes).seconds(ALPHA, BETA)
    assert Topology.ring(n, WIRE).all_reduce(nbytes) == pytest.approx(expected)


def test_halving_shares_the_root_of_a_tree_but_not_of_a_fat_tree():
    # At distance d = 4, 2, 1, d messages of d/8 of the bytes pass the switch between them; twice, there and back.
    latency = 2 * (6 + 4 + 2) * ALPHA
    shared = latency + 2 * sum(d * d / 8 for d in (4, 2, 1)) * BYTES * BETA
    alone = latency + 2 * sum(d / 8 for d in (4, 2, 1)) * BYTES * BETA
    assert Topology.tree(8, WIRE).all_reduce(BYTES, "halving_doubling_all_reduce") == pytest.approx(shared)
    assert Topology.tree(8, WIRE, fat=True).all_reduce(BYTES, "halving_doubling_all_reduce") == pytest.approx(alone)


def test_a_ring_through_a_torus_takes_two_links_from_row_to_row():
    torus = Topology.torus(4, 4, WIRE)
    assert [len(torus.route(r, (r + 1) % 16)) for r in range(16)] == [1, 1, 1, 2] * 4
    assert torus.all_reduce(BYTES) == pytest.approx(30 * (2 * ALPHA + BYTES / 16 * BETA))
    assert len(torus.route(0, 10)) == 4 and len(Topology.tree(6, WIRE).route(0, 5)) == 6


def test_the_picture_in_the_guide_is_the_topology():
    picture = (Path(__file__).parents[2] / "docs/fat_tree.svg").read_text()
    assert picture == Topology.tree(8, WIRE, fat=True)._repr_svg_()
    assert picture.count("<path") == 14  # one for each link, not one each way
