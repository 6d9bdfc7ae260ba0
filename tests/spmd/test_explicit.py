"""shard_map(auto_pbroadcast=False): nothing is varying, what disagrees is an error, derivatives are not disturbed."""

import functools
import math
import re

import pytest
from hypothesis import example as known_failure
from hypothesis import given, settings

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    at_root,
    axis_index,
    broadcast,
    broadcast_varying,
    gather,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pscan,
    pscatter,
    psum,
    psum_scatter,
    reduce,
    scatter,
)
from spmd import P
from tests.checks.samples import each
from tests.programs.explicit import replayed, without_one
from tests.programs.on_blocks import LOOPS, STEPS, Program, assert_trees_close, example
from tests.spmd.test_programs import MESHES, placements, programs
from tests.table import TABLE

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
SPECS = {"": P(), "i": P("i"), "j": P("j"), "ij": P(("i", "j"))}
X, W = np.arange(4.0) + 1, np.array([0.5, -0.5])


def explicit(f, in_specs, out_specs=P(), mesh=MESH):
    return spmd.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, auto_pbroadcast=False)


# ---------------------------------------------------------------- errors: docs/errors.md has the texts

#: Variances of two operands, and what the error says to write.
BINARY = {
    ("i", ""): "pbroadcast(x, 'i') for the second",
    ("", "j"): "pbroadcast(x, 'j') for the first",
    ("i", "j"): "pbroadcast(x, 'j') for the first and pbroadcast(x, 'i') for the second",
    ("ij", ""): "pbroadcast(x, ('i', 'j')) for the second",
}
WAYS = {
    "run": lambda f: f,
    "make_tape": md.make_tape,
    "jit": md.jit,
    "grad": lambda f: lambda *xs: md.vjp(f, *xs),
    "jvp": lambda f: lambda *xs: md.jvp(f, xs, xs),
    "vmap": lambda f: lambda *xs: md.vmap(f)(*[np.stack([x, x]) for x in xs]),
}


@each("way", WAYS)
@each("operation", [np.add, np.multiply, np.matmul, np.maximum, np.less])
@each("variances", BINARY)
def test_operands_that_disagree(variances, operation, way):
    args = [np.ones(2 * 2 ** len(v)) for v in variances]
    f = explicit(lambda x, y: operation(x, y).reshape(-1) * 1.0, tuple(SPECS[v] for v in variances), P(("i", "j")))
    left, right = ("f64[2]" + ("{" + ",".join(v) + "}" if v else "") for v in variances)
    text = f"{operation.__name__}: operands {left} and {right} disagree in variance: write {BINARY[variances]}"
    with pytest.raises(md.VarianceError, match=f"^{re.escape(text)}$"):
        WAYS[way](f)(*args)


def in_a_scan(f):
    """The same in the body of a scan, which is recorded under make_tape."""
    return lambda x, w: md.scan(lambda c, _: (c, f(x, w)), 0.0, length=2)[1]


#: Each of x, which varies along i, and of w, which does not: the operation, what disagrees, and f.
DISAGREEMENTS = {
    "where, the condition": ("where", "the first", lambda x, w: np.where(w > 0, x, x)),
    "where, beside a number": ("where", "the second", lambda x, w: np.where(x > 0, w, 0.0)),
    "concatenate": ("concatenate", "the first and the third", lambda x, w: np.concatenate([w, x, w])),
    "stack": ("concatenate", "the third", lambda x, w: np.stack([x, x, w])),
    "matmul": ("matmul", "the second", lambda x, w: x @ w),
    "einsum": ("einsum", "the second", lambda x, w: np.einsum("i,j->j", x, w)),
    "a varying index": ("gather", "the first", lambda x, w: w[axis_index("i")]),
    "an index that does not vary": ("gather", "the second", lambda x, w: x[(w > 0).astype(int)]),
    "an update": ("update", "the first", lambda x, w: w.at[0].set(x[0])),
    # Of a function of several operations it is the first one of which operands disagree.
    "a function of several operations": ("where", "the first", lambda x, w: md.nn.logsumexp(x, b=w)),
    "lists of arrays": ("where", "the second", lambda x, w: np.select([w > 1, x > 1], [w, w], 0.0)),
    "a method": ("matmul", "the second", lambda x, w: x.dot(w)),
}


