"""Whether ranks make the same calls, on the same values: where they do not, all of them raise one error."""

import contextlib
import itertools
import re
import warnings

import numpy as np
import pytest
from mpi4py import MPI

import minidiff as md
import spmd
from collectives import psum
from collectives.guards.mismatch import DisagreementError
from minidiff.values.settings import checks, override
from spmd import P

RANK = MPI.COMM_WORLD.rank
several = pytest.mark.parallel([2, 4])


def of_all():
    return spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",))


def values(of, at=r"\[\d*(, \d+)*\]"):
    """An error about `of`, of which rank 0 has one value and all others another; `at` an index, or "" for a number."""
    others, value = ", ".join(map(str, range(1, MPI.COMM_WORLD.size))), r"[-+\d.eTrueFals]+" + f" at {at}" * bool(at)
    return rf"different values of {of}.*: rank 0: {value}; ranks? {others}: {value}\. Under mpirun .*seed"


@several
def test_the_same():
    mesh, rng = of_all(), np.random.default_rng(0)
    x = {
        "w": [rng.normal(size=(3, 2)), 2.5],
        "b": spmd.distribute(np.arange(8.0), mesh, P("i")),
        "n": np.float32(np.nan),
    }
    assert spmd.check_invariant(x, mesh) is x
    assert spmd.check_invariant((), mesh) == ()


@several
def test_another_seed():
    x = {"a": np.ones(3), "w": [np.zeros(2), np.random.default_rng(min(RANK, 1)).normal(size=(3, 2))]}
    with pytest.raises(ValueError, match=values(r"x\['w'\]\[1\]: float64\[3, 2\] \(.*\)", at=r"\[0, 0\]")) as raised:
        spmd.check_invariant(x, of_all())
    assert raised.value.__context__ is None


@several
@pytest.mark.parametrize("other", [np.ones(4), np.ones(3, np.float32), [np.ones(3)], [], 1])
def test_another_type(other):
    local = other if RANK == 1 else np.ones(3)
    with pytest.raises(ValueError, match=r"values of different types: ranks? 0.*: x: float64\[3\]; rank 1: "):
        spmd.check_invariant(local, of_all())


@pytest.mark.parallel(2)
def test_another_spec():
    mesh = of_all()
    x = spmd.distribute(np.ones((4, 4)), mesh, P("i") if RANK else P(None, "i"))
    with pytest.raises(ValueError, match=r"rank 0: x: float64\[4, 4\] split as P\(None, 'i'\); rank 1: x: .*P\('i'\)"):
        spmd.check_invariant(x, mesh)


# ---------------------------------------------------------------- calls of shard_map

new_sizes = itertools.count(3)
WRAPPED = {
    "eager": lambda f: f,
    "jit": md.jit,
    "grad": md.grad,
    "jit of grad": lambda f: md.jit(md.grad(f)),
    "vmap": lambda f: lambda *args: md.vmap(f)(*md.tree.map(lambda x: np.stack([x, x]), args)),
    "scan": lambda f: lambda *args: md.scan(lambda c, _: (c + f(*args), None), 0.0, None, length=2)[0],
}


def all_raise(do, match, error=DisagreementError):
    """All ranks raise one error, and afterwards they go on together."""
    with pytest.raises(error, match=match) as raised:
        do()
    texts = MPI.COMM_WORLD.allgather(str(raised.value))
    assert texts == [texts[0]] * len(texts)
    x = np.ones((len(texts), next(new_sizes)))
    total = spmd.shard_map(lambda x: psum(np.sum(x), "i"), mesh=of_all(), in_specs=P("i"), out_specs=P())
    assert total(x) == x.size


def who_says(text, other):
    """Return the pattern of an error: rank 1 has another value than the rest."""
    rest = [r for r in range(MPI.COMM_WORLD.size) if r != 1]
    named = f"ranks {', '.join(map(str, rest))}" if len(rest) > 1 else "rank 0"
    return rf"(?s)  {named}: {re.escape(text)}; \S+:.*  rank 1: {re.escape(other)}; \S+:"


