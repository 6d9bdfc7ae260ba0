"""Values that are sharded along axes that a shard_map does not map over."""

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather_invariant, axis_index, psum
from spmd import P
from tests.checks.samples import each
from tests.programs.auto_axes import ARGS, PROGRAMS, agrees, columns, gathers, mapped, summed
from tests.programs.on_blocks import assert_trees_close
from tests.spmd.arrays.test_sharded_array import PROPAGATED, A

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
CUBE = spmd.make_mesh((2, 2, 2), ("i", "j", "k"), backend="simulated")


def rows(f, **options):
    """Over i."""
    return spmd.shard_map(f, **{"mesh": MESH, "in_specs": P("i"), "out_specs": P("i"), "axis_names": {"i"}, **options})


X, W = ARGS
SPLIT = spmd.distribute(X, MESH, P("i", "j"))


@pytest.mark.parametrize("name", ["einsum", "softmax", "scan", "checkpoint", "a nested shard_map", "indices"])
def test_second_derivatives_and_batches(name):
    f, args, _ = mapped(name, MESH)
    whole = PROGRAMS[name][2]

    def second(f):
        return lambda *args: md.grad(lambda *args: (md.grad(summed(f))(*args) ** 2).sum())(*args)

    assert_trees_close(second(f)(*args), second(whole)(*ARGS), rtol=1e-7)
    many = np.stack([X, X + 0.5, 0.3 * X])
    expected = md.vmap(md.grad(summed(whole), (0, 1)), (0, None))(many, W)
    split = spmd.distribute(many, MESH, P(None, "i", "j"))
    assert_trees_close(md.vmap(md.grad(summed(f), (0, 1)), (0, None))(split, args[1]), expected)


WIDE = spmd.make_mesh((2, 2, 2), ("m", "i", "j"), backend="simulated")


@each("f, specs, expected, counts", PROPAGATED)
def test_operations_split_and_communicate_as_on_sharded_arrays(f, specs, expected, counts):
    arrays = [A, np.cos(np.arange(24.0).reshape(4, 6))][: len(specs)]
    args = [spmd.distribute(x, WIDE, spec) for x, spec in zip(arrays, specs)]
    mapped = rows(f, mesh=WIDE, in_specs=P(), out_specs=P(), axis_names={"m"})
    agrees(mapped, args, f, arrays)
    assert spmd.spec_of(mapped(*args)) == expected
    assert spmd.communication(mapped)(*args).counts == counts
    if md.typeof(f(*arrays)).dtype.kind == "f":
        agrees(md.grad(summed(mapped)), args, md.grad(summed(f)), arrays)


# ---------------------------------------------------------------- types, specs and nested shard_maps


def test_types_in_the_body():
    seen = []

    def inner(x):
        seen.append(str(md.typeof(x)))
        return x * psum(x, "j")

    def body(x):
        y = columns(inner)(x)
        seen.extend(str(md.typeof(v)) for v in (x, y, x.sum(1), x @ W))
        return y

    rows(body)(SPLIT)
    assert seen == ["f64[2,2]{i,j}", "f64[2,4]{i}", "f64[2,4]{i}", "f64[2]{i}", "f64[2,4]{i}"]


def test_a_nested_shard_map_takes_blocks_as_they_are():
    inner = columns(lambda x: np.sin(x) * axis_index("j"))
    f = rows(lambda x: inner(inner(x) + x))
    assert spmd.communication(f)(SPLIT).counts == {}
    assert f(SPLIT).spec == P("i", "j")
    whole = rows(lambda x: columns(lambda x: x, P(None, "j"), P(None, "j"))(x))
    assert spmd.communication(whole)(X).counts == {"all_gather_invariant": 1}  # without an argument that is split


def test_a_nested_shard_map_that_closes_over_a_split_value_gathers_it():
    f = rows(lambda x: columns(lambda y: (y[:, :, None] * x[:, None]).sum(2))(x))
    agrees(f, [SPLIT], lambda x: x * x.sum(1, keepdims=True), [X])
    agrees(md.grad(summed(f)), [SPLIT], md.grad(summed(lambda x: x * x.sum(1, keepdims=True))), [X])
    assert len(gathers(f, [SPLIT])) == 1


