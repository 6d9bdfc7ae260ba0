"""Messages that say what is wrong in the user's terms: for SciPy's functions, threads, rules, indices and keywords."""

import functools
import inspect
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import scipy.integrate
import scipy.linalg
import scipy.optimize
import scipy.stats

import minidiff as md
import minidiff.numpy as np
from tests.checks.samples import check_each, check_raises, each

A, v = numpy.array([[2.0, 1.0], [1.0, 3.0]]), numpy.array([0.3, 0.6])
SHAPES = {
    "beta": (1.0, 2.0),
    "binom": (3, 0.4),
    "bernoulli": (0.4,),
    "chi2": (2.0,),
    "gamma": (2.0,),
    "poisson": (2.0,),
}
SHAPES |= {"t": (3.0,), "dirichlet": (numpy.array([1.0, 2.0]),)}
METHODS = ("pdf", "logpdf", "pmf", "logpmf", "cdf", "sf", "logcdf", "logsf")


def refused(f, x, transformation, expected):
    check_raises(lambda: transformation(lambda x: f(x))(x), f"TracerError: {expected}")


@each("transformation", [md.grad, md.jit, md.vmap], ids=lambda t: t.__name__)
@each("frozen", [False, True], ids=str)
def test_distributions_of_scipy(transformation, frozen):
    samples = []
    for name in md.scipy.stats.__all__:
        theirs, several = getattr(scipy.stats, name), name in ("dirichlet", "multivariate_normal")
        x = numpy.stack([v, v]) if several and transformation is md.vmap else v if several else numpy.float64(0.5)
        x = numpy.ones(2) if transformation is md.vmap and not several else x
        owner = theirs(*SHAPES.get(name, ())) if frozen else theirs
        args = () if frozen else SHAPES.get(name, ())
        for method in METHODS:
            if hasattr(getattr(md.scipy.stats, name), method) and hasattr(owner, method):
                call = lambda x, owner=owner, method=method, args=args: getattr(owner, method)(x, *args)  # noqa: E731
                text = rf"scipy.stats.{name}.{method} is not .*: write md.scipy.stats.{name}.{method}$"
                samples.append((f"{name}.{method}", functools.partial(refused, call, x, transformation, text)))
    assert len(samples) > 80
    check_each(samples)


def test_other_functions_of_scipy():
    ode = lambda y, t: -y  # noqa: E731
    for f, x, expected in (
        (
            scipy.stats.norm.interval,
            0.5,
            "scipy.stats.norm.interval .*: md.scipy.stats.norm has cdf, isf, logcdf, logpdf, logsf, pdf, ppf, sf",
        ),
        (scipy.stats.norm.ppf, 0.5, "write md.scipy.stats.norm.ppf"),
        (scipy.stats.norm(0.0, 1.0).logpdf, 0.5, "scipy.stats.norm.logpdf .* write md.scipy.stats.norm.logpdf"),
        (lambda x: scipy.stats.norm.logpdf(0.5, x), 0.5, "write md.scipy.stats.norm.logpdf"),
        (scipy.stats.zscore, v, "scipy.stats.zscore .*: write it in NumPy's functions"),
        (lambda x: scipy.linalg.solve_sylvester(x, A, A), A, "write md.scipy.linalg.solve_sylvester"),
        (lambda x: scipy.integrate.odeint(ode, 1.0, x), v, "write md.scipy.integrate.odeint"),
        (lambda x: scipy.integrate.odeint(ode, x, v), 0.5, "write md.scipy.integrate.odeint"),
        (lambda x: scipy.integrate.quad(lambda t: t, 0, x), 0.5, "scipy.integrate.quad .*: write it in NumPy's"),
        (lambda x: scipy.optimize.minimize(lambda y: ((y - 1) ** 2).sum(), x), v, "write md.scipy.optimize.minimize"),
        (lambda x: scipy.optimize.root(lambda y: y - 1, x), v, "write md.scipy.optimize.root"),
        (scipy.linalg.svd, A, "write np.linalg.svd"),
    ):
        refused(f, x, md.grad, expected)


def test_a_function_that_scipy_calls_may_have_mistakes_of_its_own():
    """It transforms within SciPy's function, which is not what refuses the traced value."""

    def loss(w):
        return float(w[0]) * w[1]

    with pytest.raises(md.TracerError, match=r"^float\(\) of a value that is being differentiated"):
        scipy.optimize.minimize(md.value_and_grad(loss), v, jac=True)


