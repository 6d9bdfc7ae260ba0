"""The `shard_map` tutorial, block by block: here each computes the same thing, and gets what the tutorial prints.

===================================================== ================================================================
block of the tutorial                                 test (in this file, where no other is named)
===================================================== ================================================================
*So, let's see a shard_map*
eight devices; mesh, `matmul_basic`                   test_the_block_matrix_product
`allclose(c, a @ b)`: True                            test_the_block_matrix_product
`visualize_array_sharding(c)`                         test_pictures_of_shardings
the same by automatic partitioning                    test_the_block_matrix_product
blocks of a, b, c, drawn                              test_pictures_of_shardings
*Slow down, start with the basics*
`check_vmap`                                          test_vmap_takes_an_axis_apart_and_stacks
`check_shmap`                                         test_without_collectives_it_is_a_loop_over_blocks
`f1`: an axis of the mesh that is not named           mesh/test_specs.py: blocks as specs say
`f2`: the same, tiled by the caller                   mesh/test_specs.py: blocks as specs say
a constant, three `out_specs`                         mesh/test_specs.py: blocks as specs say
`f3`                                                  test_what_is_printed[psum along one axis of two]
`f4`, `f5`                                            test_what_is_printed[psum along both axes]
(text: any order of names transposes blocks)          mesh/test_specs.py: blocks as specs say
(text: what is closed over is unmapped)               shard_map/test_shard_map.py: closed over, in PROGRAMS
(text: errors of specs)                               messages/shard_map.md, messages/meshes.md
*API specification*
the signature; shapes of blocks                       mesh/test_specs.py: blocks as specs say
*Collectives tutorial*
`f_shmapped`, and its reference                       test_without_collectives_it_is_a_loop_over_blocks
with one collective, and its reference                checks/of_collectives.py
`f1`: psum, printed                                   test_what_is_printed[psum]
`psum_ref`                                            checks/of_collectives.py
`f2`: psum along one axis of two, printed             test_what_is_printed[psum along one axis of two]
`f3`: psum along both, printed                        test_what_is_printed[psum along both axes]
`f4`: all_gather tiled, printed                       test_what_is_printed[all_gather, tiled]
(text: its result is not known to be the same)        messages/shard_map.md
`f5`: all_gather, printed                             test_what_is_printed[all_gather]
`all_gather_ref`                                      checks/of_collectives.py
`f6`: psum_scatter, printed                           test_what_is_printed[psum_scatter]
`psum_scatter_ref`                                    checks/of_collectives.py
psum as psum_scatter, then all_gather                 test_what_is_printed[psum in two halves]
`f7`: ppermute, printed                               test_what_is_printed[ppermute]
`ppermute_ref`                                        checks/of_collectives.py
psum_scatter by ppermutes; `f8`, printed              test_what_is_printed[psum_scatter by steps]
(text: all_gather likewise, the reverse)              test_what_is_printed[all_gather by steps], test_the_reverse
`f9`: all_to_all, printed                             test_what_is_printed[all_to_all]
`all_to_all_ref`                                      checks/of_collectives.py
*Matrix multiplication*
all ways; `fori_loop` for long rings; bytes           parallel/test_matmul.py, and checks/ranks.py
*Neural networks*
all kinds of parallelism; where they communicate      parallel/test_network.py; on MPI too: checks/ranks.py, networks
===================================================== ================================================================
"""

import pathlib
import re

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import all_gather, psum, psum_scatter
from spmd import P, distribute, reshard
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import check_values
from tests.programs.tutorial_collectives import EXAMPLES, WRITTEN, psum_scatter_by_steps

XY, ROW = mesh(4, 2, names="xy"), mesh(4)
A, B = np.arange(8.0 * 16).reshape(8, 16), np.arange(16.0 * 4).reshape(16, 4)
SPLIT = distribute(A, XY, P("x", "y")), distribute(B, XY, P("y", None))