@each("way", ["run", "make_tape", "vmap"])
@each("around", [lambda f: f, in_a_scan], ids=["", "in a scan"])
@each("name", DISAGREEMENTS)
def test_disagreements(name, around, way):
    operation, which, f = DISAGREEMENTS[name]
    with pytest.raises(md.VarianceError, match=rf"^{operation}: operands .* pbroadcast\(x, 'i'\) for {which}$"):
        WAYS[way](explicit(around(f), (P("i"), P()), P("i")))(X, W)


TAKES = "^{} over 'i' takes a value that varies there, but f64[2] is the same on all ranks along 'i': "
TO_VARYING = TAKES + "write pbroadcast(x, 'i') for it$"
IS_VARYING = (
    "^{} over 'i' takes a value that is the same on all ranks there, but f64[2]{{i}} already varies along 'i': "
)

#: Of x, which varies along i, or of w, which does not.
COLLECTIVES = [
    (psum, lambda x, w: psum(w, "i"), TAKES + "to sum one copy per rank, write x * axis_size('i')"),
    (psum, lambda x, w: psum(np.ones(2), "i"), TAKES + "to sum one copy per rank"),
    (psum, lambda x, w: psum({"a": x, "b": [x, w]}, "i"), "x['b'][1]: " + TAKES[1:]),
    (psum, lambda x, w: psum(w, "i", axis_index_groups=[[0, 1]]), TO_VARYING),
    (pmean, lambda x, w: pmean(w, "i"), TAKES + "it is already the mean"),
    (pmax, lambda x, w: pmax(w, "i"), TAKES + "it is already the maximum"),
    (pmin, lambda x, w: pmin(w, "i"), TAKES + "it is already the minimum"),
    (all_gather, lambda x, w: all_gather(w, "i"), TO_VARYING),
    (all_gather_invariant, lambda x, w: all_gather_invariant(w, "i"), TO_VARYING),
    (psum_scatter, lambda x, w: psum_scatter(w, "i"), TO_VARYING),
    (all_to_all, lambda x, w: all_to_all(w, "i", 0, 0), TO_VARYING),
    (ppermute, lambda x, w: ppermute(w, "i", [(0, 1)]), TO_VARYING),
    (pscan, lambda x, w: pscan(w, "i"), TO_VARYING),
    (broadcast, lambda x, w: broadcast(w, "i"), TAKES + "every rank already has the root's value"),
    (broadcast_varying, lambda x, w: broadcast_varying(w, "i"), TO_VARYING),
    (reduce, lambda x, w: reduce(w, "i"), TO_VARYING),
    (gather, lambda x, w: gather(w, "i"), TO_VARYING),
    (scatter, lambda x, w: scatter(w, "i"), TAKES + "each rank can take its part itself: write pscatter over 'i'"),
    (pscatter, lambda x, w: pscatter(x, "i"), IS_VARYING + "each rank has its own value there. Remove"),
    (at_root, lambda x, w: at_root(x, "i"), IS_VARYING + "each rank has its own value there. To send them"),
    (pbroadcast, lambda x, w: pbroadcast(x, "i"), IS_VARYING + "remove these axes"),
]


@each("way", WAYS)
@each("collective, f, text", COLLECTIVES, ids=lambda row: row[0].__name__)
def test_collectives_of_the_wrong_variance(collective, f, text, way):
    text = text.format(collective.__name__)
    with pytest.raises(md.VarianceError, match=re.escape(text).replace(r"\^", "^").replace(r"\$", "$")):
        WAYS[way](explicit(f, (P("i"), P())))(X, W)


def test_a_sum_over_more_axes_than_the_value_varies_along():
    with pytest.raises(md.VarianceError, match=r"^psum over \('i', 'j'\) .* f64\[2\]\{i\} is the same .* along 'j'"):
        explicit(lambda x: psum(x, ("i", "j")), P("i"))(X)


