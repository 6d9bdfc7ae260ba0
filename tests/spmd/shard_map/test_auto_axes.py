"""Values that are sharded along axes that a shard_map does not map over; `tests/checks/ranks.py` runs the programs."""

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import check_values, summed
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs import auto_axes as programs
from tests.programs.auto_axes import ARGS, columns

PLANE, CUBE = mesh(2, 2), mesh(2, 2, 2)
X, W = ARGS
SPLIT = spmd.distribute(X, PLANE, P("i", "j"))
CUBIC = spmd.distribute(np.sin(np.arange(64.0)).reshape(4, 4, 4), CUBE, P("i", "k", "j"))


def rows(f, over=PLANE, in_specs=P("i"), out_specs=P("i"), **options):
    """Over i."""
    return mapped(f, over, in_specs, out_specs, **{"axis_names": {"i"}, **options})


def check(f, args, whole):
    """Values and gradients are those of whole arrays."""
    whole_args = spmd.gather(args)
    check_values(f, args, whole, whole_args)
    check_values(md.grad(summed(f)), args, md.grad(summed(whole)), whole_args)


@pytest.mark.parametrize("name", ["softmax", "scan", "checkpoint", "a nested shard_map"])
def test_second_derivatives_and_batches(name):
    f, args, whole = programs.mapped(name, PLANE), programs.distributed(PLANE), programs.whole(name)
    second = lambda f: md.grad(lambda *args: (md.grad(summed(f))(*args) ** 2).sum())  # noqa: E731
    assert_trees_close(second(f)(*args), second(whole)(*ARGS), rtol=1e-7)
    many = np.stack([X, X + 0.5, 0.3 * X])
    of_each = lambda f: md.vmap(md.grad(summed(f), (0, 1)), (0, None))  # noqa: E731
    split = spmd.distribute(many, PLANE, P(None, "i", "j"))
    assert_trees_close(of_each(f)(split, args[1]), of_each(whole)(many, W))


@pytest.mark.parametrize(
    ("array", "have", "moves", "spec"),
    [
        (X, P(("i", "j")), False, P(("i", "j"))),
        (X, P(("j", "i")), True, P(("i", "j"))),
        (X, P("j", "i"), True, P(("i", "j"))),
        (X, P(None, "j"), False, P("i", "j")),
        (X, P(), False, P("i")),
        (X[:2], P("j"), True, P("i")),
    ],
)
def test_an_auto_axis_keeps_its_dimension(array, have, moves, spec):
    """Where both split one, the mapped axis is the major one; what does not divide the block is gathered."""
    x, f = spmd.distribute(array, PLANE, have), rows(np.sin)
    assert_trees_close(f(x), np.sin(array))
    assert (f(x).spec, bool(spmd.communication(f)(x).counts)) == (spec, moves)


@pytest.mark.parametrize("width", [2, 8])
def test_a_nested_shard_map_splits_what_a_third_axis_splits(width):
    """Its own axis is the major one; where the other no longer divides the dimension, that is whole."""
    x = spmd.distribute(np.sin(np.arange(4.0 * width)).reshape(4, width), CUBE, P("i", "k"))
    of_half = lambda y, j: np.sin(y) * j + y.sum(1, keepdims=True)  # noqa: E731
    f = rows(columns(lambda y: of_half(y, axis_index("j")), axis_names={"j"}), CUBE)
    check(f, [x], lambda x: np.concatenate([of_half(y, j) for j, y in enumerate(np.split(x, 2, axis=1))], 1))
    assert f(x).spec == (P("i", ("j", "k")) if width == 8 else P("i", "j"))


@each("k", range(3))
def test_branches_agree_on_how_a_result_is_split(k):
    branches, x = [lambda x: x * 2, lambda x: x[:, ::-1], lambda x: x.T], spmd.distribute(X[:, :2], PLANE, P("i", "j"))
    f = rows(lambda x, k: md.switch(k, branches, x), in_specs=(P("i"), P()))
    check(lambda x: f(x, k), [x], lambda x: np.concatenate([branches[k](x[:2]), branches[k](x[2:])]))


def test_a_gradient_of_what_a_body_closes_over_is_split():
    loss = lambda x, w, of=rows: np.sum(np.sin(of(lambda x: np.sin(x) @ w)(x)))  # noqa: E731
    args, gradient = (SPLIT, spmd.distribute(W, PLANE, P("j"))), md.grad(loss, (0, 1))
    check_values(gradient, args, md.grad(lambda x, w: loss(x, w, lambda f: f), (0, 1)), ARGS)
    assert [x.spec for x in gradient(*args)] == [P("i", "j"), P("j")]


@each("i", [1, 2])
def test_a_view_that_is_gathered_and_then_varies(i):
    over = mesh(i, 4)
    w = spmd.distribute(np.arange(8.0).reshape(2, 4), over, P(None, "j"))
    f = rows(lambda w: psum(np.sum(w.reshape(-1) ** (1 + axis_index("i"))), "i"), over, P(), P())
    check(f, [w], lambda w: sum(np.sum(w ** (1 + k)) for k in range(i)))


def test_without_types_and_without_split_arguments_nothing_changes():
    assert rows(np.sin, check_rep=False)(SPLIT).spec == P("i")
    assert str(md.make_tape(rows(np.sin))(X)) == str(md.make_tape(rows(np.sin, axis_names=()))(X))


