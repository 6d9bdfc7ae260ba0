"""`scipy.integrate`, differentiable: initial value problems, solved by SciPy's adaptive methods.

The solver runs as one operation that calls SciPy, so it works under `jit`, `vmap` and in the body of a `shard_map`,
where each rank takes its own steps; the right-hand side must not communicate. It is traced once, and may close over
traced values. The solution is differentiable in y0, the times and these values.

Forward mode integrates the tangents together with y. Reverse mode integrates y again, keeps the polynomials between the
steps (SciPy's dense output), and integrates the adjoint backward along them: y itself never runs backward, which is
unstable where solutions decay. Both are chains of differential equations, each of which reads the solutions of
earlier ones. The derivative of a chain is a chain, so there are derivatives of every order.

Sources: L. S. Pontryagin et al., "The mathematical theory of optimal processes", 1962 (the Hamiltonian of a chain);
A. C. Hindmarsh et al., "SUNDIALS", 2005 (adjoints that read the forward solution, and separate integrals).
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import scipy.integrate

from minidiff import tree
from minidiff.api.derivatives import grad, jvp
from minidiff.api.recording import eval_shape
from minidiff.api.vmap import vmap
from minidiff.control_flow.custom_rules import SymbolicZero, custom_vjp
from minidiff.core.interpreter import EVALUATE, running
from minidiff.core.ranks import cast_to
from minidiff.core.states import common_states
from minidiff.core.tracer import Value, states_of
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors.location import Location, current_location
from minidiff.ops.arrays import as_array
from minidiff.ops.base import convert
from minidiff.ops.callback import pure_callback
from minidiff.ops.decomposition import as_floating
from minidiff.scipy.closures import close, record, refuse_options
from minidiff.values.lists import split_list

__all__ = ["Solution", "odeint", "solve_ivp"]

#: Gauss nodes between two steps, and how many of all nodes are evaluated at once.
GAUSS, NODES = 5, 40


class Solution(NamedTuple):
    """The result of `solve_ivp`: the times t [k], and the values y [n, k] there.

    >>> solution = solve_ivp(lambda t, y: -y, (0.0, 1.0), numpy.ones(2))
    >>> solution.t.tolist(), solution.y.shape
    ([0.0, 1.0], (2, 2))
    """

    t: Value
    y: Value


# ---------------------------------------------------------------- SciPy's solvers


@dataclass(frozen=True, eq=False)
class Solver:
    """A function of `scipy.integrate`, with the user's method, options and line."""

    name: str
    method: Any
    options: dict
    source: Location | None

    def solve(self, f: Callable, y0: numpy.ndarray, t: numpy.ndarray) -> numpy.ndarray:
        """Return the states at the times, as SciPy does."""
        options = self.options_for(len(y0))
        if self.name == "odeint":
            return _by_odeint(f, y0, t, options)
        return numpy.concatenate([y0[None], _by_solve_ivp(f, y0, t, self.method, t_eval=t[1:], **options).y.T])

    def options_for(self, n: int) -> dict:
        """Return the options for n states: a vector of tolerances applies to the tangents, too."""
        tolerances = {k: v for k in ("rtol", "atol") if (v := self.options.get(k)) is not None}
        return self.options | {
            k: numpy.tile(v, n // numpy.size(v)) if numpy.ndim(v) else v for k, v in tolerances.items()
        }

    def interpolate(self, f: Callable, y0: numpy.ndarray, t: numpy.ndarray, scale: float | None) -> Any:
        """Return SciPy's dense output over the times, which a derivative reads.

        Its tolerances are a tenth of those of the result. An adjoint is linear in its initial value, so its absolute
        tolerances are relative to `scale`, the size of that value; for the states themselves it is None.
        """
        if t[0] == t[-1]:
            return Constant(y0, t)
        options, tolerances = self.options_for(len(y0)) if scale is None else dict(self.options), (1e-3, 1e-6)
        if self.name == "odeint":
            steps = {"max_step": options.get("hmax") or numpy.inf, "min_step": options.get("hmin", 0.0)}
            options, tolerances = steps | {k: options.get(k) for k in ("rtol", "atol")}, (1.49e-8, 1.49e-8)
        rtol, atol = (d if x is None else x for d, x in zip(tolerances, (options.get("rtol"), options.get("atol"))))
        if scale is not None:
            options.pop("first_step", None)
            rtol = numpy.min(rtol)
            atol = numpy.clip(numpy.min(atol), 1e-6 * rtol, rtol) * scale
        options.update(rtol=numpy.maximum(rtol / 10, 100 * numpy.finfo(float).eps), atol=atol / 10)
        return _by_solve_ivp(f, y0, t, self.method, dense_output=True, **options).sol


def _by_odeint(f: Callable, y0: numpy.ndarray, t: numpy.ndarray, options: dict) -> numpy.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.integrate.ODEintWarning)
        ys, report = scipy.integrate.odeint(f, y0, t, tfirst=True, full_output=True, **options)
    if "successful" not in report["message"]:
        k = numpy.argmax((t[1:] - report["tcur"]) * (t[-1] - t[0]) > 0)  # the first time that was not reached
        raise _stopped("odeint", report["tcur"][k], report["hu"][k], report["message"])
    return ys