def test_what_is_closed_over():
    """Differentiated or recorded values are traced: unmapped inputs that the user did not write down."""

    def total(vary):
        def loss(w):
            return explicit(lambda x: np.sum(x * vary(w)), P("i"), P(sum="i"))(X)

        return loss

    for run in (md.grad, md.make_tape, md.jit, lambda f: md.grad(md.jit(f))):
        with pytest.raises(md.VarianceError, match=r"multiply: .* write pbroadcast\(x, 'i'\) for the second$"):
            run(total(lambda w: w))(W)
    np.testing.assert_allclose(total(lambda w: w)(W), np.sum(X.reshape(2, -1) * W))  # a plain array is a constant
    md.testing.check_grads(total(lambda w: pbroadcast(w, "i")), (W,), order=2)


def test_axes_of_a_vmap_have_no_types():
    def f(x, w):
        def each(a):
            return psum(a, "v") + all_gather(a, "v").sum() + pmax(pbroadcast(a, "v"), "v")

        return psum(md.vmap(each, axis_name="v")(x), "i") + md.vmap(each, axis_name="v")(w)

    automatic, written = automatic_and_explicit(f, (P("i"), P()))
    np.testing.assert_array_equal(written(X, W), automatic(X, W))
    both = [
        spmd.shard_map(
            lambda x: md.vmap(lambda a: psum(a, ("i", "v")), axis_name="v", out_axes=None)(x),
            mesh=MESH,
            in_specs=P("i"),
            out_specs=P(),
            auto_pbroadcast=auto,
        )(X)
        for auto in (True, False)
    ]
    assert both == [10.0, 10.0]


def test_numbers_agree_with_anything():
    f = explicit(lambda x: psum(1, "i") * 2.0 * psum(np.where(x > 0, x, 0.0), "i") + np.float64(1), P("i"))
    np.testing.assert_array_equal(f(X), 4 * (X[:2] + X[2:]) + 1)
    f = explicit(lambda x: (psum(True, "i"), pmean(3, "i"), pmax(2, "i"), psum(reduce(True, "i"), "i")), P("i"))
    assert f(X) == (2, 3.0, 2, 2)
    np.testing.assert_array_equal(explicit(lambda x: all_gather_invariant(2.5, "i"), P("i"))(X), [2.5, 2.5])


@pytest.mark.parametrize("way", WAYS)
def test_plain_arrays_agree_with_anything(way):
    def body(x):
        ones = np.ones(2)
        terms = [
            x * ones,
            ones / x,
            np.at(ones)[0].add(x[0]),
            np.convolve(x, [1.0, 2.0, 3.0])[:2],
            np.where(x > 0, ones, x),
        ]
        return sum(terms) * (np.sin(ones) + 1)

    for around in (lambda f: f, lambda f: lambda x: md.scan(lambda c, _: (c, f(x)), 0.0, length=2)[1][0]):
        automatic, written = automatic_and_explicit(around(body), P("i"), P("i"))
        actual, expected = (WAYS[way](f)(X) for f in (written, automatic))
        if way == "make_tape":
            actual, expected = actual(X), expected(X)
        assert_trees_close(*[actual[0], expected[0]] if way == "grad" else [actual, expected])


@pytest.mark.parametrize("out_specs", [P("i"), P(sum="i"), P("i", sum="j")], ids=str)
def test_results_that_do_not_vary_as_promised(out_specs):
    entry = re.escape(f"its out_specs entry {out_specs} says that it varies there; with auto_pbroadcast=False, return")
    with pytest.raises(md.VarianceError, match=rf"the result\['a'\] has type f64\[2\]: it is the same .* {entry}"):
        explicit(lambda w: {"a": w}, P(), out_specs)(W)


def staged(f):
    """With values that are names."""
    return lambda *args: md.make_tape(f)(*args)


