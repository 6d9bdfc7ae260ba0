"""Custom derivative rules: `custom_jvp`, `custom_vjp` and `stop_gradient`.

The user's object, such as a `custom_jvp`, is a function with rules (`FunctionWithRules`). Each call of it makes a
`RuleCall`, which flattens trees of arguments and results, and binds an operation with a body: evaluation, vectorization
and staging use the body, differentiation uses the rule. A jvp rule is linear in the tangents, and reverse mode
transposes it. With a backward rule, the derivative is a linear operation, `linear_call`, whose transpose is that rule;
forward mode evaluates it with the jvp rule, if there is one. Rules are ordinary functions, and can be differentiated
themselves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.control_flow.bodies import Body, Call
from minidiff.control_flow.partial_eval import batched_body, batched_by_rule, closure_error, guard_closure
from minidiff.core.forward import instantiate
from minidiff.core.interpreter import running
from minidiff.core.ranks import cast_to
from minidiff.core.reverse import Linearize
from minidiff.core.tape import Stage, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import LeakedTracerError, VarianceError, show_axes
from minidiff.errors.tracebacks import hide_own_frames
from minidiff.inputs.arguments import are_weak, as_named_value, as_value, describe_argument, restore_weak, result_values
from minidiff.ops import reduction
from minidiff.ops.base import convert
from minidiff.ops.elementwise import stop_gradient as constant
from minidiff.values.aliasing import copy_shared
from minidiff.values.dtypes import float0, is_differentiable
from minidiff.values.lists import drop_none, positions, scatter, select, split_list
from minidiff.values.settings import checking

# ---------------------------------------------------------------- operations


class CustomPrimitive(Call):
    """An operation that calls a function with a rule.

    Parameters: its `name`; `body`; `consts`. On tapes the body takes the `consts` values that it closes over
    before the arguments; the rule does not take them.
    """

    can_diverge = False  # the rule gives results of the types that were recorded

    def staged_params(self, params, tape, constants):
        return {**params, "body": tape, "consts": params["consts"] + constants}

    def show_params(self, params):
        return params["name"]


class CustomDerivative(CustomPrimitive):
    """An operation that calls a function with a derivative rule.

    The parameter `jvp` is the rule. It maps leaves and tangents to the results, then their tangents (None for zero).
    """

    def jvp_body(self, outside, args, params):
        primals, tangents = outside.split(args)
        name, consts = params["name"], params["consts"]
        body, rule = (guard_closure(params[key], outside, name) for key in ("body", "jvp"))
        if all(t is None for t in tangents):
            return self.bind(*primals, **{**params, "body": body, "jvp": rule})
        for x, t in zip(args, tangents[:consts]):
            if t is not None:
                raise closure_error(name, x)
        with checking(outside.scope, False):
            results = rule(*primals[consts:], *tangents[consts:])
        outs, out_tangents = split_list(results, len(results) // 2)
        return [outside.join(x, t) for x, t in zip(outs, out_tangents)]

    def batched_params(self, params, outside, batched, results):
        arguments = batched[params["consts"] :]
        decide = functools.partial(batched_by_rule, params["name"], self.name == "custom_vjp")
        rule = batched_body(params["jvp"], outside, [*arguments, *arguments], results, decide)
        return {**super().batched_params(params, outside, batched, results), "jvp": rule}


class LinearCall(CustomDerivative):
    """The derivative of a function with a backward rule; its transpose is `bwd`.

    The operands are, in order: `consts` values that the body closes over; `residuals` many residuals; the primals, if
    there is a body; the tangents of the `active` arguments. The body takes all of them and applies the jvp rule.
    Without a jvp rule the body is None: the operation can be recorded, batched and transposed, but not evaluated.
    """

    def forward_rule(self, params: dict) -> Body:
        """Return the body, or raise TypeError if there is none."""
        if params["body"] is None:
            name = params["name"]
            raise TypeError(
                f"{name} has a backward rule only (custom_vjp), and no derivative in forward mode (jvp, jacfwd, a "
                f"function that linearize returned); use reverse mode, or declare a forward rule with {name}.defjvp, "
                "or make it a custom_jvp, whose rule serves both"
            )
        return params["body"]

    def evaluate(self, args, params):
        return self.forward_rule(params)(*args)

    def jvp_body(self, outside, args, params):
        if not drop_none(outside.split(args)[1]):
            return self.bind(*args, **params)
        with running(outside):
            return self.forward_rule(params)(*args)

    def linearize_body(self, outside: Linearize, args: Sequence[Value], params: dict) -> list[Value]:
        if not any(map(outside.owns, args)):
            return self.bind(*args, **params)
        return outside.record(self, args, params)

    def stage_body(self, outside: Stage, args: Sequence[Value], params: dict) -> list[Value]:
        # Do not raise here: reverse mode of a recorded body runs forward mode first, then transposes.
        if params["body"] is None:
            return outside.record(self, args, params)
        return super().stage_body(outside, args, params)

    def transpose(self, cts, operands, params):
        active, types, consts = params["active"], params["out_types"], params["consts"]
        known = operands[: len(operands) - len(active)]
        for x in known:
            if isinstance(x, ShapedArray):
                raise TypeError(
                    f"the derivative of {params['name']} is linear in its tangents, not in the value of type {x} at "
                    "which it is evaluated"
                )
        cts = scatter(cts, [is_differentiable(t.dtype) for t in types])
        if not params["symbolic_zeros"]:
            cts = [instantiate(ct, t.cotangent) for ct, t in zip(cts, types)]
        residuals = known[consts : consts + params["residuals"]]
        in_cts = copy_shared(params["bwd"](residuals, cts), residuals)
        return [None] * len(known) + [in_cts[i] for i in active]

    def batched_params(self, params, outside, batched, results):
        known, tangents = split_list(batched, len(batched) - len(params["active"]))
        _, residuals, _ = split_list(known, params["consts"], params["residuals"])
        unbatched = {i for i, is_batched in zip(params["active"], tangents) if not is_batched}
        body = params["body"] and batched_body(params["body"], outside, batched)

        def bwd(values, cts):
            """Apply the rule to batches of cotangents; sum the cotangents of arguments that are not batched."""
            flat = lambda *xs: params["bwd"](xs[: len(values)], xs[len(values) :])  # noqa: E731
            in_cts = batched_body(flat, outside, [*residuals, *[True] * len(cts)])(*values, *cts)
            return [reduction.sum(ct, 0) if ct is not None and i in unbatched else ct for i, ct in enumerate(in_cts)]

        out_types = tuple(t.update(shape=(outside.size_of_batch, *t.shape)) for t in params["out_types"])
        return {**params, "body": body, "bwd": bwd, "out_types": out_types}

    def typecheck(self, types, params):
        if isinstance(params["body"], Tape):
            super().typecheck(types, params)
        return [t for t in params["out_types"] if is_differentiable(t.dtype)]


custom_jvp_p = CustomDerivative("custom_jvp")
custom_vjp_p = CustomDerivative("custom_vjp")
linear_call_p = LinearCall("linear_call")


# ---------------------------------------------------------------- stop_gradient


def stop_gradient(x: Any) -> Any:
    """Return `x` as a constant: its derivative is zero.

    Args:
        x: a tree of arrays.

    Returns:
        A tree with the structure and the values of `x`.

    >>> from minidiff import grad
    >>> float(grad(lambda x: x * stop_gradient(x))(3.0))
    3.0
    """
    return tree.map(lambda leaf: constant(as_value(leaf)), x)


# ---------------------------------------------------------------- symbolic zeros


class SymbolicZero:
    """A tangent or cotangent that is zero, in a rule with `symbolic_zeros=True`: its type `aval`, and no array.

    >>> from minidiff import ShapedArray
    >>> zero = SymbolicZero(ShapedArray((2, 3), numpy.dtype(float)))
    >>> zero, zero.shape, zero.instantiate()
    (SymbolicZero(f64[2,3]), (2, 3), array([[0., 0., 0.],
           [0., 0., 0.]]))
    """

    __slots__ = ("aval",)
    __array_ufunc__ = None  # NumPy's functions raise TypeError

    def __init__(self, aval: ShapedArray):
        self.aval = aval

    shape = property(lambda self: self.aval.shape)
    dtype = property(lambda self: self.aval.dtype)
    ndim = property(lambda self: self.aval.ndim)

    def instantiate(self) -> Value:
        """Return the zeros as an array."""
        return instantiate(None, self.aval)

    def __repr__(self) -> str:
        return f"SymbolicZero({self.aval})"


class CustomVJPPrimal:
    """An argument of a rule `fwd` with `symbolic_zeros=True`: its `value`, and whether it is `perturbed`.

    It is perturbed if the derivative with respect to it is taken.
    """

    __slots__ = ("value", "perturbed")

    def __init__(self, value: Value, perturbed: bool):
        self.value = value
        self.perturbed = perturbed


def _symbolic(values: Sequence[Value | None], types: Sequence[ShapedArray]) -> list[Any]:
    """Return tangents or cotangents as rules with `symbolic_zeros` get them."""
    zeros = [t if is_differentiable(t.dtype) else t.update(dtype=float0) for t in types]
    return [SymbolicZero(t) if x is None else x for x, t in zip(values, zeros)]


# ---------------------------------------------------------------- functions with rules


class FunctionWithRules:
    """The base class of `custom_jvp`, `custom_vjp` and `custom_vmap`."""

    def __init__(self, fun: Callable):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.name = getattr(fun, "__name__", "f")

    def __get__(self: Any, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _positional(self, args: tuple, kwargs: dict) -> tuple:
        """Bind arguments by position, as rules take them, and fill in defaults."""
        try:
            bound = None if isinstance(self.fun, numpy.ufunc) else inspect.signature(self.fun).bind(*args, **kwargs)
        except ValueError:  # a function written in C has no signature; ufuncs are excluded for their `out` and `where`
            bound = None
        if bound is not None:
            bound.apply_defaults()  # of arguments by position: the function itself has those that go by keyword only
            args, kwargs = bound.args, {k: v for k, v in kwargs.items() if k in bound.kwargs}
        if kwargs:
            raise TypeError(f"{self.name}: rules take arguments by position, but {sorted(kwargs)} are keyword-only")
        return args


class RuleCall:
    """One call of a function with rules: the structures of its arguments and result.

    It does not hold the leaves themselves: rules live as long as the tapes that hold them.
    """

    out_structure: Any = None  # a tree.Structure, once the function or a rule has run

    def __init__(self, function: Any, structure: tree.Structure, weak: list[bool]):
        self.function = function
        self.structure = structure
        self.weak = weak  # which leaves are Python numbers

    def results(self, out: Any, title: str) -> list[Value]:
        """Return the leaves of a result, which the function or the rule of this title computed."""
        leaves, structure = tree.flatten(out)
        if self.out_structure not in (None, structure):
            raise TypeError(
                f"{title} must return a result like {self.function.name}'s: {self.out_structure}, got {structure}"
            )
        self.out_structure = structure
        return result_values([title], leaves, structure)

    def title_of(self, kind: str, rule: Callable) -> str:
        """Return the name of a rule for errors."""
        return f"{_name(rule)}, the {kind} rule of {self.function.name},"

    def apply_rule(self, kind: str, rule: Callable, advice: str, pair: str, *args: Any) -> tuple[str, list[Value], Any]:
        """Apply a rule that returns a pair, of which the first is a result like the function's.

        Return the rule's title, the leaves of the result, and the second of the pair.
        """
        title = self.title_of(kind, rule)
        with explain_leak(title, advice):
            out = rule(*args)
            if not (isinstance(out, (tuple, list)) and len(out) == 2):
                raise TypeError(f"{title} must return a pair ({pair}), got {tree.structure(out)}")
            for x in tree.leaves(out[1]):
                if isinstance(x, Tracer):
                    x.check_alive()
            return title, self.results(out[0], title), out[1]


@contextlib.contextmanager
def explain_leak(title: str, advice: str) -> Iterator[None]:
    """If a rule closes over a tracer that has ended, or returns one, say in the error how to pass the value.

    `advice` says it, with the reason in place of `{error}`.
    """
    try:
        yield
    except LeakedTracerError as error:
        raise LeakedTracerError(f"{title} {advice.format(error=error)}") from None


def _name(rule: Callable) -> str:
    return getattr(rule, "__name__", str(rule))


# ---------------------------------------------------------------- functions with derivative rules

#: The methods that declare rules: they reach a function with a rule inside another.
_DECLARATIONS = ("def_vmap", "defjvp", "defjvps", "defvjp")


class DifferentiableFunction(FunctionWithRules):
    """The base class of `custom_jvp` and `custom_vjp`."""

    primitive: CustomDerivative
    _rule: Callable[..., Callable]  # the jvp rule of a call, on leaves; AttributeError if there is none
    jvp: Callable | None = None
    jvp_gets_symbolic_zeros = vjp_gets_symbolic_zeros = False

    def __init__(
        self, fun: Callable, nondiff_argnums: int | Sequence[int] = (), nondiff_argnames: str | Sequence[str] = ()
    ):
        super().__init__(fun)
        numbers = (nondiff_argnums,) if isinstance(nondiff_argnums, int) else tuple(nondiff_argnums)
        names = (nondiff_argnames,) if isinstance(nondiff_argnames, str) else tuple(nondiff_argnames)
        self.nondiff_argnums = tuple(dict.fromkeys([*numbers, *[_position(fun, self.name, name) for name in names]]))

    def __getattr__(self, name: str) -> Any:
        inside = self.__dict__.get("fun")
        if name in _DECLARATIONS and hasattr(type(inside), name):  # a custom_vjp of a custom_vmap, for instance
            return getattr(inside, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def defjvp(self, jvp: Callable, symbolic_zeros: bool = False) -> Callable:
        """Declare the forward rule `jvp`.

        Args:
            jvp: `jvp(*nondiff_args, primals, tangents)` returns a pair (result, tangent). `primals` and `tangents` are
                tuples of the arguments and of their tangents, which have the arguments' structure and types (zeros for
                a constant argument; dtype `float0` for integers). The result's tangent has the structure and type of
                the result, and is linear in `tangents`.
            symbolic_zeros: the tangent of a constant argument or of an integer is a `SymbolicZero` in place of an array
                of zeros, and the rule may return one.

        Returns:
            The rule, so that this is a decorator.

        Raises:
            TypeError: where the rule is used, if it returns anything else.
            VarianceError: where the rule is used in the body of a `shard_map`, if a tangent varies along an axis along
                which the result does not. (If it varies along fewer axes, a pbroadcast is inserted.)
        """
        self.jvp, self.jvp_gets_symbolic_zeros = jvp, symbolic_zeros
        return jvp

    def defjvps(self, *jvps: Callable | None) -> None:
        """Declare a forward rule for each argument; the tangent of the result is their sum.

        Args:
            jvps: for each argument `jvp(tangent, result, *primals)`, which returns a term of the result's tangent, or
                None if the argument does not contribute.

        Raises:
            TypeError: for a function with `nondiff_argnums`.
        """
        if self.nondiff_argnums:
            raise TypeError(f"{self.name}: with nondiff_argnums, declare one rule with defjvp")

        def jvp(primals, tangents):
            out = self(*primals)
            terms = [rule(t, out, *primals) for rule, t in zip(jvps, tangents, strict=True) if rule is not None]
            zeros = tree.map(lambda x: instantiate(None, as_value(x)), out)
            return out, functools.reduce(lambda a, b: tree.map(lambda x, y: x + y, a, b), terms) if terms else zeros

        self.defjvp(jvp)

    @hide_own_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = self._positional(args, kwargs)
        call = DerivativeCall(self, args)
        outs = self.primitive.bind(*call.leaves(args), name=self.name, body=call.body, jvp=self._rule(call), consts=0)
        return tree.unflatten(call.out_structure, outs)


def _position(fun: Callable, function: str, name: str) -> int:
    """Return the position of the argument that `nondiff_argnames` names."""
    parameters = inspect.signature(fun).parameters
    by_position = [k for k, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if name not in by_position:
        raise TypeError(f"{function}: nondiff_argnames names {name!r}, but its positional arguments are {by_position}")
    return by_position.index(name)


class DerivativeCall(RuleCall):
    """One call of a function with derivative rules: also its static arguments."""

    def __init__(self, function: DifferentiableFunction, args: tuple):
        for n in function.nondiff_argnums:
            if not -len(args) <= n < len(args):
                raise TypeError(
                    f"{function.name}: nondiff_argnums names argument {n}, but it was called with {len(args)}"
                )
        self.static = {n: args[n] for n in sorted(n % len(args) for n in function.nondiff_argnums)}
        self.dynamic = [i for i in range(len(args)) if i not in self.static]
        leaves, structure = tree.flatten_with_paths([args[i] for i in self.dynamic])
        super().__init__(function, structure, are_weak(x for _, x in leaves))
        self.paths = [describe_argument(path, self.dynamic) for path, _ in leaves]
        self.types = [typeof(as_value(x)) for _, x in leaves]
        #: Rules get Python numbers only next to arrays: numbers alone become NumPy scalars, which may divide by zero.
        self.weak_in_rules = [] if all(self.weak) else self.weak
        self.out_types: list[ShapedArray] | None = None  # of the function's results, once the function itself has run
        self.residuals: Any = None  # the structure of fwd's residuals, and which of their leaves are Python numbers

    def leaves(self, args: tuple) -> list[Value]:
        return [as_value(x) for x in tree.leaves([args[i] for i in self.dynamic])]

    def all_args(self, leaves: Sequence[Any]) -> list[Any]:
        args = {**self.static, **dict(zip(self.dynamic, tree.unflatten(self.structure, leaves)))}
        return [args[i] for i in range(len(args))]

    def body(self, *leaves: Value) -> list[Value]:
        outs = self.results(self.function.fun(*self.all_args(restore_weak(self.weak, leaves))), self.function.name)
        self.out_types = [typeof(x) for x in outs]
        return outs

    def jvp(self, *leaves: Any) -> list[Value | None]:
        """Apply the forward rule: map leaves and their tangents to results and tangents."""
        primals, tangents = split_list(leaves, len(leaves) // 2)
        types = [typeof(x) for x in primals]
        if not self.function.jvp_gets_symbolic_zeros:
            tangents = [instantiate(t, x) for t, x in zip(tangents, types)]
        weak_tangents = [is_weak and t is not None for is_weak, t in zip(self.weak_in_rules, tangents)]
        pair = restore_weak(self.weak_in_rules, primals), _symbolic(restore_weak(weak_tangents, tangents), types)
        args = *self.static.values(), *[tuple(tree.unflatten(self.structure, x)) for x in pair]
        title, outs, tangent = self.apply_derivative_rule("jvp", self.function.jvp, "result, tangent", *args)
        paths, structure = tree.flatten_with_paths(tangent)
        if structure != self.out_structure:
            raise TypeError(f"{title} must return a tangent like its result: {self.out_structure}, got {structure}")
        out_tangents = [
            _fit_derivative(x, t, f"{title} returns a result{path} of type {t}: its tangent", _OF_A_RESULT)
            for t, (path, x) in zip(map(typeof, outs), paths)
        ]
        return [*outs, *out_tangents]

    def jvp_by_transpose(self, *leaves: Value) -> list[Value | None]:
        """Apply the jvp rule of a function with a backward rule: run `fwd`, then one `linear_call`.

        A forward rule, if there is one, evaluates the `linear_call`.
        """
        name, jvp = self.function.name, self.function.jvp
        primals, tangents = split_list(leaves, len(leaves) // 2)
        active = [t is not None for t in tangents]
        outs, residuals = self.fwd(primals, active)
        types = [typeof(x) for x in outs]
        differentiable = [is_differentiable(t.dtype) for t in types]

        def push_forward(*values):
            _, primals, tangents = split_list(values, len(residuals), len(active))
            out_tangents = self.jvp(*primals, *scatter(tangents, active))[len(types) :]
            title = f"the jvp rule of {name} returns a tangent that"
            pairs = select(zip(out_tangents, types), differentiable)
            return [_cast_to_fit(instantiate(t, like), like, title, _OF_A_RULE) for t, like in pairs]

        out_tangents = linear_call_p.bind(
            *residuals,
            *(primals if jvp else []),
            *drop_none(tangents),
            name=name,
            body=push_forward if jvp else None,
            bwd=functools.partial(self.bwd, types),
            symbolic_zeros=self.function.vjp_gets_symbolic_zeros,
            consts=0,
            residuals=len(residuals),
            active=tuple(positions(active)),
            out_types=tuple(types),
        )
        return [*outs, *scatter(out_tangents, differentiable)]

    def fwd(self, leaves: Sequence[Value], active: Sequence[bool]) -> tuple[list[Value], list[Value]]:
        """Apply the rule `fwd`: map leaves, of which the `active` ones have tangents, to results and residuals."""
        leaves = restore_weak(self.weak_in_rules, leaves)
        if self.function.vjp_gets_symbolic_zeros:
            leaves = list(map(CustomVJPPrimal, leaves, active))
        args = self.all_args(leaves)
        title, outs, residuals = self.apply_derivative_rule("forward", self.function.fwd, "result, residuals", *args)
        residuals, structure = tree.flatten(residuals)
        self.residuals = structure, are_weak(residuals)
        message = f"{title} must return residuals that are arrays"
        advice = "; make any other value an argument, named by nondiff_argnums: both rules get it"
        return outs, [as_named_value(x, message, advice) for x in residuals]

    def bwd(
        self, types: Sequence[ShapedArray], residuals: Sequence[Value], cts: Sequence[Value | None]
    ) -> list[Value | None]:
        """Apply the rule `bwd`: map residuals and cotangents of results to cotangents (None for zero)."""
        structure, weak = self.residuals
        residuals = tree.unflatten(structure, restore_weak(weak, residuals))
        cts = tree.unflatten(self.out_structure, _symbolic(cts, [t.cotangent for t in types]))
        title, advice = self.title_of("backward", self.function.bwd), _IN_THE_BACKWARD_PASS
        with explain_leak(title, advice.format(fwd=_name(self.function.fwd))):
            return self._cotangents(title, self.function.bwd(*self.static.values(), residuals, cts))

    def _cotangents(self, title: str, cts: Any) -> list[Value | None]:
        count = len(self.dynamic)
        if not (isinstance(cts, (tuple, list)) and len(cts) == count):
            raise TypeError(
                f"{title} must return a tuple of {count} cotangents, one for each argument, got {tree.structure(cts)}"
            )
        leaves = [
            leaf
            for i, ct, s in zip(self.dynamic, cts, self.structure.children)
            for leaf in _cotangent_leaves(ct, s, f"{title} must return a cotangent like argument {i}: {s}, got ")
        ]
        return [
            _fit_derivative(ct, t.cotangent, f"{title} returns a cotangent of {path}: it", _OF_AN_ARGUMENT, is_weak)
            for ct, t, path, is_weak in zip(leaves, self.types, self.paths, self.weak)
        ]

    def apply_derivative_rule(self, kind: str, rule: Any, pair: str, *args: Any) -> tuple[str, list[Any], Any]:
        """Apply a rule that returns a pair; cast its result to the types of the function's, if that has run itself."""
        title, outs, second = self.apply_rule(kind, rule, _WHEN_DIFFERENTIATED, pair, *args)
        types = self.out_types or map(typeof, outs)
        subject = f"{title} returns another result than {self.function.name}: it"
        return title, [_cast_to_fit(x, t, subject, _OF_A_RULE) for x, t in zip(outs, types)], second