def test_values_that_have_left_the_body_are_errors():
    leaked = []
    rows(lambda x: leaked.append(x) or x)(SPLIT)
    for use in (lambda: leaked[0] + 1, lambda: rows(lambda x: x * leaked[0])(SPLIT), lambda: bool(leaked[0])):
        with pytest.raises(md.LeakedTracerError):
            use()


def test_explicit_pbroadcasts():
    f = rows(lambda x: psum(x @ np.ones((4, 2)), "i"), out_specs=P(), auto_pbroadcast=False)
    assert_trees_close(f(SPLIT), X.reshape(2, 2, 4).sum(0) @ np.ones((4, 2)))
    f = rows(lambda x, w: x * w[:2], in_specs=(P("i"), P()), auto_pbroadcast=False)
    with pytest.raises(md.VarianceError):
        f(SPLIT, spmd.distribute(W, PLANE, P(None, "j")))


def test_other_names_of_the_options():
    f = lambda **options: str(md.make_tape(mapped(lambda x: psum(x, "i"), PLANE, P("i"), P(), **options))(SPLIT))  # noqa: E731
    others = f(auto={"j"}), f(auto=frozenset({"j"}), axis_names={"i"}), f(axis_names={"i"}, check_vma=True)
    assert {*others} == {f(axis_names={"i"})} and "check_rep=False" in f(check_vma=False)


# ---------------------------------------------------------------- vmap with spmd_axis_name

BATCH = np.stack([X, X + 0.5, 0.3 * X, np.cos(X)])


def per_rank(x, w):
    return psum(np.sin(x) @ w, "i"), x - psum(x.sum(), "i"), w * x.sum(1)[0]


def per_matrix(x, w):
    y = np.sin(x) @ w
    return y[:2] + y[2:], x - x.sum(), np.concatenate([w * x[k].sum() for k in (0, 2)])


def of_elements(**options):
    return rows(per_rank, in_specs=(P("i"), P()), out_specs=(P(), P("i"), P("i")), **options)


def batch_of(f, in_axes=0):
    return md.vmap(f, in_axes, spmd_axis_name="j")


@each("spec, axis_names", [(P("j", "i"), {"i"}), (P("j", "i"), {"i", "j"}), (P("i", "j"), {"i"})])
def test_a_split_batch_stays_split(spec, axis_names):
    f, whole = batch_of(of_elements(axis_names=axis_names), (0, None)), md.vmap(per_matrix, (0, None))
    args = spmd.distribute(BATCH, PLANE, spec), W
    check_values(f, args, whole, (BATCH, W))
    check_values(md.grad(summed(f), (0, 1)), args, md.grad(summed(whole), (0, 1)), (BATCH, W))
    assert [x.spec for x in f(*args)] == [P("j"), P("j", "i"), P("j", "i")]
    if spec == P("j", "i"):
        assert "j" not in {a for row in spmd.communication(f)(*args).rows for a in row.axes}


def test_a_batch_of_gradients_and_of_batches():
    args, elements = (spmd.distribute(BATCH, PLANE, P("j", "i")), W), (0, None)
    gradients = lambda f: md.grad(summed(f), (0, 1))  # noqa: E731
    expected = md.vmap(gradients(per_matrix), elements)
    check_values(batch_of(gradients(of_elements()), elements), args, expected, (BATCH, W))
    twice = lambda vmap, f: md.vmap(vmap(f, elements), elements)(np.stack([BATCH, 2 * BATCH]), W)  # noqa: E731
    assert_trees_close(twice(batch_of, of_elements()), twice(md.vmap, per_matrix))


def test_elements_that_are_split_themselves():
    """Along the axis of the batch they are resharded; along a third axis they stay."""
    x = spmd.distribute(BATCH, PLANE, P(None, "i", "j"))
    assert_trees_close(batch_of(rows(np.sin))(x), np.sin(BATCH))
    assert batch_of(rows(np.sin))(x).spec == P("j", "i")
    x = spmd.reshard(CUBIC, P("j", "i", "k"))
    f = batch_of(rows(lambda x: (x.sum(1) * 2, psum(np.sin(x), "i")), CUBE, out_specs=(P("i"), P())))
    check(f, [x], md.vmap(lambda x: (x.sum(1) * 2, np.sin(x)[:2] + np.sin(x)[2:])))
    assert [y.spec for y in f(x)] == [P("j", "i"), P("j", None, "k")]
    assert spmd.communication(f)(x).counts == {"psum": 2}


@each("j, count, branch", [(1, 2, lambda x: x.reshape(-1)[::-1].sum() * x), (2, 4, lambda x: x[:1] * x)])
def test_branches_on_elements_that_are_the_same_on_all_ranks(j, count, branch):
    """On one rank along j, an element may be a view of the batch."""
    f = lambda x: md.cond(np.sum(x) > 0, branch, lambda x: 2 * x, x)  # noqa: E731
    check(batch_of(rows(f, mesh(2, j), P(), P())), [BATCH[: j * count // 2] - 0.5], md.vmap(f))


def test_nested_shard_maps_of_elements_gather_the_batch():
    f = batch_of(rows(lambda x: columns(lambda y: y * psum(y.sum(), ("i", "j")))(x)))
    assert_trees_close(f(BATCH), BATCH * BATCH.sum((1, 2), keepdims=True))
