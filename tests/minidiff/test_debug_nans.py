"""debug_nans raises at the operation that makes a NaN or an infinity, and nowhere else."""

import os
import subprocess
import sys
import threading

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum, psum_scatter
from spmd import P
from tests import PATIENCE
from tests.checks.samples import each

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")
X = numpy.array([1.0, 0.0, 2.0, 3.0])
Y = numpy.array([1.0, 2.0, 3.0, 0.0])  # rank 1 has the zero
INF, NAN = "produced an infinity, and all operands are finite", "produced a NaN, and no operand has one"


def log_of_zero(x):
    return np.log(np.sin(x) * 1.0).sum()


def root_of_zero(x):
    return np.sqrt(x).sum()  # its derivative is not finite


def difference_of_infinities(x):
    y = np.where(False, x, -numpy.inf)
    return (y - np.max(y)).sum()


def growing(x):
    return md.scan(lambda c, _: (np.square(c), None), 10 * x[3], None, length=12)[0]


def on_ranks(f, **options):
    body = spmd.shard_map(lambda x: np.stack([f(x)]), mesh=MESH, in_specs=P("i"), out_specs=P("i"), **options)
    return lambda x: body(x).sum()


FORWARD = {
    "grad": (md.grad, log_of_zero, rf"log of f64\[4\] {INF}"),
    "vjp": (lambda f: lambda x: md.vjp(f, x), log_of_zero, rf"log of f64\[4\] {INF}"),
    "jvp": (lambda f: lambda x: md.jvp(f, (x,), (x,)), log_of_zero, rf"log of f64\[4\] {INF}"),
    "jvp of root": (lambda f: lambda x: md.jvp(f, (x,), (x + 1,)), root_of_zero, f"the derivative of sqrt of .* {INF}"),
    "vmap": (lambda f: lambda x: md.vmap(f)(x[None]), log_of_zero, rf"log of f64\[1,4\] {INF}"),
    "jit": (md.jit, log_of_zero, rf"log of f64\[4\] {INF}"),
    "grad of jit": (lambda f: md.grad(md.jit(f)), log_of_zero, rf"log of f64\[4\] {INF}"),
    "checkpoint": (lambda f: md.grad(md.checkpoint(f)), log_of_zero, rf"log of f64\[4\] {INF}"),
    "scan": (md.grad, growing, rf"square of f64\[\] {INF}"),
    "scan in jit": (md.jit, growing, rf"square of f64\[\] {INF}"),
    "cond": (lambda f: md.jit(lambda x: md.cond(x[3] > 0, f, np.sum, x)), log_of_zero, rf"log of f64\[4\] {INF}"),
    "NaN": (md.grad, difference_of_infinities, rf"subtract of f64\[4\] and f64\[\] {NAN}"),
    "shard_map": (on_ranks, log_of_zero, rf"log of f64\[2\]{{i}} {INF}"),
    "jit of shard_map": (lambda f: md.jit(on_ranks(f)), log_of_zero, rf"log of f64\[2\]{{i}} {INF}"),
    "untyped": (lambda f: on_ranks(f, check_rep=False), log_of_zero, rf"log of f64\[2\] {INF}"),
}
BACKWARD = {
    "grad": md.grad,
    "vjp": lambda f: lambda x: md.vjp(f, x)[1](1.0),
    "jit of grad": lambda f: md.jit(md.grad(f)),
    "grad of jit": lambda f: md.grad(md.jit(f)),
    "checkpoint": lambda f: md.grad(md.checkpoint(f)),
    "cond": lambda f: md.grad(lambda x: md.cond(x[0] > 0, f, np.sum, x)),
    "scan": lambda f: md.grad(lambda x: md.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0]),
    "vmap": lambda f: lambda x: md.vmap(md.grad(f))(x[None]),
    "shard_map": lambda f: md.grad(on_ranks(f)),
    "in shard_map": lambda f: spmd.shard_map(md.grad(f), mesh=MESH, in_specs=P("i"), out_specs=P("i")),
    "jit of shard_map": lambda f: md.jit(md.grad(on_ranks(f))),
    "sharded": lambda f: lambda x: md.grad(f)(spmd.distribute(x, MESH, P("i"))),
}


@each("name", FORWARD)
def test_forward(name):
    transformation, f, message = FORWARD[name]
    ranks = "shard_map" in name or name == "untyped"
    where = r", on rank 1 at mesh coordinates \(i,\) = \(1,\)$" if ranks else ""
    with md.debug_nans(), pytest.raises(FloatingPointError, match=rf"{message}: in the forward pass of .*{where}") as e:
        transformation(f)(Y if ranks else X)
    line = "square" if f is growing else "log" if f is log_of_zero else "sqrt" if f is root_of_zero else "np.max"
    assert "test_debug_nans.py:" in str(e.value) and line in str(e.value)