def _fit_derivative(x: Any, like: ShapedArray, *context: Any) -> Value | None:
    """Return a tangent or cotangent that a rule returned, cast to the type `like`; None if it is zero."""
    is_zero = x is None or type(x) is SymbolicZero or not is_differentiable(like.dtype)
    return None if is_zero else _cast_to_fit(x, like, *context)


def _cast_to_fit(x: Any, like: ShapedArray, subject: str, advice: str, weak: bool = False) -> Value:
    """Cast a tangent or cotangent `x` to the type `like`, by a pbroadcast if `x` varies along fewer axes.

    That of a Python number (`weak`) may have the precision of the arrays beside it. Raises TypeError, beginning with
    `subject`, for another type; VarianceError, ending with `advice` on the `axes`, if `x` varies along more axes.
    """
    if isinstance(x, (bool, int, float, complex)) and not isinstance(x, numpy.generic):
        x = numpy.asarray(x, like.dtype)[()]  # a Python number takes any precision
    x = as_named_value(x, f"{subject} must have the type {like}")
    if weak and is_differentiable(x.dtype) and numpy.can_cast(x.dtype, like.dtype, "same_kind"):
        x = convert(x, like.dtype)
    t = typeof(x)
    if (t.shape, t.dtype) != (like.shape, like.dtype):
        raise TypeError(f"{subject} must have the type {like}, got {t}")
    extra = t.variance - like.variance - like.unreduced
    if extra:
        along = ", ".join(map(repr, sorted(extra)))
        advice = advice.format(axes=show_axes(extra))
        raise VarianceError(f"{subject} must have the type {like}, got {t}, which varies along {along}: {advice}")
    try:
        return cast_to(x, like.states)
    except VarianceError as error:
        raise VarianceError(f"{subject} must have the type {like}: {error}") from None