def loss(params, x):
    return psum(np.sum(x) * np.sum(params["w"] ** 2), "i")


def call_of_loss(wrap, w, x, **options):
    options = {"in_specs": (P(), P("i")), "out_specs": P(), **options}
    return WRAPPED[wrap](spmd.shard_map(loss, mesh=of_all(), **options))({"w": w}, x)


@several
@pytest.mark.parametrize("wrap", WRAPPED)
def test_data_that_only_one_rank_has_read(wrap):
    n, size = next(new_sizes), MPI.COMM_WORLD.size
    message = who_says(f"args[1]: f64[{n * size}]", "args[1]: f64[0]") + ".*MPI.COMM_WORLD.bcast"
    all_raise(lambda: call_of_loss(wrap, np.ones(2), np.ones(0 if RANK == 1 else n * size)), message)


@several
@pytest.mark.parametrize("wrap", WRAPPED)
def test_weights_of_another_type(wrap):
    n, x = next(new_sizes), np.ones(MPI.COMM_WORLD.size)
    message = who_says(f"args[0]['w']: f64[{n}]", f"args[0]['w']: f32[{n}]")
    all_raise(lambda: call_of_loss(wrap, np.ones(n, "f4" if RANK == 1 else "f8"), x), message)


@several
@pytest.mark.parametrize("wrap", ["eager", "jit"])
def test_other_arguments_of_shard_map(wrap):
    n, x = next(new_sizes), np.ones(4 * MPI.COMM_WORLD.size)
    others = {
        "in_specs": (((P(), P("i")), (P(), P())), "in_specs of args[1]: P('i')", "in_specs of args[1]: P()"),
        "out_specs": ((P(), P("i")), "out_specs: P()", "out_specs: P('i')"),
        "check_rep": ((False, True), "check_rep=False", "check_rep=True"),
    }
    for name, (values, ours, theirs) in others.items():
        options = {"check_rep": False, name: values[RANK == 1]}
        w = np.ones((MPI.COMM_WORLD.size, n))

        def call(options=options, w=w):
            f = spmd.shard_map(lambda p, x: p["w"] + psum(np.sum(x), "i"), mesh=of_all(), **options)
            return WRAPPED[wrap](f)({"w": w}, x)

        options.setdefault("in_specs", (P(), P("i")))
        options.setdefault("out_specs", P())
        all_raise(call, who_says(ours, theirs) + ".*write the same arguments of shard_map")


@several
def test_another_function_or_more_arguments():
    x, mesh = np.ones((MPI.COMM_WORLD.size, next(new_sizes))), of_all()

    def one(*x):
        return psum(np.sum(x[0]), "i")

    def two(*x):
        return psum(np.sum(x[0]), "i")

    f = spmd.shard_map(two if RANK == 1 else one, mesh=mesh, in_specs=P("i"), out_specs=P())
    all_raise(lambda: f(x), who_says("shard_map of one", "shard_map of two"))
    f = spmd.shard_map(one, mesh=mesh, in_specs=P("i"), out_specs=P())
    message = who_says("arrays in the arguments: 1", "arrays in the arguments: 3")
    all_raise(lambda: f(*[x] * (3 if RANK == 1 else 1)), message)


