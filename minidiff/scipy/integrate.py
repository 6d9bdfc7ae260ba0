"""`scipy.integrate`, differentiable: initial value problems, solved by SciPy's adaptive methods.

The solver runs as one operation that calls SciPy, so it works under `jit`, `vmap` and in the body of a `shard_map`,
where each rank takes steps of its own; the right-hand side must not communicate. It is traced once, and may close over
traced values. Derivatives are in y0, the times and these values: forward mode integrates the tangents beside y, reverse
mode integrates the adjoint backward, from the results that are known. Both call the solver, so there are derivatives of
every order, as accurate as its tolerances.

Source: R. T. Q. Chen et al., "Neural ordinary differential equations", 2018.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import scipy.integrate

from minidiff import tree
from minidiff.core.interpreter import EVALUATE, running
from minidiff.core.ranks import cast_to
from minidiff.core.tracer import Value, states_of
from minidiff.core.types import ShapedArray
from minidiff.higher_order.custom_rules import custom_vjp
from minidiff.higher_order.scan import scan
from minidiff.ops.arrays import as_array
from minidiff.ops.callback import pure_callback
from minidiff.ops.decomposition import as_floating
from minidiff.scipy.closures import close
from minidiff.transforms.derivatives import jvp, vjp

__all__ = ["Solution", "odeint", "solve_ivp"]

Solver = Callable[[Callable, numpy.ndarray, numpy.ndarray], numpy.ndarray]


class Solution(NamedTuple):
    """What `solve_ivp` returns: the times t [k], and the values y [n, k] there.

    >>> solution = solve_ivp(lambda t, y: -y, (0.0, 1.0), numpy.ones(2))
    >>> solution.t.tolist(), solution.y.shape
    ([0.0, 1.0], (2, 2))
    """

    t: Value
    y: Value


def _run(solver: Solver, f: Callable, y0: numpy.ndarray, t: numpy.ndarray, values: list) -> numpy.ndarray:
    """Call SciPy with plain arrays, whatever traces the program."""
    if t[0] == t[-1]:
        return numpy.tile(y0, (len(t), 1))
    with running(EVALUATE):
        ys = solver(lambda s, y: f(y.astype(y0.dtype), t.dtype.type(s), *values), y0, t)
    return numpy.asarray(ys, y0.dtype)


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def _solution(solver: Solver, f: Callable, y0: Value, t: Value, values: list) -> Value:
    """The states [k, n] at the times t [k], of which the first is that of y0 [n], for f(y, t, *values)."""
    result = ShapedArray((t.shape[0], *y0.shape), y0.dtype)
    return pure_callback(functools.partial(_run, solver, f), result, y0, t, values)


def _integrate(solver: Solver, f: Callable, y0: Value, t: Value) -> Value:
    """The same for f(y, t), which may close over traced values."""
    f, (y0, s), values = close("solve_ivp", f, y0, t[0])
    return _solution(solver, f, y0, cast_to(t, states_of(s)), values)


@_solution.defjvp
def _integrate_tangents(solver: Solver, f: Callable, primals: tuple, tangents: tuple) -> tuple[Value, Value]:
    """Integrate y and its tangent. A time that moves moves the state along f, and the first one moves y0 back."""
    (y0, t, values), (dy0, dt, d_values) = primals, tangents
    n, times = y0.shape[0], range(t.shape[0])

    def both(z: Value, s: Value) -> Value:
        return numpy.concatenate(jvp(lambda y, *values: f(y, s, *values), (z[:n], *values), (z[n:], *d_values)))

    start = numpy.concatenate([y0, dy0 - f(y0, t[0], *values) * dt[0]])
    z = _integrate(solver, both, start, t)
    return z[:, :n], z[:, n:] + numpy.stack([f(z[k, :n], t[k], *values) * dt[k] for k in times])


def _integrate_adjoint(solver: Solver, f: Callable, residuals: tuple, ct: Value) -> tuple[Value, Value, list]:
    """Integrate y, its cotangent a and those of the values from each time back to the one before."""
    ys, t, values = residuals
    n = ys.shape[1]
    flat, unravel = tree.ravel_pytree(values)

    def backward(z: Value, s: Value) -> Value:  # s is minus the time
        dy, pull_back = vjp(lambda y, flat: f(y, -s, *unravel(flat)), z[:n], flat)
        return numpy.concatenate([-dy, *pull_back(z[n : 2 * n])])

    def step(carry: tuple, x: tuple) -> tuple[tuple, Value]:
        (a, of_values), (y, ct, before, now) = carry, x
        start = numpy.concatenate([y, a + ct, of_values])
        z = _integrate(solver, backward, start, numpy.stack([-now, -before]))[1]
        return (z[n : 2 * n], z[2 * n :]), numpy.sum(f(y, now, *values) * ct)

    init = numpy.zeros_like(ys[0]), numpy.zeros_like(flat)
    (a, of_values), of_times = scan(step, init, (ys[1:], ct[1:], t[:-1], t[1:]), reverse=True)
    of_first = -numpy.sum(f(ys[0], t[0], *values) * a)
    return a + ct[0], numpy.concatenate([of_first[None], of_times]), unravel(of_values)


def _sweep(solver: Solver, f: Callable, y0: Value, t: Value, values: list) -> tuple[Value, tuple]:
    ys = _solution(solver, f, y0, t, values)
    return ys, (ys, t, values)


_solution.defvjp(_sweep, _integrate_adjoint)


def _by_odeint(f: Callable, y0: numpy.ndarray, t: numpy.ndarray, **options: Any) -> numpy.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.integrate.ODEintWarning)
        ys, found = scipy.integrate.odeint(f, y0, t, tfirst=True, full_output=True, **options)
    if "successful" not in found["message"]:
        k = numpy.argmax((t[1:] - found["tcur"]) * (t[-1] - t[0]) > 0)  # the first time that was not reached
        raise _stopped("odeint", found["tcur"][k], found["hu"][k], found["message"])
    return ys


def _by_solve_ivp(f: Callable, y0: numpy.ndarray, t: numpy.ndarray, method: Any, **options: Any) -> numpy.ndarray:
    if isinstance(getattr(scipy.integrate, str(method), None), type):
        method = _stopping(getattr(scipy.integrate, method))
    found = scipy.integrate.solve_ivp(f, (t[0], t[-1]), y0, method, t_eval=t[1:], **options)
    if not found.success:
        raise RuntimeError(f"solve_ivp: {found.message}")
    return numpy.concatenate([y0[None], found.y.T])


@functools.cache
def _stopping(method: type) -> type:
    """One of SciPy's methods, which stops where its steps are too small. (SciPy's LSODA would go on, by such steps.)"""

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


def odeint(func: Callable, y0: Value, t: Value, args: tuple = (), tfirst: bool = False, **options: Any) -> Value:
    """`scipy.integrate.odeint`: y [k, n] at the times t [k], where dy/dt = func(y, t, *args).

    At the first time y is y0 [n]. `options` are SciPy's `rtol`, `atol`, `mxstep`, `hmax` and so on. Raise RuntimeError,
    with the time and the step, if the solver fails.

    >>> import minidiff as md
    >>> end = lambda rate: odeint(lambda y, t, rate: -rate * y, numpy.ones(1), numpy.array([0.0, 1.0]), (rate,))[-1, 0]
    >>> [round(float(x), 6) for x in md.value_and_grad(end)(2.0)]  # exp(-2) and -exp(-2)
    [0.135335, -0.135335]
    """
    y0, t = numpy.atleast_1d(as_floating("odeint", as_array(y0))), as_floating("odeint", as_array(t))
    f = (lambda y, s: func(s, y, *args)) if tfirst else (lambda y, s: func(y, s, *args))
    return _integrate(functools.partial(_by_odeint, **options), lambda y, s: as_array(f(y, s)), y0, t)


def solve_ivp(
    fun: Callable,
    t_span: tuple,
    y0: Value,
    method: str = "RK45",
    t_eval: Value = None,
    args: tuple = (),
    **options: Any,
) -> Solution:
    """`scipy.integrate.solve_ivp`: dy/dt = fun(t, y, *args), where y is y0 [n] at t_span[0].

    The times `t_eval` [k] are those at which y is returned, [n, k]; by default those of t_span, since a shape cannot
    depend on the solver's steps. They are in order, and the last is the end. `method` and `options` (`rtol`, `atol`,
    `max_step`) are SciPy's; `events` and `dense_output` are not supported. Raise RuntimeError, with the time and
    the step, if the solver fails.

    >>> solution = solve_ivp(lambda t, y: -y, (0.0, 1.0), numpy.array([1.0]), rtol=1e-8, atol=1e-8)
    >>> solution.y.round(6)
    array([[1.      , 0.367879]])
    """
    y0 = as_floating("solve_ivp", as_array(y0))
    first, times = (
        as_floating("solve_ivp", as_array(x)) for x in (t_span[0], list(t_span) if t_eval is None else t_eval)
    )
    solver = functools.partial(_by_solve_ivp, method=method, **options)
    f = lambda y, s: as_array(fun(s, y, *args))  # noqa: E731
    ys = _integrate(solver, f, y0, numpy.concatenate([numpy.reshape(first, (1,)), times]))
    return Solution(times, ys[1:].T)