def test_what_a_nested_shard_map_gathers_itself():
    f = rows(lambda x: columns(lambda y: all_gather_invariant(y, "j", axis=1, tiled=True) * 2, out_specs=P())(x))
    assert_trees_close(f(SPLIT), 2 * X)
    assert_trees_close(md.grad(summed(f))(SPLIT), 2 * np.cos(2 * X))


@pytest.mark.parametrize(
    ("have", "moves", "spec"),
    [
        (P(("i", "j")), False, P(("i", "j"))),
        (P(("j", "i")), True, P(("i", "j"))),
        (P("j", "i"), True, P(("i", "j"))),
        (P(None, "j"), False, P("i", "j")),
        (P(), False, P("i")),
    ],
)
def test_the_specs_of_arguments(have, moves, spec):
    """An auto axis keeps its dimension; where both split one, the mapped axis is the major one."""
    x = spmd.distribute(X, MESH, have)
    f = rows(np.sin)
    assert_trees_close(f(x), np.sin(X))
    assert f(x).spec == spec
    assert bool(spmd.communication(f)(x).counts) is moves


def test_an_axis_that_does_not_divide_the_block_is_gathered():
    x = spmd.distribute(np.arange(2.0), MESH, P("j"))
    f = rows(np.sin)
    assert_trees_close(f(x), np.sin(np.arange(2.0)))
    assert f(x).spec == P("i")


def test_several_auto_axes():
    x = spmd.distribute(np.sin(np.arange(64.0)).reshape(4, 4, 4), CUBE, P("i", "k", "j"))

    def body(x):
        y = columns(lambda y: np.sin(y) * psum(y.sum(), ("i", "j")), P(None, None, "j"), P(None, None, "j"))(x)
        return y.sum(2), y @ np.ones((4, 2)), y.reshape(2, 16)

    def whole(x):
        y = np.sin(x) * x.sum()
        return y.sum(2), y @ np.ones((4, 2)), y.reshape(4, 16)

    f = rows(body, mesh=CUBE)
    agrees(f, [x], whole, [x.gather()])
    agrees(md.grad(summed(f)), [x], md.grad(summed(whole)), [x.gather()])
    assert [spmd.spec_of(y) for y in f(x)] == [P("i", "k"), P("i", "k"), P("i", ("k", "j"))]
    assert [row.collective for row in gathers(f, [x])] == ["all_to_all"]  # the reshape joins what both axes split


def test_partial_sums_stay_split():
    f = rows(lambda x: x.sum(0) * 2, out_specs=P(sum="i"))
    agrees(f, [SPLIT], lambda x: 2 * x.sum(0), [X])
    agrees(md.grad(summed(f)), [SPLIT], md.grad(summed(lambda x: 2 * x.sum(0))), [X])
    assert f(SPLIT).spec == P("j")


def test_elements_that_tie_share_the_derivative_whichever_rank_has_them():
    x = np.array([[1.0, 1, 0, 1], [0, 2, 2, 0], [3, 3, 3, 3], [1, 2, 3, 3]])
    f, whole = rows(lambda x: x.max(1) * x.min(1)), lambda x: x.max(1) * x.min(1)
    second = lambda f: md.grad(lambda x: (md.grad(summed(f))(x) ** 2).sum())  # noqa: E731
    for g, expected in ((md.grad(summed(f)), md.grad(summed(whole))), (second(f), second(whole))):
        agrees(g, [spmd.distribute(x, MESH, P("i", "j"))], expected, [x])


@pytest.mark.parametrize("k", range(3))
def test_branches_agree_on_how_a_result_is_split(k):
    branches = [lambda x: x * 2, lambda x: x[:, ::-1], lambda x: x.T]
    x = X[:, :2]
    f = rows(lambda x, k: md.switch(k, branches, x), in_specs=(P("i"), P()))
    whole = lambda x, k: np.concatenate([branches[k](x[:2]), branches[k](x[2:])])  # noqa: E731
    args = spmd.distribute(x, MESH, P("i", "j")), k
    agrees(f, args, whole, (x, k))
    agrees(md.grad(summed(f)), args, md.grad(summed(whole)), (x, k))