def test_branches():
    def f(x, w):
        return md.cond(psum(x.sum(), "i") > 0, lambda: x, lambda: w)

    message = (
        r"cond: the results f64\[2\]\{i\} of true_fun, f64\[2\] of false_fun disagree in variance: write "
        r"pbroadcast\(x, 'i'\) for that of false_fun$"
    )
    with pytest.raises(md.VarianceError, match=message):
        staged(explicit(f, (P("i"), P()), P("i")))(X, W)

    def many(x, w):
        return md.vmap(lambda flag: md.cond(flag, lambda: x, lambda: w))(np.array([True, False]))

    with pytest.raises(md.VarianceError, match=message):
        explicit(many, (P("i"), P()), P(None, "i"))(X, W)
    missing = r"cond: .* bool\[\]\{i\}, .* varies: write pbroadcast\(x, 'i'\) for %s, f64\[2\]$"
    for label, wrong in {
        "a value that false_fun closes over": lambda x, w: md.cond(x[0] > 0, lambda: x, lambda: 2 * w),
        r"operands\[1\]": lambda x, w: md.cond(x[0] > 0, lambda x, w: x, lambda x, w: w, x, w),
    }.items():
        for run in (lambda f: f, staged):
            with pytest.raises(md.VarianceError, match=missing % label):
                run(explicit(wrong, (P("i"), P()), P("i")))(X, W)
    right = lambda x, w: md.cond(x[0] > 0, lambda x, w: x, lambda x, w: w * np.ones(2), x, pbroadcast(w, "i"))  # noqa: E731
    np.testing.assert_array_equal(explicit(right, (P("i"), P()), P("i"))(np.sign(X - 2.5), W), [*W, 1, 1])


def test_a_choice_of_varying_values():
    """The predicate of a vmapped cond need not vary as they do: what chooses is not the user's operation."""

    def many(x, w):
        return md.vmap(lambda flag: md.cond(flag, lambda: x, lambda: pbroadcast(w, "i")))(np.array([True, False]))

    np.testing.assert_array_equal(
        explicit(many, (P("i"), P()), P(None, "i"))(X, W), np.stack([X, np.concatenate([W, W])])
    )


@pytest.mark.parametrize("run", [lambda f: f, staged], ids=["run", "staged"])
def test_carries(run):
    def by(loop):
        return run(explicit(loop, (P("i"), P()), P("i")))

    def message(loop, leaf):
        return (
            rf"^{loop}: {leaf} has type f64\[2\], a step returns f64\[2\]\{{i\}}; these disagree in variance: write "
            rf"pbroadcast\(x, 'i'\) for the initial {leaf}$"
        )

    with pytest.raises(md.VarianceError, match=message("scan", "init")):
        by(lambda x, w: md.scan(lambda c, _: (pbroadcast(c, "i") * x, None), w, length=2)[0])(X, W)
    with pytest.raises(md.VarianceError, match=message("fori_loop", r"init_val\['b'\]\[0\]")):
        by(lambda x, w: md.fori_loop(0, 2, lambda i, c: {"b": (x,)}, {"b": (w,)})["b"][0])(X, W)
    with pytest.raises(md.VarianceError, match=message("fori_loop", r"init_val\['b'\]")):
        by(lambda x, w: md.fori_loop(0, np.sum(w).astype(int), lambda i, c: {"b": x}, {"b": w})["b"])(X, W)
    with pytest.raises(md.VarianceError, match=message("while_loop", "init_val")):
        by(lambda x, w: md.while_loop(lambda c: np.array(True), lambda c: x, w))(X, W)
    with pytest.raises(md.VarianceError, match=r"for the step's result$"):
        by(lambda x, w: md.scan(lambda c, _: (w, None), x, length=2)[0])(X, W)


def test_a_number_is_carried():
    def f(x):
        return md.scan(lambda c, y: (c + y, None), 0.0, x)[0].reshape(1)

    g = explicit(f, P("i"), P("i"))
    np.testing.assert_array_equal(g(X), [3.0, 7.0])
    np.testing.assert_array_equal(md.make_tape(g)(X)(X)[0], [3.0, 7.0])


@pytest.mark.parametrize("outside, inside", [(True, False), (False, True), (False, False)])
def test_a_shard_map_in_an_explicit_one_is_explicit(outside, inside):
    def nested(vary):
        def columns(x, w):
            f = spmd.shard_map(
                lambda x, w: x * vary(w), in_specs=(P("j"), P()), out_specs=P("j"), auto_pbroadcast=inside
            )
            return f(x, w)

        options = {"mesh": MESH, "axis_names": {"i"}, "auto_pbroadcast": outside}
        return spmd.shard_map(columns, in_specs=(P("i"), P()), out_specs=P("i"), **options)

    message = r"^multiply: operands f64\[1\]\{i,j\} and f64\[1\] .* pbroadcast\(x, \('i', 'j'\)\) for the second$"
    for run in (lambda f: f, md.make_tape, md.jit, lambda f: lambda *xs: md.vjp(f, *xs)):
        with pytest.raises(md.VarianceError, match=message):
            run(nested(lambda w: w))(X, W[:1])
    f = nested(lambda w: pbroadcast(w, ("i", "j")))
    np.testing.assert_array_equal(f(X, W[:1]), X * W[0])
    md.testing.check_grads(f, (X, W[:1]), order=2)