class custom_jvp(DifferentiableFunction):
    """A function with a derivative rule, for forward and reverse mode alike.

    Declare the rule with `defjvp` (for all arguments at once) or `defjvps` (one for each).

    Args:
        fun: a function of trees of arrays.
        nondiff_argnums: the positions of arguments that are not arrays, functions for instance: an int, or a tuple of
            ints. Rules take these arguments first.
        nondiff_argnames: the names of further such arguments: a string, or a tuple of strings.

    Raises:
        AttributeError: by a call, if no rule was declared.
        TypeError: by a call, for arguments by keyword only, which rules cannot take.

    >>> import numpy as np
    >>> from minidiff import grad
    >>> @custom_jvp
    ... def log1pexp(x):
    ...     return np.log(1.0 + np.exp(x))
    >>> @log1pexp.defjvp
    ... def log1pexp_jvp(primals, tangents):
    ...     (x,), (t,) = primals, tangents
    ...     return log1pexp(x), (1 - 1 / (1 + np.exp(x))) * t
    >>> float(grad(log1pexp)(0.0))
    0.5
    """

    primitive = custom_jvp_p

    def _rule(self, call):
        if self.jvp is None:
            raise AttributeError(f"{self.name} is a custom_jvp without a rule: declare one with {self.name}.defjvp")
        return call.jvp


