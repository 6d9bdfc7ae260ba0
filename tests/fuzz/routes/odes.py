"""Random differential equations: reverse mode against forward mode, and against the matrix exponential's derivative."""

from __future__ import annotations

import random

EXPLICIT, IMPLICIT = ["RK45", "RK23", "DOP853"], ["Radau", "BDF", "LSODA", "odeint"]

#: Two right-hand sides: a linear one, whose solution is known, and one that is not; M is the matrix A + p[0] B.
RATES = {
    "linear": "M @ y",
    "forced": "M @ (y - np.cos(t)) + p[1] * np.sin(t * y)",
    "saturating": "M @ np.tanh(y) + p[1] * np.cos(3 * t)",
    "quadratic": "M @ y - p[1] ** 2 * y * np.abs(y) ** 2",
}


def odes(rng: random.Random) -> str:
    n, kind = rng.randint(1, 4), rng.choice(list(RATES))
    method = rng.choice(EXPLICIT + IMPLICIT)
    is_complex = method not in ("Radau", "LSODA", "odeint") and rng.random() < 0.3
    decades = 3 if method in IMPLICIT else 2
    rates = [-(10 ** rng.uniform(-1, decades)) for _ in range(n)]
    times = sorted(rng.uniform(0.1, 2) for _ in range(rng.randint(1, 4)))
    weighted = [rng.random() < 0.7 for _ in times]
    times = [0.0, *times]
    if kind != "quadratic" and rng.random() < 0.2:
        times, rates = [-s for s in times], [-k for k in rates]
    tolerance = rng.choice([1e-4, 1e-6] if method == "RK23" else [1e-4, 1e-6, 1e-8])
    transform = rng.choice(["not_jitted", "not_jitted", "md.jit"])
    return f"""
        import scipy.integrate, scipy.linalg
        from minidiff.scipy import integrate
        rng = numpy.random.default_rng({rng.randrange(10**6)})
        n, tolerance = {n}, {tolerance}
        q = numpy.linalg.qr(rng.normal(size=(n, n)))[0] + 0.1 * rng.normal(size=(n, n))
        A, B = q @ numpy.diag({rates}) @ numpy.linalg.inv(q), rng.normal(size=(n, n))
        y0, p, times = rng.normal(size=n), rng.normal(size=2), numpy.array({times})
        if {is_complex}:
            A, y0 = A + 1j * rng.normal(size=(n, n)), y0 + 1j * rng.normal(size=n)
        weights = rng.normal(size=(len(times) - 1, n)) * numpy.array({weighted})[:, None]

        def rate(t, y, p):
            M = A + p[0] * B
            return {RATES[kind]}

        def loss(y0, p, times, rtol=tolerance):
            tolerances = dict(rtol=rtol, atol=rtol)
            if {method!r} == "odeint":
                ys = integrate.odeint(rate, y0, times, (p,), tfirst=True, mxstep=10**5, **tolerances)[1:]
            else:
                ys = integrate.solve_ivp(rate, (times[0], times[-1]), y0, {method!r}, times[1:], (p,), **tolerances).y.T
            return np.sum(weights * np.real(ys))
        {_checks(kind, method, rates, transform)}
    """


def _checks(kind: str, method: str, rates: list[float], transform: str) -> str:
    """Lines that compare gradients of `loss` with pushed tangents, and those of linear rates with exponentials."""
    return f"""def close(found, expected):
            for x, y, factor in zip(found, expected, (1, 1, max(1, fastest))):
                scale = max(1, abs(y).max(), abs(weights).sum())
                agree(x, y, rtol=0, atol=factor * allowed * scale)

        # A gradient reads the solution between steps, where SciPy controls no error: explicit methods may be far off.
        allowed, args = 100 * tolerance, (y0, p, times)
        if {method!r} in {EXPLICIT}:
            coarse, exact = [
                scipy.integrate.solve_ivp(
                    lambda t, y: rate(t, y, p), times[[0, -1]], y0, of, rtol=r, atol=r, dense_output=True
                )
                for of, r in (({method!r}, tolerance / 10), ("DOP853", 1e-12))
            ]
            between = (coarse.t[1:] + coarse.t[:-1]) / 2
            allowed += 10 * abs(coarse.sol(between) - exact.sol(between)).max()
        found = {transform}(md.grad(loss, (0, 1, 2)))(*args)
        fastest = {max(map(abs, rates))}  # a moving time turns an error of the state into one of its rate
        ts = rng.normal(size=n) + 0 * y0, rng.normal(size=2), rng.normal(size=len(times)) / max(1, fastest)
        pushed = md.jvp(lambda *args: loss(*args, rtol=tolerance / 10), args, ts)[1]
        dot = sum(np.real(np.sum(x * t)) for x, t in zip(found, ts))
        size = sum(abs(np.sum(abs(x * t))) for x, t in zip(found, ts))
        agree(dot, pushed, rtol=0, atol=allowed * max(1, size, abs(weights).sum()))
        if {kind == "linear"}:
            M = A + p[0] * B
            exps = [scipy.linalg.expm_frechet(M * s, B * s) for s in times[1:] - times[0]]
            ends = [(w @ e, w @ d @ y0, w @ M @ e @ y0) for w, (e, d) in zip(weights, exps)]
            of_times = numpy.array([-sum(x.real for _, _, x in ends), *[x.real for _, _, x in ends]])
            expected = sum(x for x, _, _ in ends), numpy.array([sum(x for _, x, _ in ends).real, 0.0]), of_times
            close(found, expected)
    """