def test_it_takes_types():
    with pytest.raises(ValueError, match=r"auto_pbroadcast=False requires that types agree .* check_rep=False"):
        spmd.shard_map(np.sin, mesh=MESH, in_specs=P(), out_specs=P(), check_rep=False, auto_pbroadcast=False)


# ---------------------------------------------------------------- no mistake


def test_it_is_done_as_it_is_written():
    """Every pbroadcast is one on the tape, and a psum on the way back: none is inserted, and none left out."""

    def twice(x, w):
        return psum((x * pbroadcast(w, "i") + np.sin(x) * pbroadcast(w, "i")).sum(), "i")

    def once(x, w):
        v = pbroadcast(w, "i")
        return psum((x * v + np.sin(x) * v).sum(), "i")

    for f, count in ((once, 1), (twice, 2)):
        g = explicit(f, (P("i"), P()))
        tape = md.make_tape(g)(X, W)
        assert str(tape).count("= pbroadcast(") == count
        assert "auto_pbroadcast=False" in str(tape)
        report = spmd.communication(md.grad(g, 1))(X, W)
        assert (report.counts, report.bytes) == ({"psum": 2}, 8 + count * W.nbytes)  # several are summed in one call
        md.testing.check_grads(g, (X, W), order=2)
    assert "auto_pbroadcast" not in str(
        md.make_tape(spmd.shard_map(once, mesh=MESH, in_specs=(P("i"), P()), out_specs=P()))(X, W)
    )


def test_every_rule_hands_the_option_on():
    f = explicit(lambda w, x: psum(np.sin(pbroadcast(w, "i") * x).sum(), "i"), (P(), P("i")))
    _, f_linear = md.linearize(f, W, X)
    tapes = {
        "jvp": md.make_tape(lambda w, x: md.jvp(f, (w, x), (w, x)))(W, X),
        "grad": md.make_tape(md.grad(f, (0, 1)))(W, X),
        "vmap": md.make_tape(md.vmap(f, (None, 0)))(W, np.stack([X, X])),
        "transpose": md.make_tape(lambda ct: md.linear_transpose(f_linear, W, X)(ct))(1.0),
        "jit": md.jit(md.grad(f)).program(W, X).tape,
    }
    for tape in tapes.values():
        tape.check()
        options = [e.params["auto_pbroadcast"] for e in tape.equations if e.primitive.name == "shard_map"]
        assert options
        assert not any(options)


def loss(w, x):
    """Correct as it is written, where w is invariant and x varies; its derivatives are zeros and numbers in places."""
    v = pbroadcast(w, "i")
    y = np.where(x > 0, np.tanh(x * v), x.at[0].set(1.0)) + pbroadcast(np.ones(2), "i")
    y = md.checkpoint(lambda y: np.sort(y) * v)(y) + pbroadcast(psum(y, "i"), "i")
    y, _ = md.scan(lambda c, k: (np.sin(c) * v, c), y, np.arange(3))
    y = md.cond(psum(y.sum(), "i") > 0, lambda y: y * 2, lambda y: np.cumsum(y), y)
    return psum(np.max(y) + np.prod(y) + clipped(y).sum(), "i") + np.sum(w)


@md.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, x), lambda x, ct: (np.clip(ct, -1.0, 1.0) * np.ones(2) + 0 * x,))


def automatic_and_explicit(f, in_specs, out_specs=P()):
    return [
        spmd.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs, auto_pbroadcast=auto)
        for auto in (True, False)
    ]


