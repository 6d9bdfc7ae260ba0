"""Matrices with equal and nearly equal eigenvalues and singular values, norms at 0, and singular determinants."""

from __future__ import annotations

import itertools
import random

#: Functions of a Hermitian matrix x, weighted by c: through values and vectors, and in another way.
OF_EIGENVECTORS = {
    "v * np.exp(w) @ adjoint(v)": "linalg.expm(x)",
    "v * np.exp(w) @ np.linalg.inv(v)": "linalg.expm(x)",
    "v * (1 + w**2) @ adjoint(v)": "np.eye(len(x)) + x @ x",
    "v * (w - 1) @ adjoint(v)": "x - np.eye(len(x))",
    "v * np.sqrt(w + 9) @ adjoint(v)": "linalg.matrix_function(lambda w: (w + 9)**.5, lambda w: .5 * (w + 9)**-.5, x)",
    "v[:, : len(first)] @ adjoint(v[:, : len(first)])": "projector(x, first)",
    "v[:, len(first) :] * w[len(first) :] @ adjoint(v[:, len(first) :])": "x @ (np.eye(len(x)) - projector(x, first))",
    "np.diag(v[0])": "v00(x)",
    "np.sum(w**3) * np.eye(len(x))": "np.trace(x @ x @ x) * np.eye(len(x))",
    "(v * w @ adjoint(v) - x) @ (v * w @ adjoint(v) - x)": "0 * x",
}
OF_SINGULAR_VECTORS = {
    "u @ vh": "linalg.polar(x)[0]",
    "u * s @ vh": "x",
    "u * s**3 @ vh": "x @ adjoint(x) @ x",
    "np.sum(s**2) * np.ones(x.shape)": "np.sum(np.abs(x) ** 2) * np.ones(x.shape)",
    "(u * s @ vh - x) * (u * s @ vh - x)": "0 * x",
}
#: Smooth functions with roots, or determinants, and what is the same.
WITH_ROOTS = {
    "np.linalg.norm(x) ** 2": "np.sum(x * x)",
    "np.linalg.norm(x, axis=0) @ np.linalg.norm(x, axis=0)": "np.sum(x * x)",
    "np.sum(np.hypot(x, 2 * x) ** 2)": "5 * np.sum(x * x)",
    "np.std(x) ** 2": "np.var(x)",
    "np.sum(np.abs(x * (1 + 2j)) ** 2)": "5 * np.sum(x * x)",
    "np.exp(-np.linalg.norm(x - x.T) ** 2)": "np.exp(-np.sum((x - x.T) ** 2))",
    "np.linalg.norm(x, 'fro') ** 4": "np.sum(x * x) ** 2",
}
DETERMINANTS = {
    "np.linalg.det(x)": "polynomial(x)",
    "np.linalg.det(x @ x + x) ** 2": "polynomial(x @ x + x) ** 2",
    "np.sin(np.linalg.det(x - x.T))": "np.sin(polynomial(x - x.T))",
}
HELPERS = """
        import itertools, math, warnings
        from minidiff.scipy import linalg
        adjoint = lambda x: np.conjugate(np.swapaxes(x, -1, -2))
        symmetric = lambda x: (x + adjoint(x)) / 2
        rng = numpy.random.default_rng({seed})
        draw = lambda *shape: rng.normal(size=shape) + (1j * rng.normal(size=shape) if {is_complex} else 0)
        unitary = lambda n: numpy.linalg.qr(draw(n, n))[0] if {rotated} else numpy.eye(n) + (0j if {is_complex} else 0)
        def right_or_refused(actual, expected, **tolerances):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter('always')
                found = md.tree.map(numpy.array, actual())
            if any(numpy.isnan(x).any() for x in md.tree.leaves(found)):
                assert any('NaN' in str(m.message) for m in caught), 'a NaN without a warning'
                return
            agree(found, expected(), **tolerances)
        def polynomial(x):
            sign = lambda p: round(numpy.linalg.det(numpy.eye(len(p))[list(p)]))
            orders = itertools.permutations(range(len(x)))
            return sum(sign(p) * math.prod(x[i, j] for i, j in enumerate(p)) for p in orders)
"""


def _values(rng: random.Random, n: int) -> tuple[list[float], int]:
    """Values in ascending order, some equal or nearly so, and how many are in the first block."""
    gap = rng.choice([0.0, 0.0, 0.0, 1e-15, 1e-9, 1e-4])
    values, k = [], rng.randint(1, n)
    for block in range(n):
        start = float(rng.choice([0, 1, 2])) if not block else values[-1] + rng.choice([0.5, 1.0, 2.0])
        values += [start + i * gap for i in range(k if not block else rng.randint(1, 2))]
    values = values[:n]
    # Beside exp(w) such differences are rounding, which no rule sees.
    return (values if values[-1] > 0.1 else [0.0] * n), k


def _nearest(values: list[float]) -> float:
    """The smallest distance of values that are not equal to rounding."""
    return min([b - a for a, b in itertools.pairwise(values) if b - a > 1e-14] or [1.0])