def _by_solve_ivp(f: Callable, y0: numpy.ndarray, t: numpy.ndarray, method: Any, **options: Any) -> Any:
    if isinstance(getattr(scipy.integrate, str(method), None), type):
        method = _stopping(getattr(scipy.integrate, method))
    result = scipy.integrate.solve_ivp(f, (t[0], t[-1]), y0, method, **options)
    if not result.success:
        raise RuntimeError(f"solve_ivp: {result.message}")
    return result


@functools.cache
def _stopping(method: type) -> type:
    """Return a method of SciPy that stops where its steps are too small. (SciPy's LSODA would continue.)"""

    class Stopping(method):
        def step(self) -> str | None:
            message = super().step()
            small = self.step_size is not None and self.step_size < 10 * numpy.spacing(abs(self.t))
            if self.status == "failed" or (self.status == "running" and small):
                raise _stopped("solve_ivp", self.t, self.step_size or 0.0, message or "the next would be too small.")
            return message

    return Stopping


def _stopped(name: str, t: float, step: float, why: str) -> RuntimeError:
    return RuntimeError(
        f"{name} stopped at t = {t:.6g}, where its last step was {step:.1g}: {why} If the solution grows without bound "
        "there, end before it"
    )


class Constant(NamedTuple):
    """The dense output over no time: SciPy's is real, also for a complex state."""

    value: numpy.ndarray
    ts: numpy.ndarray

    def __call__(self, t: numpy.ndarray) -> numpy.ndarray:
        return numpy.multiply.outer(self.value, numpy.ones_like(t))


class DenseCurve(NamedTuple):
    """SciPy's dense output, as a function of time; the solver counts from the start, where its steps may be tiny."""

    start: float
    solution: Any

    def __call__(self, t: numpy.ndarray) -> numpy.ndarray:
        return self.solution(t - self.start)

    @property
    def ts(self) -> numpy.ndarray:
        return self.start + self.solution.ts


# ---------------------------------------------------------------- chains of differential equations