def test_the_table_above_names_what_there_is():
    tests = pathlib.Path(__file__).parents[1]
    assert all([*tests.rglob(name)] for name in re.findall(r"[\w/]+\.(?:py|md)", __doc__))
    named = re.findall(r"^.{54}(test_\w+)", __doc__, re.MULTILINE)
    assert len(named) > 15 and {*named} <= {*globals()}
    assert {*re.findall(r"printed\[(.*?)\](?=,|$)", __doc__, re.MULTILINE)} <= {*EXAMPLES}


def block_product(a, b):
    assert (a.shape, b.shape) == ((2, 8), (8, 4))
    return psum(a @ b, "y")


by_blocks = mapped(block_product, XY, (P("x", "y"), P("y", None)), P("x", None))


def test_the_block_matrix_product():
    """By a shard_map; and of whole arrays that are split, which finds what that takes of communication."""
    of_whole = lambda a, b: reshard(a @ b, P("x", None))  # noqa: E731
    for f in (by_blocks, of_whole):
        check_values(f, SPLIT, np.matmul, (A, B))
        assert f(*SPLIT).spec == P("x", None)
        assert spmd.communication(f)(*SPLIT).counts == {"psum": 1}


def test_pictures_of_shardings(golden):
    golden("tutorial_pictures", "\n\n".join(str(spmd.visualize_sharding(x)) for x in (*SPLIT, by_blocks(A, B))))


def test_vmap_takes_an_axis_apart_and_stacks():
    xs = np.arange(12).reshape(4, 3)
    np.testing.assert_array_equal(md.vmap(lambda row: row @ row)(xs), np.stack([row @ row for row in xs]))
    assert md.vmap(lambda x: mnp.zeros((3, 7)) * x[0])(np.ones((8, 5))).shape == (8, 3, 7)


def test_without_collectives_it_is_a_loop_over_blocks():
    for f in (lambda block: np.sin(block) + block[::-1], lambda block: block.T @ block):
        x = np.arange(32.0).reshape(8, 4)
        expected = np.concatenate([f(block) for block in np.split(x, 4)])
        np.testing.assert_array_equal(mapped(f, ROW, P("i"), P("i"))(x), expected)


def test_what_is_printed(golden, capsys):
    """BEFORE and AFTER, each rank's block under its mesh coordinates; and the result, compiled and on a tape, too."""
    printed = {}
    for name, example in EXAMPLES.items():
        y = example.mapped(lambda when, block: print(f"{when}:\n", block))(example.x)
        print("FINAL RESULT:\n", y)
        printed[name] = capsys.readouterr().out
        check_values(example.mapped(), (example.x,), lambda x, y=y: np.asarray(y))
    assert all(printed[name] == printed[other] for name, other in WRITTEN.items())
    shown = [f"{name}\n\n{text}" for name, text in printed.items() if name not in WRITTEN]
    golden("tutorial_collectives", "\n".join(shown))


def test_the_reverse():
    """all_gather is the transpose of psum_scatter; so is the one by steps of the other."""
    x, ct = np.random.default_rng(2).standard_normal((2, 16))
    scatter, by_steps, gather = (
        mapped(lambda block, f=f: f(block, "i"), ROW, P("i"), P("i"))
        for f in (
            lambda block, axis: psum_scatter(block, axis, tiled=True),
            psum_scatter_by_steps,
            lambda block, axis: all_gather(block, axis, tiled=True),
        )
    )
    for f in (scatter, by_steps):
        np.testing.assert_allclose(md.vjp(f, x)[1](ct[:4])[0], gather(ct[:4]))
    assert spmd.communication(lambda ct: md.vjp(scatter, x)[1](ct))(ct[:4]).counts["all_gather"] == 1


@pytest.mark.parametrize(
    "name, rows",
    [("psum", {("psum", 32)}), ("psum in two halves", {("psum_scatter", 32), ("all_gather_invariant", 8)})],
)
def test_a_psum_in_two_halves_hands_over_less(name, rows):
    """A reduce-scatter, and a gather of a quarter: what is handed to them, and together what an all-reduce sends."""
    report = spmd.communication(EXAMPLES[name].mapped())(EXAMPLES[name].x)
    assert {(row.collective, row.bytes) for row in report.rows} == rows