def test_what_a_body_closes_over_is_gathered_and_its_gradient_is_split():
    loss = lambda x, w: np.sum(np.sin(rows(lambda x: np.sin(x) @ w)(x)))  # noqa: E731
    whole = lambda x, w: np.sum(np.sin(np.sin(x) @ w))  # noqa: E731
    split = spmd.distribute(W, MESH, P("j"))
    agrees(md.grad(loss, (0, 1)), (SPLIT, split), md.grad(whole, (0, 1)), (X, W))
    assert [x.spec for x in md.grad(loss, (0, 1))(SPLIT, split)] == [P("i", "j"), P("j")]


@pytest.mark.parametrize("columns_of_x", [2, 8])
def test_a_nested_shard_map_splits_what_a_third_axis_splits(columns_of_x):
    """Its own axis is the major one; where the other no longer divides the dimension, that is whole."""
    x = np.sin(np.arange(4.0 * columns_of_x)).reshape(4, columns_of_x)
    inner = columns(lambda y: np.sin(y) * axis_index("j") + y.sum(1, keepdims=True), axis_names={"j"})
    f = rows(inner, mesh=CUBE)

    def whole(x):
        halves = np.split(x, 2, axis=1)
        return np.concatenate([np.sin(y) * j + y.sum(1, keepdims=True) for j, y in enumerate(halves)], 1)

    split = spmd.distribute(x, CUBE, P("i", "k"))
    agrees(f, [split], whole, [x])
    agrees(md.grad(summed(f)), [split], md.grad(summed(whole)), [x])
    assert f(split).spec == (P("i", ("j", "k")) if columns_of_x == 8 else P("i", "j"))


def test_values_print_and_branch():
    def body(x):
        assert "split as P(None, 'j')" in str(x)
        total = psum(x.sum(), "i")
        return x if total > 100 else -x

    assert_trees_close(rows(body)(SPLIT), -X)
    assert rows(lambda x: x * float(psum(x, "i")[0, 0] * 0 + 2))(SPLIT).spec == P("i", "j")


def test_without_types_and_without_split_arguments_nothing_changes():
    f = lambda **options: rows(lambda x: np.sin(x), **options)  # noqa: E731
    assert f(check_rep=False)(SPLIT).spec == P("i")
    assert str(md.make_tape(f())(X)) == str(md.make_tape(f(axis_names=()))(X))


def test_explicit_pbroadcasts():
    f = rows(lambda x: psum(x @ np.ones((4, 2)), "i"), out_specs=P(), auto_pbroadcast=False)
    assert_trees_close(f(SPLIT), (X @ np.ones((4, 2)))[:2] + (X @ np.ones((4, 2)))[2:])
    f = rows(lambda x, w: x * w[:2], in_specs=(P("i"), P()), auto_pbroadcast=False)
    with pytest.raises(md.VarianceError, match=r"f64\[2,4\]\{i\} and f64\[2,4\] disagree in variance"):
        f(SPLIT, spmd.distribute(W, MESH, P(None, "j")))


def test_leaked_values_are_named():
    saved = []
    rows(lambda x: saved.append(x) or x)(SPLIT)
    for use in (lambda: saved[0] + 1, lambda: rows(lambda x: x * saved[0])(SPLIT), lambda: bool(saved[0])):
        with pytest.raises(md.LeakedTracerError, match="was used outside the transformation it belongs to"):
            use()


@pytest.mark.parametrize("i", [1, 2])
def test_a_view_that_is_gathered_and_then_varies(i):
    mesh = spmd.make_mesh((i, 4), ("i", "j"), backend="simulated")
    w = spmd.distribute(np.arange(8.0).reshape(2, 4), mesh, P(None, "j"))
    f = rows(
        lambda w: psum(np.sum(w.reshape(-1) ** (1 + axis_index("i"))), "i"), mesh=mesh, in_specs=P(), out_specs=P()
    )
    whole = lambda w: sum(np.sum(w ** (1 + k)) for k in range(i))  # noqa: E731
    agrees(f, [w], whole, [w.gather()])
    agrees(md.grad(f), [w], md.grad(whole), [w.gather()])


# ---------------------------------------------------------------- vmap with spmd_axis_name

BATCH = np.stack([X, X + 0.5, 0.3 * X, np.cos(X)])


def per_rank(x, w):
    y = np.sin(x) @ w
    return psum(y, "i"), x - psum(x.sum(), "i"), w * x.sum(1)[0]


def per_matrix(x, w):
    y = np.sin(x) @ w
    return y[:2] + y[2:], x - x.sum(), np.concatenate([w * x[k].sum() for k in (0, 2)])