@dataclass(frozen=True, eq=False)
class Chain:
    """Differential equations, each of which reads the solutions of earlier ones, and integrals along them.

    Equation i is du_i/dt = rates[i](u_0, ..., u_i, t, *values). Equations 0, 2, ... are solved from the first time to
    the last, and the others back. `integrand(*states, t, weights, *values)`, for states [N, n_i] at N times, returns
    a list of integrands from the first time to the last, summed over the N times with the weights; or it is None.
    """

    solver: Solver
    rates: Sequence[Callable]
    integrand: Callable | None = None

    def run(self, jumps: list, t: numpy.ndarray, values: list) -> tuple[list, list]:
        """Call SciPy with plain arrays, whatever traces the program."""
        with running(EVALUATE):
            if len(self.rates) > 1 or self.integrand:
                curves: list[dict] = []
                states = [self.solve_equation(i, jumps, t, values, curves) for i in range(len(jumps))]
                return states, self.integrate(jumps, t, values, curves) if self.integrand else []
            y0, f = jumps[0][0], self.rates[0]
            rate = lambda s, y: f(y.astype(y0.dtype), t.dtype.type(s), *values)  # noqa: E731
            ys = self.solver.solve(rate, y0, t) if numpy.ptp(t) else numpy.tile(y0, (len(t), 1))
            return [numpy.asarray(ys, y0.dtype)], []

    def solve_equation(self, i: int, jumps: list, t: numpy.ndarray, values: list, curves: list) -> numpy.ndarray:
        """Return the states of equation i at the times, and add its solution between them to `curves`.

        The solver restarts at the times where this equation or an earlier one jumps.
        """
        f, states, solution = self.rates[i], numpy.copy(jumps[i]), {}
        stops = sorted({0, len(t) - 1, *[int(k) for c in jumps[: i + 1] for k in numpy.flatnonzero(c.any(1))]})
        scale = next((s for c in jumps[i:0:-1] if (s := numpy.abs(c).max())), 1.0) if i else None
        for start, stop in itertools.pairwise(stops[::-1] if i % 2 else stops):
            first, last = interval = min(start, stop), max(start, stop)
            read = _reader(curves, jumps, interval)
            t0, span = float(t[start]), t[[start, stop]].astype(float) - t[start]
            rate = lambda s, u: f(*read(t0 + s), u.astype(states.dtype), t.dtype.type(t0 + s), *values)  # noqa: E731, B023
            try:
                curve = DenseCurve(t0, self.solver.interpolate(rate, states[start], span, scale))
            except (RuntimeError, ValueError) as error:
                if not i:  # it would fail without a derivative, too
                    raise
                raise self.failed(i, t[start], t[stop], error) from None
            ys = curve(t[first : last + 1]).T.astype(states.dtype)
            states[first + 1 : last], states[stop] = ys[1:-1], states[stop] + ys[0 if i % 2 else -1]
            solution[interval] = curve
        curves.append(solution)
        return states

    def failed(self, i: int, start: float, stop: float, error: Exception) -> RuntimeError:
        solve = "solve backward along the solution" if i % 2 else "solve forward along an adjoint"
        return RuntimeError(
            f"the gradient of {self.solver.name} failed ({self.solver.source}), in its {solve} from t = {start:.6g} to "
            f"{stop:.6g}. Try smaller tolerances, another method (Radau or BDF if the equation is stiff), or forward "
            f"mode (md.jacfwd). The solver says: {error}"
        )

    def integrate(self, jumps: list, t: numpy.ndarray, values: list, curves: list) -> list:
        """Return the integrals, by Gauss's rule between any two steps of the solvers."""
        x, w = numpy.polynomial.legendre.leggauss(GAUSS)
        ts = numpy.concatenate([curve.ts for solution in curves for curve in solution.values()])
        sums: list[Any] = []
        for interval in curves[-1]:
            read, (start, stop) = _reader(curves, jumps, interval), t[list(interval)].astype(float)
            low, high = min(start, stop), max(start, stop)
            mesh = numpy.concatenate([[low], numpy.unique(ts[(low < ts) & (ts < high)]), [high]])
            half = numpy.diff(mesh)[:, None] / 2
            nodes, weights = (mesh[:-1, None] + half * (1 + x)).ravel(), (half * w).ravel() * numpy.sign(stop - start)
            for k in range(0, len(nodes), NODES):
                s, share = nodes[k : k + NODES], weights[k : k + NODES]
                s, share = numpy.pad(s, (0, NODES - len(s)), "edge"), numpy.pad(share, (0, NODES - len(s)))
                terms = self.integrand(*read(s), s.astype(t.dtype), share, *values)
                sums = [x + y for x, y in zip(sums or [0] * len(terms), terms)]
        return sums


def _reader(curves: Sequence[dict], jumps: Sequence[numpy.ndarray], interval: tuple[int, int]) -> Callable:
    """Return a function of times, one or several, that reads the solutions within the interval."""
    first, last = interval
    fitting = [next(f for (a, b), f in solution.items() if a <= first and last <= b) for solution in curves]
    return lambda s: [f(s).T.astype(c.dtype) for f, c in zip(fitting, jumps)]