def test_threads():
    def f(x):
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda i: np.sin(x) * i, range(3)))

    for transformation in (md.grad, md.jit, lambda f: lambda x: md.vmap(f)(numpy.ones(2))):
        check_raises(
            lambda t=transformation: t(f)(1.0), "LeakedTracerError: .* which is still running: in another thread"
        )
    stored = []
    md.grad(lambda x: stored.append(x) or x)(1.0)
    check_raises(lambda: stored[0] + 1, "LeakedTracerError: .* It was stored somewhere")
    with ThreadPoolExecutor(2) as pool:  # each transforms within
        assert [*pool.map(md.grad(lambda x: x * x), [1.0, 2.0])] == [2.0, 4.0]


def test_rules_that_return_a_value_of_the_forward_pass():
    @functools.partial(md.custom_vjp, nondiff_argnums=(0,))
    def scaled(s, p):
        return s * p

    def forward(s, p):
        return 0.0 * p, ()

    def backward(s, residuals, ct):
        return (s,)

    scaled.defvjp(forward, backward)
    f = md.grad(lambda p: md.jit(lambda s, p: scaled(s, p))(0.2, p))
    check_raises(lambda: f(0.1), "LeakedTracerError: backward, the backward rule of scaled, runs in the backward pass")
    stored = []
    md.jit(lambda x: stored.append(x) or x)(1.0)
    for rules in ((lambda p: (stored[0], ()), lambda r, ct: (ct,)), (lambda p: (p, ()), lambda r, ct: (stored[0],))):
        same = md.custom_vjp(lambda p: p)
        same.defvjp(*rules)
        check_raises(
            lambda same=same: md.grad(same)(1.0), "LeakedTracerError: <lambda>, the (forward|backward) rule of"
        )
    same = md.custom_jvp(lambda p: p)
    same.defjvp(lambda primals, tangents: (primals[0], stored[0]))
    check_raises(lambda: md.jvp(same, (1.0,), (1.0,)), "LeakedTracerError: <lambda>, the jvp rule of")


def test_an_index_into_a_plain_array():
    rows, numbers = numpy.array([0, 2]), numpy.arange(3.0)
    for f in (md.vmap(lambda i: numbers[i]), md.jit(lambda i: numbers[i])):
        check_raises(lambda f=f: f(rows), r"TracerError: a traced value \(i64.*write np.take\(a, x\)")
    numpy.testing.assert_array_equal(md.vmap(lambda i: np.take(numbers, i))(rows), [0.0, 2.0])
    assert md.grad(lambda x: numbers[np.argmax(np.stack([x, 2 * x]))] * x)(3.0) == 1.0  # a concrete index


def test_keywords_of_recorded_functions():
    f = lambda x, *, q, p=1.0: x + q * p  # noqa: E731
    tape = md.make_tape(f)(1.0, q=numpy.ones(2), p=3.0)
    assert [str(t) for t in tape.in_types] == ["f64[]", "f64[]", "f64[2]"]  # x, and the keywords in order
    numpy.testing.assert_array_equal(tape(1.0, 3.0, numpy.ones(2))[0], [4.0, 4.0])
    assert str(tape) == str(md.make_tape(lambda x, p, q: f(x, q=q, p=p))(1.0, 3.0, numpy.ones(2)))
    assert md.eval_shape(f, 1.0, q=2.0).shape == ()
    assert inspect.signature(md.make_tape(f)) == inspect.signature(f)
    check_raises(lambda: md.make_tape(f)(1.0, q=2.0, r=1.0), "TypeError: .*unexpected keyword argument 'r'")


def test_steps_of_differences():
    """The best step is finite and positive where a term of the truncation error or the value is 0."""
    for f, x in ((np.sin, 0.0), (np.sin, numpy.pi), (np.exp, 1.0), (np.cos, 0.5), (lambda x: x**3 + x, 0.0)):
        errors = md.numerical.errors(f, x)
        for scheme, step in errors.optimal.items():
            assert 1e-12 < step < 1e-2, (scheme, step)
            size = getattr(errors, scheme)
            assert size[numpy.argmin(abs(errors.steps - step))] <= max(numpy.median(size), 1e-15)
    assert md.numerical.errors(lambda x: 3.0 * x, 1.0).optimal["central"] == numpy.inf  # no truncation error at all