OUT = (P(), P("i"), P("i"))


def batch_of(mapped, in_axes=(0, None)):
    return md.vmap(mapped, in_axes, spmd_axis_name="j")


@pytest.mark.parametrize("axis_names", [{"i"}, {"i", "j"}], ids=["over i", "over both"])
@pytest.mark.parametrize("spec", [P("j", "i"), P(None, "i"), P("i", "j")], ids=str)
def test_a_split_batch_stays_split(spec, axis_names):
    f = batch_of(rows(per_rank, in_specs=(P("i"), P()), out_specs=OUT, axis_names=axis_names))
    whole = md.vmap(per_matrix, (0, None))
    args, arrays = (spmd.distribute(BATCH, MESH, spec), W), (BATCH, W)
    agrees(f, args, whole, arrays)
    agrees(md.grad(summed(f), (0, 1)), args, md.grad(summed(whole), (0, 1)), arrays)
    assert [x.spec for x in f(*args)] == [P("j"), P("j", "i"), P("j", "i")]
    if spec == P("j", "i"):
        assert not gathers(f, args)
        assert "j" not in {a for row in spmd.communication(f)(*args).rows for a in row.axes}


def test_a_batch_of_gradients_and_of_batches():
    f = rows(per_rank, in_specs=(P("i"), P()), out_specs=OUT)
    args = spmd.distribute(BATCH, MESH, P("j", "i")), W
    gradients = batch_of(md.grad(summed(f), (0, 1)))
    expected = md.vmap(md.grad(summed(per_matrix), (0, 1)), (0, None))(BATCH, W)
    assert_trees_close(gradients(*args), expected)
    assert_trees_close(md.jit(gradients)(*args), expected)
    twice = md.vmap(batch_of(f), (0, None))
    assert_trees_close(
        twice(np.stack([BATCH, 2 * BATCH]), W),
        md.vmap(md.vmap(per_matrix, (0, None)), (0, None))(np.stack([BATCH, 2 * BATCH]), W),
    )


def test_elements_that_are_split_along_the_axis_of_the_batch_are_resharded():
    x = spmd.distribute(BATCH, MESH, P(None, "i", "j"))
    f = batch_of(rows(np.sin), 0)
    assert_trees_close(f(x), np.sin(BATCH))
    assert f(x).spec == P("j", "i")