_OF_A_RULE = "the function makes it the same on all ranks there; so must the rule, as by psum(result, {axes})"
_OF_A_RESULT = (
    "the result is the same on all ranks there, and so is its derivative. Sum the tangent as the function sums its "
    "result, psum(tangent, {axes}); or let the result vary, pbroadcast(result, {axes})"
)
_OF_AN_ARGUMENT = (
    "the argument is the same on all ranks there, and each rank has computed one term of its cotangent. "
    "Return the sum of the terms, psum(cotangent, {axes}); or call the function with pbroadcast(argument, {axes}), "
    "whose transpose is that sum"
)


class custom_vjp(DifferentiableFunction):
    """A function with two rules for reverse mode, `fwd` and `bwd`, which `defvjp` declares.

    Forward mode (`jvp`, `jacfwd`, the function that `linearize` returns) raises TypeError, unless a forward rule is
    declared too, with `defjvp` or `defjvps` as for a `custom_jvp`. The two must agree: `bwd` is the transpose of the
    linear map from tangents to the result's tangent. `minidiff.checks.testing.check_grads` checks both.

    Args:
        fun: a function of trees of arrays.
        nondiff_argnums: the positions of arguments that are not arrays, functions for instance: an int, or a tuple of
            ints. Rules take these arguments first.
        nondiff_argnames: the names of further such arguments: a string, or a tuple of strings.

    Raises:
        AttributeError: by a call, if no rules were declared.
        TypeError: by a call, for arguments by keyword only, which rules cannot take.

    >>> import numpy as np
    >>> from minidiff import grad
    >>> @custom_vjp
    ... def clipped(x):
    ...     return x
    >>> clipped.defvjp(lambda x: (x, None), lambda _, ct: (np.clip(ct, -1.0, 1.0),))
    >>> float(grad(lambda x: 5.0 * clipped(x))(3.0))
    1.0

    With both rules:

    >>> from minidiff import jvp
    >>> @custom_vjp
    ... def twice(x):
    ...     return 2.0 * x
    >>> twice.defvjp(lambda x: (2.0 * x, None), lambda _, ct: (2.0 * ct,))
    >>> twice.defjvps(lambda t, out, x: 2.0 * t)
    >>> float(grad(twice)(3.0)), float(jvp(twice, (3.0,), (1.0,))[1])
    (2.0, 2.0)
    """

    primitive = custom_vjp_p
    fwd: Callable | None = None
    bwd: Callable | None = None

    def defvjp(self, fwd: Callable, bwd: Callable, symbolic_zeros: bool = False) -> None:
        """Declare the forward rule `fwd` and the backward rule `bwd`.

        Args:
            fwd: `fwd(*args)` returns a pair (result, residuals); residuals are a tree of arrays that `bwd` needs.
            bwd: `bwd(*nondiff_args, residuals, ct)` takes a cotangent like the result, and returns a tuple of
                cotangents like the arguments (except the `nondiff_argnums`); None means zeros.
            symbolic_zeros: the rules learn which values are not differentiated. Each leaf that `fwd` gets is an object
                with the attributes `value` and `perturbed`, which is False for a constant. `bwd` gets a `SymbolicZero`
                in place of a cotangent of zeros, and may return `SymbolicZero`s.

        Raises:
            TypeError: where the rules are used, if they return anything else.
            VarianceError: where the rules are used in the body of a `shard_map`, if a cotangent varies along an axis
                along which the argument does not: sum it with `psum`. (If it varies along fewer axes, a pbroadcast is
                inserted.)
        """
        self.fwd, self.bwd, self.vjp_gets_symbolic_zeros = fwd, bwd, symbolic_zeros

    def _rule(self, call):
        if self.fwd is None or self.bwd is None:
            raise AttributeError(f"{self.name} is a custom_vjp without rules: declare them with {self.name}.defvjp")
        return call.jvp_by_transpose


_WHEN_DIFFERENTIATED = (
    "runs when the derivative is taken, but closes over a value of a program that was recorded before: {error} "
    "Make the value an argument: pass it to the function, and the rule gets it too"
)
_IN_THE_BACKWARD_PASS = (
    "runs in the backward pass, but closes over a value of the forward pass: {{error}} Make the value a residual: "
    "return it from {fwd}, the forward rule, together with the result"
)


def _cotangent_leaves(ct: Any, structure: tree.Structure, message: str) -> list:
    """Return the leaves of a cotangent; None means a whole tree of zeros."""
    if ct is None:
        return [None] * structure.size
    leaves, other = tree.flatten(ct)
    if other == structure:
        return leaves
    if other.keys != structure.keys or other.node is not structure.node or other.node is None:
        raise TypeError(message + str(other))
    below = zip(tree.children(ct), structure.children)
    return [leaf for child, inner in below for leaf in _cotangent_leaves(child, inner, message)]
