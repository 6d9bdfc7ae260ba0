"""The `shard_map` tutorial, block by block: here each computes the same thing, and gets what the tutorial prints.

===================================================== ================================================================
block of the tutorial                                 test (in this file, where no other is named)
===================================================== ================================================================
*So, let's see a shard_map*
eight devices; mesh, `matmul_basic`                   test_a_block_matrix_product
`allclose(c, a @ b)`: True                            test_a_block_matrix_product
`visualize_array_sharding(c)`                         test_pictures_of_shardings
the same by automatic partitioning                    test_the_same_product_of_whole_arrays
blocks of a, b, c, drawn                              test_pictures_of_shardings
*Slow down, start with the basics*
`check_vmap`                                          test_vmap_takes_an_axis_apart_and_stacks
`check_shmap`                                         test_shard_map_cuts_an_axis_up_and_joins
`f1`: an axis of the mesh that is not named           test_an_axis_that_is_not_named_gives_all_ranks_the_same
`f2`: the same, tiled by the caller                   test_tiling_by_hand_does_the_same
a constant, three `out_specs`                         test_untiling
`f3`                                                  test_results_that_are_summed_over_an_axis[f3]
`f4`, `f5`                                            test_results_that_are_summed_over_an_axis[f4, f5]
(text: any order of names transposes blocks)          test_blocks_transposed_on_their_way_out
(text: what is closed over is unmapped)               test_what_a_body_closes_over_is_unmapped
(text: errors of specs)                               test_shard_map.py: test_errors; test_collectives.py: test_errors
*API specification*
the signature; shapes of blocks                       test_the_signature, test_shapes_of_blocks
*Collectives tutorial*
`f_shmapped`, and its reference                       test_without_collectives_it_is_a_loop_over_blocks
with one collective, and its reference                test_a_collective_is_a_function_of_all_blocks
`f1`: psum, printed                                   test_what_is_printed[psum]
`psum_ref`                                            test_what_collectives_mean[psum]
`f2`: psum along one axis of two, printed             test_what_is_printed[psum along one axis of two]
`f3`: psum along both, printed                        test_what_is_printed[psum along both axes]
`f4`: all_gather tiled, printed                       test_what_is_printed[all_gather, tiled]
(text: its result is not known to be the same)        test_a_gathered_value_is_not_known_to_be_the_same
`f5`: all_gather, printed                             test_what_is_printed[all_gather]
`all_gather_ref`                                      test_what_collectives_mean[all_gather], [all_gather, tiled]
`f6`: psum_scatter, printed                           test_what_is_printed[psum_scatter]
`psum_scatter_ref`                                    test_what_collectives_mean[psum_scatter]
psum as psum_scatter, then all_gather                 test_what_is_printed[psum in two halves]
`f7`: ppermute, printed                               test_what_is_printed[ppermute]
`ppermute_ref`                                        test_what_collectives_mean[ppermute], [ppermute to some]
psum_scatter by ppermutes; `f8`, printed              test_what_is_printed[psum_scatter by steps]
(text: all_gather likewise, the reverse)              test_what_is_printed[all_gather by steps], test_the_reverse
`f9`: all_to_all, printed                             test_what_is_printed[all_to_all]
`all_to_all_ref`                                      test_what_collectives_mean[all_to_all]
(all of them, on MPI ranks)                           mpi/test_shard_map_mpi.py: test_the_tutorials_collectives
*Matrix multiplication*
`matmul_allgather`, `matmul_psumscatter`, all ways    test_values_and_gradients_are_those_of_the_plain_product
(text: `fori_loop` for long rings)                    test_matmul.py: test_a_ring_can_be_rolled_into_a_loop
(their bytes; and all of it on MPI)                   test_matmul.py, and tests/checks/ranks.py
*Neural networks*                                     (all in test_network.py and tests/checks/ranks.py, on MPI too)
`predict`, `loss`, `init`; losses and gradients of:   checks/ranks.py: networks
8-way batch data parallelism                          …[data_parallel]
8-way fully sharded data parallelism (FSDP)           …[fully_sharded]
8-way tensor parallelism (TP)                         …[tensor_parallel]
FSDP + TP                                             …[fully_sharded_tensor_parallel]
SPMD pipeline parallelism (PP)                        …[pipeline_parallel]
`gemm_tp` in a program of whole arrays                test_a_layer_for_programs_that_know_nothing_of_ranks
`spmd_pipeline`                                       test_a_pipeline_is_its_layers_one_after_the_other
(text: where their collectives are)                   test_collectives_with_the_sizes_of_the_tutorial
===================================================== ================================================================
"""