@each("j", [1, 2])
@each("count", [2, 4])
@each("branch", [np.sin, lambda x: x.reshape(-1)[::-1].sum() * x, lambda x: x[:1] * x], ["sin", "views", "a slice"])
def test_branches_on_elements_that_are_the_same_on_all_ranks(j, count, branch):
    """On one rank along j, an element may be a view of the batch."""
    mesh = spmd.make_mesh((2, j), ("i", "j"), backend="simulated")
    f = lambda x: md.cond(np.sum(x) > 0, branch, lambda x: 2 * x, x)  # noqa: E731
    mapped = rows(f, mesh=mesh, in_specs=P(), out_specs=P())
    batch = BATCH[: j * count // 2] - 0.5
    agrees(batch_of(mapped, 0), [batch], md.vmap(f), [batch])
    agrees(md.grad(summed(batch_of(mapped, 0))), [batch], md.grad(summed(md.vmap(f))), [batch])


def test_nested_shard_maps_of_elements_gather_the_batch():
    f = batch_of(rows(lambda x: columns(lambda y: y * psum(y.sum(), ("i", "j")))(x)), 0)
    assert_trees_close(f(BATCH), BATCH * BATCH.sum((1, 2), keepdims=True))


def test_elements_that_are_split_along_a_third_axis():
    x = spmd.distribute(np.sin(np.arange(64.0)).reshape(4, 4, 4), CUBE, P("j", "i", "k"))
    f = rows(lambda x: (x.sum(1) * 2, psum(np.sin(x), "i")), mesh=CUBE, out_specs=(P("i"), P()))
    f, whole = md.vmap(f, spmd_axis_name="j"), md.vmap(lambda x: (x.sum(1) * 2, np.sin(x)[:2] + np.sin(x)[2:]))
    agrees(f, [x], whole, [x.gather()])
    agrees(md.grad(summed(f)), [x], md.grad(summed(whole)), [x.gather()])
    assert [y.spec for y in f(x)] == [P("j", "i"), P("j", None, "k")]
    assert spmd.communication(f)(x).counts == {"psum": 2}


@pytest.mark.parametrize(
    ("axis", "options", "message"),
    [
        (
            "j",
            {"in_specs": P(None, "j"), "axis_names": ()},
            r"split along 'j', but the spec P\(None, 'j'\) .* names it",
        ),
        ("j", {"out_specs": P("i", "j"), "axis_names": ()}, r"split along 'j', but the spec P\('i', 'j'\) .* names it"),
        ("k", {}, r"spmd_axis_name='k': the axes of the mesh .* \('i', 'j'\)"),
        ("j", {"check_rep": False}, "needs the types"),
    ],
)
def test_errors_of_split_batches(axis, options, message):
    with pytest.raises(ValueError, match=message):
        md.vmap(rows(np.sin, **options), spmd_axis_name=axis)(BATCH)


def test_a_batch_that_cannot_be_split():
    with pytest.raises(ValueError, match="a batch of 3 cannot be split evenly over 2 ranks"):
        md.vmap(rows(np.sin), spmd_axis_name=("j",))(BATCH[:3])


# ---------------------------------------------------------------- other names, and static arguments


def test_other_names():
    f = lambda **options: spmd.shard_map(lambda x: psum(x, "i"), MESH, P("i"), P(), **options)  # noqa: E731
    expected = str(md.make_tape(f(axis_names={"i"}))(SPLIT))
    assert str(md.make_tape(f(auto=frozenset({"j"})))(SPLIT)) == expected
    assert str(md.make_tape(f(auto={"j"}, axis_names={"i"}))(SPLIT)) == expected
    assert str(md.make_tape(f(axis_names={"i"}, check_vma=True))(SPLIT)) == expected
    assert "check_rep=False" in str(md.make_tape(f(check_vma=False))(X))
    inner = rows(lambda x: spmd.shard_map(np.sin, in_specs=P(None, "j"), out_specs=P(None, "j"), auto={"i"})(x))
    assert_trees_close(inner(SPLIT), np.sin(X))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"auto": {"j"}, "axis_names": {"i", "j"}},
            ValueError,
            r"auto={'j'} and axis_names={.*} name the axes",
        ),
        ({"auto": {"k"}}, ValueError, "auto names 'k', but the axes of the mesh"),
        ({"auto": "j"}, TypeError, "auto must be a set of names, {'j'}"),
        ({"auto": {"i", "j"}}, ValueError, "auto names all axes of the mesh"),
        (
            {"auto": {"j"}, "axis_names": {"i"}, "mesh": CUBE},
            ValueError,
            r"auto={'j'} and axis_names={'i'} name the axes",
        ),
        ({"check_rep": False, "check_vma": False}, TypeError, "check_vma= is JAX's name for check_rep="),
    ],
)
def test_names_that_disagree(options, error, message):
    with pytest.raises(error, match=message):
        spmd.shard_map(np.sin, in_specs=P("i"), out_specs=P("i"), **{"mesh": MESH, **options})(X)


class Settings:
    power = 2


def test_static_arguments():
    settings = Settings()

    def f(x, n, function, settings, params, several):
        assert (n, function, several) == (3, np.sin, {"a": [1, None], "b": "text"})
        assert (settings.power, params["name"], type(n)) == (2, "sin", int)
        return function(x) * params["w"] + n

    mapped = spmd.shard_map(f, MESH, (P("i"), None, None, None, {"w": P(), "name": None}, None), P("i"))
    args = X, 3, np.sin, settings, {"w": 2.0, "name": "sin"}, {"a": [1, None], "b": "text"}
    assert_trees_close(mapped(*args), 2 * np.sin(X) + 3)
    assert_trees_close(mapped(*args), 2 * np.sin(X) + 3)
    loss = lambda w: mapped(*args[:4], {"w": w, "name": "sin"}, args[5]).sum()  # noqa: E731
    assert_trees_close([md.grad(loss)(2.0), md.jit(md.grad(loss))(2.0)], [np.sin(X).sum()] * 2)
    with pytest.raises(TypeError, match=r"args\[4\]\['w'\]"):
        mapped(*args[:4], {"w": "text", "name": "sin"}, args[5])
    with pytest.raises(TypeError, match="in_specs says how each argument is split"):
        spmd.shard_map(f, MESH, None, P("i"))