# ---------------------------------------------------------------- their derivatives


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _solve(chain: Chain, jumps: list, t: Value, values: list) -> tuple[list, list]:
    """Return the states [k, n_i] at the times t [k] after their jumps, and the integrals.

    Row j of `jumps[i]` [k, n_i] is added to state i where its solver passes t[j]; the state is 0 where it starts.
    """
    types, integrals = [ShapedArray(c.shape, c.dtype) for c in jumps], []
    if chain.integrand:
        nodes = [numpy.broadcast_to(x[0], (NODES, *x.shape[1:])) for x in (*jumps, t)]
        integrand, _ = record(chain.solver.name, chain.integrand, *nodes, numpy.ones(NODES), *values)
        integrals = eval_shape(integrand, *nodes, numpy.ones(NODES), *values)
        chain = Chain(chain.solver, chain.rates, integrand)
    return pure_callback(chain.run, (types, integrals), jumps, t, values)


def _solve_recorded(chain: Chain, *operands: Any) -> tuple[list, list]:
    """Solve a chain whose functions are not yet recorded; all operands vary over the same ranks."""
    leaves, structure = tree.flatten(operands)
    states = common_states(tuple(map(states_of, leaves)))
    jumps, t, values = tree.unflatten(structure, map(cast_to, leaves, states))
    rows = [x[0] for x in jumps]
    name = f"the derivative of {chain.solver.name}"
    rates = [record(name, f, *rows[: i + 1], t[0], *values)[0] for i, f in enumerate(chain.rates)]
    return _solve(Chain(chain.solver, rates, chain.integrand), jumps, t, values)


def _sides(jumps: Sequence[Value], states: Sequence[Value]) -> list[list[Value]]:
    """Return the states before the times (except the first), and after them (except the last)."""
    sides = [(y, y - x) if i % 2 else (y - x, y) for i, (x, y) in enumerate(zip(jumps, states))]
    return [[before[1:] for before, _ in sides], [after[:-1] for _, after in sides]]