DERIVATIVES = {
    "grad": lambda f: md.grad(f, (0, 1)),
    "jit of grad": lambda f: md.jit(md.grad(f, (0, 1))),
    "grad of jit": lambda f: md.grad(md.jit(f), (0, 1)),
    "tape of grad": lambda f: lambda w, x: md.make_tape(md.grad(f, (0, 1)))(w, x)(w, x),
    "vmap of grad": lambda f: lambda w, x: md.vmap(md.grad(f, (0, 1)))(np.stack([w, 2 * w]), np.stack([x, x])),
    "grad of vmap": lambda f: lambda w, x: md.grad(lambda w: md.vmap(f)(w, np.stack([x, x])).sum())(np.stack([w, w])),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_what_is_correct(name):
    """Rules may insert pbroadcasts: what they do is not written by the user."""
    of = DERIVATIVES[name]
    automatic, written = automatic_and_explicit(loss, (P(), P("i")))
    assert_trees_close(of(written)(W, X), of(automatic)(W, X))


def test_second_derivatives_of_what_is_correct():
    def smooth(w, x):
        v = pbroadcast(w, "i")
        y, _ = md.scan(lambda c, k: (np.sin(c * v) * k, None), x, np.arange(1.0, 3.0))
        return psum(np.prod(np.where(x > 0, y, x)) + md.nn.logsumexp(y) + np.linalg.norm(np.tril(np.outer(y, v))), "i")

    automatic, written = automatic_and_explicit(smooth, (P(), P("i")))
    md.testing.check_grads(written, (W, X), order=2)
    transposed = [md.linear_transpose(md.linearize(f, W, X)[1], W, X)(1.0) for f in (written, automatic)]
    assert_trees_close(*transposed)
    assert_trees_close(md.hessian(written)(W, X), md.hessian(automatic)(W, X))


def test_derivatives_inside_a_body():
    def body(w, x):
        v = pbroadcast(w, "i")

        def inner(v, x):
            return np.sum(np.tanh(x * v) ** 2) + np.sort(x)[0]

        g = md.grad(inner)(v, x)
        h = md.jacfwd(md.grad(inner))(v, x)
        (t,) = md.vjp(lambda v: inner(v, x), v)[1](np.ones(()))
        u = md.linearize(lambda v: inner(v, x), v)[1](v)
        s = md.jit(md.grad(inner))(v, x) + md.vmap(lambda a, b: a * b)(v, x)
        return psum(g + t + s + h.sum(0) + u, "i")

    automatic, written = automatic_and_explicit(body, (P(), P("i")))
    assert_trees_close(written(W, X), automatic(W, X))
    assert_trees_close(md.jacrev(written)(W, X), md.jacrev(automatic)(W, X))


@pytest.mark.parametrize(
    "of",
    [md.grad, md.jit, md.checkpoint, lambda f: lambda *xs: md.jvp(f, xs, xs), lambda f: md.custom_jvp(f)],
    ids=["grad", "jit", "checkpoint", "jvp", "custom_jvp"],
)
def test_functions_in_a_body_are_checked(of):
    g = of(lambda x, w: np.sum(x * w))
    if isinstance(g, md.custom_jvp):
        g.defjvps(lambda t, out, x, w: out * 0, None)
    with pytest.raises(md.VarianceError, match="multiply: operands"):
        explicit(lambda x, w: g(x, w), (P("i"), P()), P("i"))(X, W)


def test_a_program_compiled_in_one_body_is_checked_in_another():
    product = md.jit(lambda x, w: x * w)
    for _ in range(2):
        automatic, written = automatic_and_explicit(product, (P("i"), P()), P("i"))
        np.testing.assert_array_equal(automatic(X, W), X * np.concatenate([W, W]))
        with pytest.raises(md.VarianceError, match="multiply: operands"):
            written(X, W)


@pytest.mark.parametrize("f", [
    np.tril,
    lambda x: np.quantile(x, 0.3),
    lambda x: np.quantile(x, [0.2, 0.3]),
    lambda x: x[[1, 0]],
    lambda x: x.at[[1, 0]].add(2.0),
    lambda x: np.array([[x[0, 0], 1.0], [2, x[1, 1]]]),
    lambda x: np.linspace(x[0, 0], 1.0, 4),
    lambda x: np.pad(x, 1),
    lambda x: np.polyval(x[0], 3.0),
    lambda x: np.concatenate([x[0], [1.0, 2.0]]),
])  # fmt: skip
def test_constants_that_a_function_makes_itself_are_no_mistake(f):
    x = np.arange(8.0).reshape(2, 2, 2)
    g = explicit(lambda x: f(x[0])[None], P("i"), P("i"))
    np.testing.assert_allclose(g(x), np.stack([np.asarray(md.jit(f)(block)) for block in x]))
    md.make_tape(md.grad(lambda x: np.sum(np.sin(g(x)))))(x).check()


CALLS = [r for r in TABLE if isinstance(r.f, functools.partial) and r.f.func is r.function and r.args]
CALLS = [r for r in CALLS if not any(isinstance(x, np.ndarray) for x in md.tree.leaves(list(r.f.keywords.values())))]


def called(r):
    """A call of the table in an explicit body, on arrays that all vary."""
    is_block = [isinstance(x, (np.ndarray, np.generic)) for x in r.args]

    def body(*xs):
        blocks = iter([x[0] for x in xs])
        r.f(*[next(blocks) if flag else x for x, flag in zip(r.args, is_block)])
        return 0.0

    explicit(body, P("i"))(*[np.stack([x, x]) for x, flag in zip(r.args, is_block) if flag])


def test_functions_pbroadcast_what_they_make_themselves():
    """NumPy's functions, as the table calls them, of arrays that all vary: nothing is left for the user to write."""
    assert len(CALLS) > 500
    for r in CALLS:
        called(r)


# ---------------------------------------------------------------- random programs


def written_out(program, mesh, axes, closed_over, args):
    """A program's automatic version, and that with each of its pbroadcasts written by hand: two functions of leaves."""
    sharded = program.sharded(mesh, axes, closed_over)
    structure = md.tree.structure(args)

    def automatic(*leaves):
        return sharded(*md.tree.unflatten(structure, leaves))

    return automatic, replayed(automatic, *md.tree.leaves(args))


def by_use(tape):
    """The tape with its inputs in the order of their first use: constants come in the order of their discovery."""
    uses = [a for eqn in tape.equations for a in eqn.inputs]
    first = {id(a): -k for k, a in enumerate(reversed(uses))}
    return md.Tape(sorted(tape.inputs, key=lambda v: first.get(id(v), 1)), tape.equations, tape.outputs)


def check_written_out(program, mesh, axes, closed_over, every=True):
    size = math.prod(mesh.shape[a] for a in axes)
    args = example(program, rows=2 * size, seed=7)
    leaves = md.tree.leaves(args)
    automatic, written = written_out(program, mesh, axes, closed_over, args)
    numbers = tuple(range(len(leaves)))
    assert_trees_close(
        md.value_and_grad(written, numbers)(*leaves), md.value_and_grad(automatic, numbers)(*leaves), rtol=1e-12
    )
    (one,), (two,) = (md.make_tape(f)(*leaves).equations for f in (automatic, written))
    assert one.params["body"] == two.params["body"]
    assert (one.params["auto_pbroadcast"], two.params["auto_pbroadcast"]) == (True, False)
    gradients = [md.make_tape(md.grad(f, numbers))(*leaves) for f in (automatic, written)]
    for tape in gradients:
        tape.check()
        assert len(tape.equations) == len(gradients[0].equations)
    fewer, sums = ((report.counts.get("psum", 0), report.bytes) for report in map(spmd.communication, gradients))
    assert fewer[0] <= sums[0]  # those that are written stay where they are
    if fewer == sums and not LOOPS.intersection(program.steps):  # from loops, some are hoisted
        for one, two in zip(*[tape.equations for tape in gradients]):
            assert by_use(one.params["body"]) == by_use(two.params["body"])
    if LOOPS.intersection(program.steps):  # a loop takes what its carry starts as, pbroadcast or not
        return
    for wrong in without_one(automatic, *leaves):
        with pytest.raises(md.VarianceError, match=r"pbroadcast|axis_size|remove these axes"):
            wrong(*leaves)


@settings(deadline=None, max_examples=15)
@given(programs, placements())
@known_failure(Program(["gather invariantly", "gather invariantly"]), (MESHES[0], ("i",)))
@known_failure(Program(["a carry that is pbroadcast", "branches"]), (MESHES[0], ("i",)))
def test_programs_written_out(program, placement):
    check_written_out(program, *placement, closed_over=False)


@each("name", STEPS)
@each("closed_over", [False, True])
def test_each_step_written_out(name, closed_over):
    check_written_out(Program([name, "scale by a parameter"]), MESHES[3], ("j", "i"), closed_over)