import inspect
import pathlib
import re
from functools import partial

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import all_gather, all_gather_invariant, psum, psum_scatter
from minidiff import VarianceError
from spmd import P, distribute, reshard, shard_map
from tests.checks.samples import each
from tests.programs.tutorial_collectives import EXAMPLES, psum_scatter_by_steps, text_of

make_mesh = partial(spmd.make_mesh, backend="simulated")


def test_the_table_above_names_tests_that_there_are():
    files = re.findall(r"[\w/]+\.py", __doc__)
    tests = pathlib.Path(__file__).parents[1]
    outcome = [path for file in {__file__, *files} for path in tests.rglob(pathlib.Path(file).name)]
    there = "".join(path.read_text() for path in outcome)
    named = re.findall(r"\btest_\w+\b(?!\.py)", __doc__)
    assert len(named) > 30
    assert [name for name in named if f"def {name}(" not in there] == []
    assert set(re.findall(r"(?:printed|mean)\[(.*?)\](?=,|$)", __doc__, re.MULTILINE)) <= set(EXAMPLES)


# ---------------------------------------------------------------- so, let's see a shard_map

XY = make_mesh((4, 2), ("x", "y"))
A = np.arange(8.0 * 16).reshape(8, 16)
B = np.arange(16.0 * 4).reshape(16, 4)


@partial(shard_map, mesh=XY, in_specs=(P("x", "y"), P("y", None)), out_specs=P("x", None))
def block_product(a, b):
    assert (a.shape, b.shape) == ((2, 8), (8, 4))
    c = psum(a @ b, "y")
    assert c.shape == (2, 4)
    return c


def test_a_block_matrix_product():
    for f in (block_product, md.jit(block_product)):
        c = f(A, B)
        assert c.shape == (8, 4) and c.spec == P("x", None)
        np.testing.assert_allclose(np.asarray(c), A @ B)


def test_the_same_product_of_whole_arrays():
    """Arrays say how they are split; what that takes of communication is found, as is how the product is split."""
    a, b = distribute(A, XY, P("x", "y")), distribute(B, XY, P("y", None))

    def product(a, b):
        return reshard(a @ b, P("x", None))

    for f in (product, md.jit(product)):
        c = f(a, b)
        assert c.spec == P("x", None)
        np.testing.assert_allclose(np.asarray(c), A @ B)
    assert spmd.communication(product)(a, b).counts == spmd.communication(block_product)(A, B).counts == {"psum": 1}


def test_pictures_of_shardings():
    """In the order of rows and columns, the ranks that have each block."""
    a, b, c = distribute(A, XY, P("x", "y")), distribute(B, XY, P("y", None)), block_product(A, B)
    assert list(spmd.visualize_sharding(c).ranks.values()) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(spmd.visualize_sharding(a).ranks.values()) == [[k] for k in range(8)]
    assert list(spmd.visualize_sharding(b).ranks.values()) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    cells = [line.strip(" │") for line in str(spmd.visualize_sharding(c)).splitlines() if "rank" in line]
    assert [cell.split("│")[-1].strip() for cell in cells] == ["ranks 0,1", "ranks 2,3", "ranks 4,5", "ranks 6,7"]


# ---------------------------------------------------------------- the basics


def test_vmap_takes_an_axis_apart_and_stacks():
    def f(row):
        return row @ row

    xs = np.arange(12).reshape(4, 3)
    np.testing.assert_array_equal(md.vmap(f, in_axes=(0,), out_axes=0)(xs), np.stack([f(row) for row in xs]))
    assert md.vmap(lambda x: mnp.zeros((3, 7)) * x[0])(np.ones((8, 5))).shape == (8, 3, 7)


def test_shard_map_cuts_an_axis_up_and_joins():
    mesh = make_mesh((4,), ("i",))

    def f(block):
        return block.T @ block

    y = np.arange(32).reshape(8, 4)
    mapped = shard_map(f, mesh, in_specs=P("i"), out_specs=P("i"))(y)
    np.testing.assert_array_equal(mapped, np.concatenate([f(block) for block in np.split(y, mesh.shape["i"])]))
    assert shard_map(lambda x: mnp.zeros((3, 7)) * x[0, 0], mesh, in_specs=P("i"), out_specs=P("i"))(
        np.ones((8, 5))
    ).shape == (12, 7)