def _halves(xs: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    return [x[..., : x.shape[-1] // 2] for x in xs], [x[..., x.shape[-1] // 2 :] for x in xs]


def _tangents(chain: Chain, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    """Solve for the states and their tangents together: a chain with the same number of equations."""
    (jumps, t, values), m, count = primals, len(chain.rates), len(primals[2])
    moves = type(tangents[1]) is not SymbolicZero
    d_jumps, dt, d_values = tree.map(lambda x: x.instantiate() if type(x) is SymbolicZero else x, tangents)

    def both_rates(i: int) -> Callable:
        def rate(*args: Value) -> Value:
            (us, d_us), s, (v, dv) = _halves(args[: i + 1]), args[i + 1], split_list(args[i + 2 :], count)
            return numpy.concatenate(jvp(lambda us, v: chain.rates[i](*us, s, *v), (us, v), (d_us, dv)))

        return rate

    def both_integrands(*args: Value) -> list[Value]:
        (us, d_us), (s, w), (v, dv) = _halves(args[:m]), args[m : m + 2], split_list(args[m + 2 :], count)
        return [*itertools.chain(*jvp(lambda us, v: chain.integrand(*us, s, w, *v), (us, v), (d_us, dv)))]

    moved: list[Any] = [0] * m
    moved_integrals: list[Any] = []
    if moves:
        d_jumps, moved, moved_integrals = _move_times(chain, primals, d_jumps, dt)
    both = Chain(chain.solver, [*map(both_rates, range(m))], both_integrands if chain.integrand else None)
    pairs = [numpy.concatenate([x, dx], 1) for x, dx in zip(jumps, d_jumps)]
    states, integrals = _solve_recorded(both, pairs, t, [*values, *d_values])
    states, d_states = _halves(states)
    integrals, d_integrals = split_list(integrals, len(integrals) // 2)
    d_integrals = [x + y for x, y in zip(d_integrals, moved_integrals)] if moved_integrals else d_integrals
    return (states, integrals), ([x + y for x, y in zip(d_states, moved)], d_integrals)


def _move_times(chain: Chain, primals: tuple, d_jumps: list, dt: Value) -> tuple[list, list, list]:
    """Return the tangents of jumps at times that move by dt, and those of the states there and of the integrals.

    A state with the rate f before a time and g after it changes by (f - g) dt if the time moves by dt.
    """
    jumps, t, values = primals
    before, after = _sides(jumps, _solve(chain, *primals)[0])
    new_jumps, moved = [], []
    for i, (f, dx) in enumerate(zip(chain.rates, d_jumps)):
        move = vmap(lambda us, s, ds: f(*us, s, *values) * ds)  # noqa: B023
        f_before, f_after = move(before[: i + 1], t[1:], dt[1:]), move(after[: i + 1], t[:-1], dt[:-1])
        none = numpy.zeros_like(dx[:1])
        change = numpy.concatenate([none, f_before]) - numpy.concatenate([f_after, none])
        new_jumps.append(dx + numpy.concatenate([none, -change[1:]] if i % 2 else [change[:-1], none]))
        moved.append(numpy.concatenate([f_after[:1], f_before] if i % 2 else [f_after, f_before[-1:]]))
    if not chain.integrand:
        return new_jumps, moved, []
    ends = [chain.integrand(*us, t[k], dt[k], *values) for us, k in ((before, slice(1, None)), (after, slice(-1)))]
    return new_jumps, moved, [x - y for x, y in zip(*ends)]


def _cotangents(chain: Chain, residuals: tuple, cts: tuple) -> tuple[list, Value, list]:
    """Solve for the states, then for their costates, from the last state's to the first's: a chain of twice as many.

    With the Hamiltonian H, the sum of each costate times its state's rate, costates follow -dH/du, the cotangents of
    the values are the integrals of dH/dvalues, and that of a time is the change of H there.
    """
    (jumps, t, values), (ct_states, ct_integrals), m = residuals, cts, len(chain.rates)

    def hamiltonian(us: Sequence, costates: Sequence, s: Value, values: Sequence) -> Value:
        values, ct_integrals = split_list(values, len(residuals[2]))
        rates = [f(*us[: i + 1], s, *values) for i, f in enumerate(chain.rates) if i >= m - len(costates)]
        if chain.integrand:
            rates += chain.integrand(*[u[None] for u in us], s[None], numpy.ones(1), *values)
        return sum(numpy.sum(numpy.real(a * f)) for a, f in zip([*costates[::-1], *ct_integrals], rates))

    def costate_rate(i: int) -> Callable:
        def rate(*args: Value) -> Value:
            us, costates, (s, *values) = split_list(args, m, m - i)
            return -grad(lambda u: hamiltonian([*us[:i], u, *us[i + 1 :]], costates, s, values))(us[i])

        return rate

    hamiltonians = vmap(hamiltonian, (0, 0, 0, None))

    def integrand(*args: Value) -> list[Value]:
        us, costates, (s, w), values, ct_integrals = split_list(args, m, m, 2, len(residuals[2]))
        return grad(lambda values: numpy.sum(w * hamiltonians(us, costates, s, [*values, *ct_integrals])))(values)

    order = range(m - 1, -1, -1)
    both = Chain(chain.solver, [*chain.rates, *map(costate_rate, order)], integrand if values else None)
    signed = lambda xs: [-x if i % 2 else x for i, x in enumerate(xs)]  # noqa: E731  (of equations solved backward)
    jumps, values = [*jumps, *signed(ct_states)[::-1]], [*values, *ct_integrals]
    states, integrals = _solve_recorded(both, jumps, t, values)
    before, after = _sides(jumps, states)
    zero = numpy.zeros(1)
    h_before = hamiltonians(before[:m], before[m:], t[1:], values)
    h_after = hamiltonians(after[:m], after[m:], t[:-1], values)
    ct_of_t = numpy.concatenate([zero, h_before]) - numpy.concatenate([h_after, zero])
    return signed(states[: m - 1 : -1]), convert(ct_of_t, t.dtype), integrals


_solve.defjvp(_tangents, symbolic_zeros=True)
_solve.defvjp(lambda chain, *operands: (_solve(chain, *operands), operands), _cotangents)


# ---------------------------------------------------------------- functions of SciPy


def _integrate(solver: Solver, f: Callable, y0: Value, t: Value) -> Value:
    """Return the states [k, n] at the times t [k] for dy/dt = f(y, t), with y0 [n] at the first time.

    f may close over traced values.
    """
    refuse_options(solver.name, solver.options)
    if solver.method in ("LSODA", "Radau") and y0.dtype.kind == "c":
        raise TypeError(
            f"{solver.name}: {solver.method} needs a real state, got {typeof(y0)}: use solve_ivp(method='BDF')"
        )

    def rate(y: Value, s: Value) -> Value:
        dy = as_array(f(y, s))
        if typeof(dy).shape != y.shape or (typeof(dy).dtype.kind == "c" and y.dtype.kind != "c"):
            raise TypeError(
                f"{solver.name}: the right-hand side must return the derivative of y, {typeof(y)}, got {typeof(dy)}; "
                "for a complex solution pass a complex y0: y0.astype(complex)"
            )
        return convert(dy, y.dtype)

    for option in ("rtol", "atol"):
        if numpy.ndim(x := solver.options.get(option)) and numpy.size(x) != y0.shape[0]:
            raise ValueError(f"{solver.name}: {option} must be a number, or one for each of {typeof(y0)}, got {x}")
    f, (y0, s), values = close(solver.name, rate, y0, t[0])
    t = cast_to(t, states_of(s))
    if t.shape == (1,):
        return y0[None]
    jumps = numpy.concatenate([y0[None], numpy.zeros_like(y0, shape=(t.shape[0] - 1, *y0.shape))])
    return _solve(Chain(solver, [f]), [jumps], t, values)[0][0]


def odeint(func: Callable, y0: Value, t: Value, args: tuple = (), tfirst: bool = False, **options: Any) -> Value:
    """`scipy.integrate.odeint`: solve dy/dt = func(y, t, *args).

    It is differentiable in y0, the times, and what `func` closes over.

    Args:
        func: the right-hand side, which returns the derivative of y, [n].
        y0: the state [n] at the first time.
        t: the times [k], in order.
        args: further arguments of func.
        tfirst: whether func takes t before y.
        options: SciPy's `rtol`, `atol`, `mxstep`, `hmax` and so on.

    Returns:
        The states [k, n] at the times.

    Raises:
        RuntimeError: with the time and the step, if the solver fails.
        TypeError: for an option that is not supported.

    >>> import minidiff as md
    >>> end = lambda rate: odeint(lambda y, t, rate: -rate * y, numpy.ones(1), numpy.array([0.0, 1.0]), (rate,))[-1, 0]
    >>> [round(float(x), 6) for x in md.value_and_grad(end)(2.0)]  # exp(-2) and -exp(-2)
    [0.135335, -0.135335]
    """
    y0, t = numpy.atleast_1d(as_floating("odeint", as_array(y0))), as_floating("odeint", as_array(t))
    f = (lambda y, s: func(s, y, *args)) if tfirst else (lambda y, s: func(y, s, *args))
    return _integrate(Solver("odeint", "LSODA", options, current_location()), f, y0, t)


def solve_ivp(
    fun: Callable,
    t_span: tuple,
    y0: Value,
    method: str = "RK45",
    t_eval: Value = None,
    args: tuple = (),
    **options: Any,
) -> Solution:
    """`scipy.integrate.solve_ivp`: solve dy/dt = fun(t, y, *args).

    It is differentiable in y0, the times, and what `fun` closes over.

    Args:
        fun: the right-hand side, which returns the derivative of y, [n].
        t_span: the first time and the last.
        y0: the state [n] at the first time.
        method: a method of SciPy, or its class.
        t_eval: the times [k] at which y is returned, in order; the last is the end. None is those of t_span, since a
            shape cannot depend on the solver's steps.
        args: further arguments of fun.
        options: SciPy's `rtol`, `atol`, `max_step` and so on; `events` and `dense_output` are not supported.

    Returns:
        A `Solution`: the times t [k], and the states y [n, k].

    Raises:
        RuntimeError: with the time and the step, if the solver fails.
        TypeError: for an option that is not supported.

    >>> solution = solve_ivp(lambda t, y: -y, (0.0, 1.0), numpy.array([1.0]), rtol=1e-8, atol=1e-8)
    >>> solution.y.round(6)
    array([[1.      , 0.367879]])
    """
    y0 = as_floating("solve_ivp", as_array(y0))
    first, times = (
        as_floating("solve_ivp", as_array(x)) for x in (t_span[0], list(t_span) if t_eval is None else t_eval)
    )
    solver = Solver("solve_ivp", method, options, current_location())
    ys = _integrate(solver, lambda y, s: fun(s, y, *args), y0, numpy.concatenate([numpy.reshape(first, (1,)), times]))
    return Solution(times, ys[1:].T)