@several
def test_another_split_of_a_sharded_array():
    mesh, size = of_all(), MPI.COMM_WORLD.size
    x = spmd.distribute(np.ones((size, size * next(new_sizes))), mesh, P(None, "i") if RANK == 1 else P("i"))
    f = spmd.shard_map(lambda x: psum(np.sum(x), "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    t = f"args[0]: f64[{x.shape[0]},{x.shape[1]}], a ShardedArray split as P"
    all_raise(lambda: f(x), who_says(f"{t}('i')", f"{t}(None, 'i')"))


@pytest.mark.parallel(4)
@pytest.mark.parametrize("sizes, other", [((2, 2), (4, 1)), ((1, 4), (4, 1)), ((2, 2, 1), (1, 2, 2))])
def test_another_mesh(sizes, other):
    names = [f"{axis}{next(new_sizes)}" for axis in "abc"[: len(sizes)]]
    shown, others = (f"axes ({', '.join(f'{a}: {n}' for a, n in zip(names, s))})" for s in (sizes, other))
    make = lambda: spmd.make_mesh(other if RANK == 1 else sizes, names)  # noqa: E731
    all_raise(make, who_says(shown, others) + ".*give make_mesh the same sizes")
    assert spmd.make_mesh(sizes, names).size == 4


@pytest.mark.parallel(4)
def test_another_call_in_the_body_of_one():
    mesh = spmd.make_mesh((2, 2), ("j", "k"))
    spec = P("k") if RANK == 1 else P(None, "k")

    def outer(x):
        inner = spmd.shard_map(lambda x: x, in_specs=spec, out_specs=spec, axis_names={"k"}, check_rep=False)
        return inner(x)

    f = spmd.shard_map(outer, mesh=mesh, in_specs=P("j"), out_specs=P("j"), axis_names={"j"}, check_rep=False)
    message = who_says("in_specs of args[0]: P(None, 'k')", "in_specs of args[0]: P('k')")
    all_raise(lambda: f(np.ones((4, 4))), message)


@several
def test_a_leaf_among_thousands():
    n = next(new_sizes)
    params = [np.ones(n, "f4" if RANK == 1 and k == 1234 else "f8") for k in range(2000)]
    f = spmd.shard_map(lambda params: params[0], mesh=of_all(), in_specs=P(), out_specs=P())
    all_raise(lambda: f(params), who_says(f"args[0][1234]: f64[{n}]", f"args[0][1234]: f32[{n}]"))


@several
@pytest.mark.parametrize("values_too", [False, True])
def test_calls_of_known_types_communicate_nothing(values_too):
    """Nor does recording a program, which one rank may do alone. Values are compared at calls 1, 2, 4, 8, 16."""
    mesh, size = of_all(), MPI.COMM_WORLD.size
    x = np.ones((size, next(new_sizes)))
    mismatch_check, compared = mesh.ranks.comm.mismatch_check, []

    def mapped():  # a new one each time
        return spmd.shard_map(lambda x: 2.0 * x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))

    f = mapped()
    if RANK == 1:
        md.make_tape(f)(x)
        md.jit(f).source(x)
    for _ in range(9 if values_too else 1):
        f(x)
    mismatch_check.wait, wait = lambda *args: compared.append(args), mismatch_check.wait
    try:
        with contextlib.nullcontext() if values_too else spmd.checking(False):
            f(x), mapped()(x), md.jit(mapped())(x), md.jit(f)(x)
    finally:
        mismatch_check.wait = wait
    assert compared == [] and len(mismatch_check.calls_since) == 0


@several
def test_values_are_compared_once(monkeypatch):
    """Arguments in one message, and each array that the body closes over in another."""
    mesh, w, x = of_all(), np.ones(next(new_sizes)), np.ones(MPI.COMM_WORLD.size)
    compared, compare_values = [], mesh.ranks.compare_values
    monkeypatch.setattr(mesh.ranks, "compare_values", lambda lines: compared.append(lines) or compare_values(lines))
    f = spmd.shard_map(
        lambda n, x: psum(np.sum(x * n) * np.sum(w * w), "i"), mesh=mesh, in_specs=(P(), P("i")), out_specs=P()
    )
    f(np.ones(1), x)
    assert [[line.split(":")[0] for line in lines] for lines in compared] == [
        ["args[0] of <lambda>", "args[1] of <lambda>"],
        ["an array that the body closes over"],
    ]


# ---------------------------------------------------------------- unmapped values, where one asks for it


def seeded_by_rank(shape):
    return np.random.default_rng(min(RANK, 1)).normal(size=shape)


@several
@pytest.mark.parametrize("wrap", WRAPPED)
def test_checking_finds_weights_that_are_not_the_same(wrap):
    x, n = np.ones(4 * MPI.COMM_WORLD.size), next(new_sizes)
    named = rf"args\[0\]\['w'\] of loss: float64\[(2, )?{n}\] \(\w+.py:\d+: "
    wrong, right = seeded_by_rank(n), np.ones(n)
    with spmd.checking(False):
        call_of_loss(wrap, wrong, x)  # nobody notices

    def check():
        with spmd.checking():
            call_of_loss(wrap, wrong, x)

    with spmd.checking():
        call_of_loss(wrap, right, x)
    all_raise(check, values(named), ValueError)


@several
@pytest.mark.parametrize("wrap", ["eager", "jit", "grad"])
def test_checking_finds_what_a_body_closes_over(wrap):
    w, x = seeded_by_rank(3), np.ones(MPI.COMM_WORLD.size)
    f = spmd.shard_map(lambda x: psum(np.sum(x * w), "i"), mesh=of_all(), in_specs=P("i"), out_specs=P())
    label = "a closed-over array of <lambda>" if wrap == "jit" else "an array that the body closes over"
    for setting in (True, None):
        with override(checks, setting):
            all_raise(lambda: WRAPPED[wrap](f)(x), values(rf"{label}: float64\[3\]"), ValueError)


@pytest.mark.parallel(4)
def test_checking_compares_blocks_along_the_axes_that_a_spec_does_not_name():
    mesh = spmd.make_mesh((2, 2), ("j", "k"))
    f = spmd.shard_map(lambda x: psum(x, "k"), mesh=mesh, in_specs=P("j"), out_specs=P("j"))
    block = np.full(2, 1.0 + RANK // 2)  # ranks 0 and 1 have the first half, 2 and 3 the other
    x, wrong = (spmd.from_local(lambda rank: b, mesh, P("j")) for b in (block, block + (RANK == 3)))  # noqa: B023
    with spmd.checking():
        assert f(x).gather().tolist() == [2.0, 2.0, 4.0, 4.0]
        all_raise(lambda: f(wrong), r"args\[0\] of <lambda>: float64\[2\] .*: rank 2: 2.0.*; rank 3: 3.0", ValueError)
        outer, inner = ({"mesh": mesh, "axis_names": {a}} for a in "jk")
        double = spmd.shard_map(lambda x: x * 2.0, in_specs=P(), out_specs=P(), **inner)
        g = spmd.shard_map(lambda x, w: double(x) * w, in_specs=(P("j"), P()), out_specs=P("j"), **outer)
        assert g(x, 1.0).gather().tolist() == [2.0, 2.0, 4.0, 4.0]
        args = r"args\[1\] of <lambda>: float64\[\] .*rank 2: 3.0; rank 3: 4.0"
        all_raise(lambda: g(x, 1.0 + RANK), args, ValueError)
    assert f(wrong).shape == (4,)  # blocks are not compared otherwise


@several
@pytest.mark.parametrize("seed", range(3))
def test_checking_finds_the_leaf_that_is_not_the_same(seed):
    """Random trees with one bit changed on one rank are refused; unchanged ones pass, also compiled."""
    rng = np.random.default_rng(seed)
    params = {f"layer {k}": [rng.normal(size=rng.integers(0, 4, 2)), rng.integers(9, size=3)] for k in range(4)}
    leaves, _ = md.tree.flatten_with_paths(params, "args[0]")
    sizable = [k for k, (_, x) in enumerate(leaves) if x.size]
    (path, x), rank = leaves[rng.choice(sizable)], rng.integers(MPI.COMM_WORLD.size)

    def f(p):
        return [np.sum(x) for x in md.tree.leaves(p)]

    f = spmd.shard_map(f, mesh=of_all(), in_specs=P(), out_specs=P())
    compiled = md.jit(f)
    with spmd.checking():
        f(params), compiled(params)
        if rank == RANK:
            x.view(np.uint8).flat[0] ^= 1
        for call in (f, compiled):
            all_raise(lambda call=call: call(params), rf"{re.escape(path)} of f: .*\brank {rank}: ", ValueError)


# ---------------------------------------------------------------- values, without being asked for


def of_one_name():
    """A name that no function has had: calls are counted by it."""
    return f"f{next(new_sizes)}"


def named(body, **options):
    """A `shard_map` of a function whose calls have not been counted yet."""

    def f(*args):
        return body(*args)

    f.__name__ = of_one_name()
    return spmd.shard_map(f, mesh=of_all(), **options)


@several
@pytest.mark.parametrize("wrap", WRAPPED)
def test_weights_of_another_seed(wrap):
    x, n = np.ones(4 * MPI.COMM_WORLD.size), next(new_sizes)
    label = rf"args\[0\]\['w'\] of loss: float64\[(2, )?{n}\] \(\w+.py:\d+: "
    all_raise(lambda: call_of_loss(wrap, seeded_by_rank(n), x), values(label), ValueError)


@several
@pytest.mark.parametrize("wrap", ["eager", "jit", "vmap", "scan"])
@pytest.mark.parametrize("begins", [1, 2, 3, 5])
def test_values_are_compared_at_calls_1_2_4_8(wrap, begins):
    x, size = np.ones(3), MPI.COMM_WORLD.size
    f = WRAPPED[wrap](named(lambda w: np.sum(w), in_specs=P(), out_specs=P()))
    for call in range(1, 9):
        if call >= begins:
            x = x + (size - 1 == RANK)
        if call >= begins and call in (1, 2, 4, 8):
            all_raise(lambda x=x: f(x), rf"args\[0\].*rank {size - 1}: \d+", ValueError)
            break
        f(x)


@several
@pytest.mark.parametrize("wrap", ["eager", "jit"])
def test_data_that_is_cut_from_other_wholes(wrap):
    """By `in_specs` and by `distribute`, which one rank may call alone; large ones too."""
    size, mesh = MPI.COMM_WORLD.size, of_all()
    for n in (1, 5000):
        whole = seeded_by_rank((size * n, 2))
        f = WRAPPED[wrap](named(lambda x: psum(np.sum(x), "i"), in_specs=P("i"), out_specs=P()))
        all_raise(lambda f=f, whole=whole: f(whole), values(r"args\[0\] of f\d+", at=r"\[\d+, \d+\]"), ValueError)
        f = WRAPPED[wrap](named(lambda x: psum(np.sum(x), "i"), in_specs=P("i"), out_specs=P()))
        x = spmd.distribute(whole, mesh, P("i"))
        label = r"(a sample of )?args\[0\] of f\d+"
        all_raise(lambda f=f, x=x: f(x), values(label), ValueError)
        x = spmd.distribute(whole, mesh, P("i"))
        all_raise(lambda x=x: (x * x[:1]).sum(), values("(a sample of )?an array that was split"), ValueError)
    x = spmd.distribute(np.ones((size, 2)), mesh, P("i"))
    if RANK == 1:
        spmd.distribute(whole, mesh, P("i"))
        x = spmd.distribute(np.ones((size, 2)), mesh, P("i"))
    assert float(x.sum()) == 2 * size


@several
def test_a_set_has_another_order_on_each_rank():
    params = {name: np.full(2, float(i)) for i, name in enumerate("abcde")}
    names = [*params][RANK:] + [*params][:RANK]  # as sets of strings are iterated, without PYTHONHASHSEED
    total = md.jit(
        named(lambda x: psum(np.sum(x), "i"), in_specs=P("i") if MPI.COMM_WORLD.size == 2 else P(), out_specs=P())
    )
    all_raise(
        lambda: [total(params[name]) for name in names], r"0\.0.*Usual causes are .*the order of a set", ValueError
    )


@several
def test_values_that_are_equal_or_differ_by_rounding():
    """Bits matter only where they are asked for: processors of two kinds may round differently."""
    f = md.jit(named(lambda x: np.sum(x), in_specs=P(), out_specs=P()))
    other = min(RANK, 1)
    equal = np.array([-0.0 if other else 0.0, 1.0, -np.nan if other else np.nan])
    near = np.array([1.0, 1 / 3 * (1 + other * 2**-52), 1e-30 * other])
    far = np.array([1.0, 1 / 3 + other * 1e-10])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(equal)
        spmd.shard_map(lambda x: x, mesh=of_all(), in_specs=P(), out_specs=P())(np.asfortranarray(np.eye(3)[:, ::-1]))
    with (
        pytest.warns(RuntimeWarning, match="args.0. of f.* differ in their last digits")
        if RANK == 0
        else contextlib.nullcontext()
    ):
        f(near)
    all_raise(
        lambda: named(lambda x: np.sum(x), in_specs=P(), out_specs=P())(far), values("args", at=r"\[1\]"), ValueError
    )
    for x in (equal, near):
        all_raise(lambda x=x: spmd.check_invariant(x, of_all()), "ranks have different values of x: ", ValueError)


@several
def test_checking_off_and_on():
    size, mesh = MPI.COMM_WORLD.size, of_all()
    whole, x = seeded_by_rank((size, 2)), spmd.distribute(np.ones((size, 2)), mesh, P("i"))
    product = named(lambda w, x: w * x, in_specs=(P(), P("i")), out_specs=P("i"))
    untyped = spmd.shard_map(lambda x: {"k": x}, mesh=mesh, in_specs=P("i"), out_specs=P(), check_rep=False)
    with spmd.checking(False):
        product(1.0 + RANK, x), md.jit(product)(1.0 + RANK, x)
        spmd.distribute(whole, mesh, P("i")).sum()
    same = product(2.0, x), product(2.0, x)
    product(1.0 + RANK, x)  # the third call
    untyped(np.arange(float(size))), spmd.distribute(whole, mesh, P())
    with spmd.checking():
        product(2.0, x), md.jit(product)(2.0, x), spmd.distribute({"a": np.ones(3)}, mesh, P())
        all_raise(lambda: product(1.0 + RANK, x), r"args\[0\]", ValueError)
        all_raise(lambda: md.jit(product)(1.0 + RANK, x), r"args\[0\]", ValueError)
        for wrap in (lambda f: f, md.jit):
            all_raise(lambda wrap=wrap: wrap(untyped)(np.arange(float(size))), "result 0: .*rank 1: 1", ValueError)
        for spec in (P(), P("i")):
            tree = {"a": [np.ones(size), whole]}
            label = values(r"distribute: x\['a'\]\[1\]")
            all_raise(lambda tree=tree, spec=spec: spmd.distribute(tree, mesh, spec), label, ValueError)
    assert same[0].shape == (size, 2)


@several
def test_the_rank_of_a_mesh_in_a_body():
    mesh = of_all()
    f = spmd.shard_map(lambda x: psum(x * mesh.rank, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    all_raise(
        lambda: f(np.ones(mesh.size)), r"mesh\.rank in the body .* collectives\.axis_index\('i'\)", md.VarianceError
    )
    y = spmd.shard_map(lambda x: x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(np.ones(mesh.size))
    shown = []
    spmd.shard_map(lambda x: shown.append(repr(y)) or x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(
        np.ones(mesh.size)
    )
    assert mesh.rank == RANK and f"rank {RANK} at " in shown[0]