IJ = make_mesh((4, 2), ("i", "j"))
TWELVE = np.arange(12 * 12).reshape(12, 12)


@pytest.fixture
def tiled(capsys):
    """Return the result of the tutorial's f1, which prints the shape of a block."""

    @partial(shard_map, mesh=IJ, in_specs=P("i", None), out_specs=P("i", "j"))
    def f1(block):
        print(block.shape)
        return block

    y = f1(TWELVE)
    assert capsys.readouterr().out == "(3, 12)\n"
    return y


def test_an_axis_that_is_not_named_gives_all_ranks_the_same(tiled):
    assert tiled.shape == (12, 24)
    np.testing.assert_array_equal(tiled, np.concatenate([TWELVE, TWELVE], axis=1))


def test_tiling_by_hand_does_the_same(tiled, capsys):
    @partial(shard_map, mesh=IJ, in_specs=P("i", "j"), out_specs=P("i", "j"))
    def f2(block):
        print(block.shape)
        return block

    y = f2(np.tile(TWELVE, (1, IJ.shape["j"])))
    assert capsys.readouterr().out == "(3, 12)\n"
    np.testing.assert_array_equal(y, tiled)
    along_rows = shard_map(lambda x: x, IJ, in_specs=P(("j", "i"), None), out_specs=P("i", "j"))
    np.testing.assert_array_equal(along_rows(np.tile(TWELVE, (2, 1))), tiled)


@pytest.mark.parametrize(
    "spec, reps", [(P("i", "j"), (4, 2)), (P("i", None), (4, 1)), (P(("j", "i")), (8, 1)), (P(None, None), (1, 1))]
)
def test_untiling(spec, reps):
    """Invariant values: one copy for each rank that the spec names, and one along axes that it does not name."""
    x = np.array([[3.0]])
    z = shard_map(lambda: x, mesh=IJ, in_specs=(), out_specs=spec)()
    np.testing.assert_array_equal(z, np.tile(x, reps))
    printed = {
        (4, 2): "[[3. 3.]\n [3. 3.]\n [3. 3.]\n [3. 3.]]",
        (4, 1): "[[3.]\n [3.]\n [3.]\n [3.]]",
        (1, 1): "[[3.]]",
    }
    assert str(z) == printed.get(reps, str(z))


@pytest.mark.parametrize(
    "axes, spec, shape, expected",
    [
        ("j", P("i", None), (12, 6), TWELVE[:, :6] + TWELVE[:, 6:]),
        ("i", P(None, "j"), (3, 12), TWELVE.reshape(4, 3, 12).sum(0)),
        (("i", "j"), P(None, None), (3, 6), TWELVE.reshape(4, 3, 2, 6).sum((0, 2))),
    ],
    ids=["f3", "f4", "f5"],
)
def test_results_that_are_summed_over_an_axis(axes, spec, shape, expected):
    y = shard_map(lambda block: psum(block, axes), mesh=IJ, in_specs=P("i", "j"), out_specs=spec)(TWELVE)
    assert y.shape == shape
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    "in_spec, out_spec, transposed",
    [
        (P("i", "j"), P("j", "i"), lambda x: x.reshape(2, 4, 2, 3).transpose(2, 1, 0, 3).reshape(8, 6)),
        (P(("i", "j")), P(("j", "i")), lambda x: x.reshape(2, 2, 2, 6).swapaxes(0, 1).reshape(8, 6)),
        (P(("j", "i"), None), P(("i", "j")), lambda x: x.reshape(2, 2, 2, 6).swapaxes(0, 1).reshape(8, 6)),
        (P("i", "j"), P(None, ("i", "j")), lambda x: np.concatenate(x.reshape(2, 4, 6), axis=1)),
    ],
)
def test_blocks_transposed_on_their_way_out(in_spec, out_spec, transposed):
    mesh, x = make_mesh((2, 2), ("i", "j")), np.arange(48).reshape(8, 6)
    y = shard_map(lambda block: block, mesh, in_specs=in_spec, out_specs=out_spec)(x)
    np.testing.assert_array_equal(y, transposed(x))