@each("name", BACKWARD)
def test_backward(name):
    ranks = "shard" in name
    where = r", on rank 1 at mesh coordinates \(i,\) = \(1,\)$" if ranks else ""
    place = r"test_debug_nans\.py:\d+: return np\.sqrt\(x\)\.sum\(\)"
    with md.debug_nans(), pytest.raises(FloatingPointError, match=rf"{INF}: in the backward pass of {place}.*{where}"):
        BACKWARD[name](root_of_zero)(Y if ranks else X)


def masked(x):
    scores = np.where(x > 0, x, -numpy.inf)
    weights = np.exp(scores - np.max(scores))
    return (x * weights / weights.sum()).sum() + np.maximum(x, -numpy.inf).sum() + np.min(x, initial=numpy.inf)


@pytest.mark.parametrize("transformation", [lambda f: f, md.jit, md.grad, lambda f: md.jit(md.grad(f)), md.checkpoint])
def test_what_enters_as_a_constant_is_no_error(transformation):
    with md.debug_nans():
        results = transformation(masked)(X)
    numpy.testing.assert_allclose(results, transformation(masked)(X))


def test_nans_alone():
    with md.debug_nans(inf=False):
        assert numpy.isinf(md.grad(root_of_zero)(X)[1]) and numpy.log(X)[1] == -numpy.inf
        with pytest.raises(FloatingPointError, match=NAN):
            md.jit(difference_of_infinities)(X)


def test_plain_arrays():
    """NumPy alone reports errors outside of this library."""
    with md.debug_nans(), pytest.raises(FloatingPointError, match="divide by zero encountered in log"):
        np.log(X)
    with md.debug_nans(), pytest.raises(FloatingPointError, match=rf"subtract of f64\[4\] and f64\[\] {NAN}"):
        md.jit(lambda x, c: x - c)(numpy.full(4, numpy.inf), numpy.inf)


@pytest.mark.parametrize(
    ("x", "ranks"),
    [([6e4, 6e4], "rank 0 .*, rank 1 "), ([numpy.inf, 1.0], None), ([numpy.inf, -numpy.inf], "rank 0 .*, rank 1 ")],
)
def test_sums_over_ranks(x, ranks):
    """A sum is compared with the operands of all ranks."""
    total = spmd.shard_map(lambda x: psum(x, "i"), mesh=MESH, in_specs=P("i"), out_specs=P())
    with md.debug_nans():
        if ranks is None:
            assert numpy.isinf(total(numpy.float16(x)))
        else:
            with pytest.raises(FloatingPointError, match=rf"psum of f16\[1\]{{i}} produced .*, on {ranks}"):
                total(numpy.float16(x))
        parts = spmd.shard_map(lambda x: psum_scatter(x[0], "i")[None], mesh=MESH, in_specs=P("i"), out_specs=P("i"))
        assert numpy.isinf(parts(numpy.array([[1.0, 2.0], [3.0, numpy.inf]]))[1])


def test_it_is_off_again():
    for _ in range(2):
        with pytest.raises(FloatingPointError), md.debug_nans():
            md.grad(log_of_zero)(X)
        with numpy.errstate(all="ignore"):
            assert numpy.isinf(md.grad(root_of_zero)(X)[1]) and md.jit(log_of_zero)(X) == -numpy.inf
    assert type(md.core.interpreter.current_interpreter()) is md.core.interpreter.Evaluate


def test_it_is_on_in_one_thread():
    results = []
    with md.debug_nans():
        thread = threading.Thread(target=lambda: results.append(md.grad(lambda x: md.grad(np.square)(x))(3.0)))
        thread.start()
        thread.join()
    assert results == [2.0]


def test_it_is_not_entered_inside():
    def f(x):
        with md.debug_nans():
            return x

    for run in (md.grad, md.jit, lambda f: spmd.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P())):
        with pytest.raises(RuntimeError, match=r"debug_nans .* around the outermost call"):
            run(f)(1.0)


def test_leaked_values_are_told():
    saved = []
    with md.debug_nans():
        md.grad(lambda x: saved.append(x) or x)(1.0)
        for use in (lambda x: x + 1.0, np.sin, lambda x: np.sum(x)):
            with pytest.raises(md.LeakedTracerError):
                use(saved[0])


PROGRAM = """
import threading, numpy, minidiff as md, minidiff.numpy as np
def run():
    try:
        md.grad(np.sqrt)(0.0)
    except FloatingPointError as error:
        print(error)
    else:
        print("nothing")
run()
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(("value", "expected"), [("1", "the derivative of sqrt"), ("0", "nothing")])
def test_environment_variable(value, expected):
    environment = {**os.environ, "MINIDIFF_DEBUG_NANS": value}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(line.startswith(expected) for line in lines), done