#: The projector on the eigenvectors of the first eigenvalues.
PROJECTOR = """\
        def projector(x, first):
            if len(first) == len(x):
                return np.eye(len(x)) + 0 * x
            middle = (values[len(first) - 1] + values[len(first)]) / 2
            y = x - middle * np.eye(len(x))
            for _ in range(30):  # Newton's iteration for the sign
                y = (y + np.linalg.inv(y)) / 2
            return (np.eye(len(x)) - y) / 2
"""


def eigenvectors(rng: random.Random) -> str:
    n = rng.randint(1, 4)
    values, k = _values(rng, n)
    through = rng.choice(list(OF_EIGENVECTORS))
    is_complex, rotated = rng.random() < 0.4, rng.random() < 0.6
    wrapped = rng.choice(["h", "md.jit(h)", "md.checkpoint(h)", "lambda x: md.vmap(h)(x[None])[0]"])
    near = _nearest(values)
    scale = rng.choice([1.0, 1e-3, 1e3])
    return f"""{HELPERS.format(seed=rng.randrange(10**6), is_complex=is_complex, rotated=rotated)}
        values, first = numpy.array({values}), list(range({k}))
        q = unitary({n})
        a, c, t = symmetric(q * values @ adjoint(q)), draw({n}, {n}), symmetric(draw({n}, {n}))
{PROJECTOR}        def f(x):
            x = symmetric(x)
            w, v = np.linalg.eigh(x)
            return {scale} * np.real(np.sum(c * ({through})))
        def g(x):
            x = symmetric(x)
            return {scale} * np.real(np.sum(c * ({OF_EIGENVECTORS[through]})))
        h = f
        f = {wrapped}
        tolerances = dict(rtol=1e-6, atol={scale} * (1e-8 + 1e-13 / {near}))
        if 'v00' in {OF_EIGENVECTORS[through]!r}:
            tied = {k} > 1 and values[1] - values[0] < 1e-14
            if tied:
                assert numpy.isnan(md.grad(f)(a)).any()
        else:
            right_or_refused(lambda: md.grad(f)(a), lambda: md.grad(g)(a), **tolerances)
            if {values[-1]} > 1e-3:  # forward mode does not see that exp(w) is large beside differences of w
                right_or_refused(lambda: md.jvp(f, (a,), (t,))[1], lambda: md.jvp(g, (a,), (t,))[1], **tolerances)
            if {near} > 1e-3 and {values[-1]} > 1e-3:
                second = lambda f: md.jvp(md.grad(f), (a,), (t,))[1]
                right_or_refused(lambda: second(f), lambda: second(g), rtol=1e-5, atol={scale} * 1e-6)
    """


def singular_vectors(rng: random.Random) -> str:
    m, n = rng.choice([(1, 1), (2, 2), (3, 3), (4, 2), (2, 4), (3, 2)])
    values, _ = _values(rng, min(m, n))
    values = values[::-1]
    through = rng.choice(list(OF_SINGULAR_VECTORS))
    near = _nearest(values[::-1])
    full = rng.random() < 0.5
    # The polar factor of a singular matrix is not determined, and has no derivative.
    singular = through == "u @ vh" and values[-1] < 1e-3
    return f"""{HELPERS.format(seed=rng.randrange(10**6), is_complex=rng.random() < 0.4, rotated=rng.random() < 0.6)}
        values, k = numpy.array({values}), {min(m, n)}
        a, c, t = unitary({m})[:, :k] * values @ adjoint(unitary({n})[:, :k]), draw({m}, {n}), draw({m}, {n})
        def f(x):
            u, s, vh = np.linalg.svd(x, full_matrices={full})
            u, vh = u[:, :k], vh[:k]
            return np.real(np.sum(c * ({through})))
        def g(x):
            return np.real(np.sum(c * ({OF_SINGULAR_VECTORS[through]})))
        h = f
        f = {rng.choice(["h", "md.jit(h)", "md.checkpoint(h)"])}
        if not {singular}:
            tolerances = dict(rtol=1e-6, atol=1e-8 + 1e-13 / {near})
            right_or_refused(lambda: md.grad(f)(a), lambda: md.grad(g)(a), **tolerances)
    """


def roots(rng: random.Random) -> str:
    through, same = rng.choice([*WITH_ROOTS.items(), *DETERMINANTS.items()])
    n, rank = rng.choice([(2, 2), (3, 3), (3, 2), (3, 1), (2, 1), (2, 0), (3, 0)])
    point = rng.choice(["b @ b.T", "b @ rng.normal(size=b.T.shape)", f"numpy.ones(({n}, {n})) * {rng.choice([0, 1])}"])
    order = rng.choice(["md.grad", "md.hessian"])
    wrapped = rng.choice(["{d}(f)", "md.jit({d}(f))", "lambda x: md.vmap({d}(f))(x[None])[0]", "md.jacrev(md.grad(f))"])
    return f"""{HELPERS.format(seed=rng.randrange(10**6), is_complex=False, rotated=True)}
        b = rng.normal(size=({n}, {rank}))
        x = {point}
        f, g = lambda x: {through}, lambda x: {same}
        derivative = lambda f: {wrapped.format(d=order)}
        right_or_refused(lambda: derivative(f)(x), lambda: derivative(g)(x), rtol=1e-7, atol=1e-8)
    """


def ties(rng: random.Random) -> str:
    """A program of one of these kinds."""
    return rng.choice([eigenvectors, eigenvectors, singular_vectors, roots])(rng)