def test_a_block_matrix_transposed():
    """Blocks in each other's places, and each transposed itself: the transposed matrix. Nothing is sent."""
    f = shard_map(lambda block: block.T, IJ, in_specs=P("i", "j"), out_specs=P("j", "i"))
    np.testing.assert_array_equal(f(TWELVE), TWELVE.T)
    assert spmd.communication(f)(TWELVE).counts == {}


def test_what_a_body_closes_over_is_unmapped():
    w, x = np.arange(6.0), np.arange(24.0).reshape(4, 6)

    def closed_over(w, x):
        return shard_map(lambda block: block * w, IJ, in_specs=P("i", None), out_specs=P("i", None))(x)

    def returned(w, x):
        specs = (P(None), P("i", None))
        return shard_map(lambda w, block: block * w, IJ, in_specs=specs, out_specs=P("i", None))(w, x)

    for f in (closed_over, returned):
        np.testing.assert_array_equal(f(w, x), x * w)
        np.testing.assert_allclose(md.grad(lambda w, f=f: np.sum(f(w, x)))(w), x.sum(0))


ONE = make_mesh((4,), ("i",))


def mapped(f, in_specs, out_specs, mesh=ONE, **options):
    return shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def identity(x):
    return x


def test_nothing_checks_what_is_promised_without_types():
    """With `check_rep=False` a result that differs from rank to rank is taken for one that does not."""
    assert mapped(identity, P("i"), P(), check_rep=False)(np.arange(8)).tolist() == [0, 1]


# ---------------------------------------------------------------- API specification


def test_the_signature():
    parameters = inspect.signature(shard_map).parameters
    assert list(parameters)[:4] == ["f", "mesh", "in_specs", "out_specs"]
    assert parameters["check_rep"].default is True


@pytest.mark.parametrize(
    "spec, shape", [(P("i", "j"), (2, 6, 5)), (P(None, "i"), (8, 3, 5)), (P(("j", "i")), (1, 12, 5)), (P(), (8, 12, 5))]
)
def test_shapes_of_blocks(spec, shape):
    seen = []
    mapped(lambda x: seen.append(x.shape), spec, P(), IJ)(np.ones((8, 12, 5)))
    assert seen == [shape]


def test_specs_are_prefixes_of_trees():
    """One spec for a whole tree of arguments, or one for each of them."""
    tree, whole = {"w": np.ones((4, 2)), "b": [np.ones(4)]}, np.ones(3)
    seen = []

    def body(tree, whole):
        seen.append((tree["w"].shape, tree["b"][0].shape, whole.shape))
        return psum(tree, "i"), whole

    sums, same = mapped(body, (P("i"), P()), (P(), P()))(tree, whole)
    assert seen == [((1, 2), (1,), (3,))]
    assert sums["w"].tolist() == [[4.0, 4.0]] and sums["b"][0].tolist() == [4.0] and same.tolist() == [1.0] * 3


# ---------------------------------------------------------------- collectives

ROW = make_mesh((4,), ("i",))


def test_without_collectives_it_is_a_loop_over_blocks():
    def f(block):
        return np.sin(block) + block[::-1]

    x = np.arange(16.0)
    y = np.concatenate([f(block) for block in np.array_split(x, ROW.shape["i"])])
    np.testing.assert_array_equal(shard_map(f, ROW, in_specs=P("i"), out_specs=P("i"))(x), y)


@each("name", [name for name, example in EXAMPLES.items() if example.meaning])
def test_what_collectives_mean(name):
    """On the list of all blocks: of other numbers than the tutorial's, too."""
    example = EXAMPLES[name]
    for x in (example.x, np.random.default_rng(0).standard_normal((2 * len(example.x), 4))):
        blocks = []
        mapped = example.mapped(example.mesh(backend="simulated"), lambda when, b, to=blocks: to.append(held(b)))
        mapped(x)
        before, after = blocks
        np.testing.assert_allclose(after, example.meaning(before), rtol=1e-12)


def held(value):
    """All ranks' blocks of a value of a body."""
    return value.interpreter.mesh.ranks.local(value.data, value.varying)


@pytest.mark.parametrize("name", ["psum", "all_gather, tiled", "psum_scatter", "ppermute", "all_to_all"])
def test_a_collective_is_a_function_of_all_blocks(name):
    """A body with one collective: what comes before it, rank by rank; then it; then what comes after, rank by rank."""
    example = EXAMPLES[name]
    axis_first = np.random.default_rng(1).standard_normal(16)

    def first(block):
        return np.sin(block) * block

    def then(block, one, outcome):
        return outcome * np.sum(one) + np.sum(block)

    def body(block):
        one = first(block)
        return then(block, one, example.collective(one))

    blocks = np.array_split(axis_first, 4)
    ones = [first(block) for block in blocks]
    expected = [then(*each) for each in zip(blocks, ones, example.meaning(ones), strict=True)]
    actual = shard_map(body, ROW, in_specs=P("i"), out_specs=P("i"))(axis_first)
    np.testing.assert_allclose(actual, np.concatenate(expected))


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_printed(name, capsys):
    """BEFORE and AFTER, each rank's block under its mesh coordinates; and the result."""
    example = EXAMPLES[name]
    y = example.mapped(example.mesh(backend="simulated"), lambda when, block: print(f"{when}:\n", block))(example.x)
    print("FINAL RESULT:\n", y)
    before, after = (text_of(example, blocks) for blocks in (example.before, example.after))
    result = np.array(example.result)
    assert capsys.readouterr().out == f"BEFORE:\n {before}\nAFTER:\n {after}\nFINAL RESULT:\n {result}\n"


def test_printing_looks_like_this(capsys):
    """Print the whole array."""
    mesh = make_mesh((2, 2), ("i", "j"))
    shard_map(lambda x: print("BEFORE:\n", x), mesh, in_specs=P("i", "j"), out_specs=P())(np.arange(8).reshape(2, 4))
    assert capsys.readouterr().out == (
        "BEFORE:\n"
        " On rank 0 at mesh coordinates (i, j) = (0, 0):\n[[0 1]]\n\n"
        "On rank 1 at mesh coordinates (i, j) = (0, 1):\n[[2 3]]\n\n"
        "On rank 2 at mesh coordinates (i, j) = (1, 0):\n[[4 5]]\n\n"
        "On rank 3 at mesh coordinates (i, j) = (1, 1):\n[[6 7]]\n\n"
    )


@each("name", EXAMPLES)
def test_compiled_and_on_tapes(name):
    example = EXAMPLES[name]
    f = example.mapped(example.mesh(backend="simulated"))
    tape = md.make_tape(f)(example.x)
    tape.check()
    for y in (md.jit(f)(example.x), tape(example.x)[0]):
        np.testing.assert_array_equal(np.asarray(y), example.result)


def test_a_gathered_value_is_not_known_to_be_the_same():
    x = EXAMPLES["all_gather"].x
    with pytest.raises(VarianceError, match=r"may differ .* along 'i'.*all_gather_invariant over 'i'"):
        mapped(lambda block: all_gather(block, "i", tiled=True), P("i"), P())(x)
    for f in (lambda block: all_gather_invariant(block, "i", tiled=True), identity):
        spec = P("i") if f is identity else P()
        np.testing.assert_array_equal(mapped(f, P("i"), spec)(x), x)


def test_the_reverse():
    """all_gather is the transpose of psum_scatter; so is the one by steps of the other."""
    x, ct = np.random.default_rng(2).standard_normal((2, 16))
    ct = ct[:4]
    scatter = mapped(lambda block: psum_scatter(block, "i", tiled=True), P("i"), P("i"))
    by_steps = mapped(lambda block: psum_scatter_by_steps(block, "i"), P("i"), P("i"))
    gather = mapped(lambda block: all_gather(block, "i", tiled=True), P("i"), P("i"))
    for f in (scatter, by_steps):
        (back,) = md.vjp(f, x)[1](ct)
        np.testing.assert_allclose(np.asarray(back), np.asarray(gather(ct)))
    back = spmd.communication(lambda ct: md.vjp(scatter, x)[1](ct))(ct)
    assert back.counts["all_gather"] == 1


def test_a_psum_in_two_halves_hands_over_less():
    """A reduce-scatter, and a gather of a quarter: what is handed to them, and together what an all-reduce sends."""
    x = EXAMPLES["psum"].x
    reports = {
        name: {(row.collective, row.bytes) for row in spmd.communication(EXAMPLES[name].mapped(ROW))(x).rows}
        for name in ("psum", "psum in two halves")
    }
    assert reports["psum"] == {("psum", 32)}
    assert reports["psum in two halves"] == {("psum_scatter", 32), ("all_gather_invariant", 8)}
