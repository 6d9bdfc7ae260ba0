"""Derivative rules of one's own, and values that count as constants.

A function with a rule is an operation with a body: evaluated, vectorised and staged it is its body, and a derivative
takes the rule instead. Rules are functions like others, and have derivatives themselves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.aliasing import apart
from minidiff.batching import BatchTracer, stacked
from minidiff.calls import BatchInside, Body, Call, batched_body
from minidiff.core import (
    Interpreter,
    LeakedTracerError,
    Primitive,
    ShapedArray,
    Tracer,
    Value,
    VarianceError,
    checking,
    current_interpreter,
    is_differentiable,
    lift_to,
    name_of,
    running,
    transforming,
    typeof,
)
from minidiff.forward import JVP, as_named_value, as_value, instantiate
from minidiff.ops import reduction
from minidiff.ops.elementwise import stop_gradient as constant
from minidiff.reverse import Linearize
from minidiff.tape import Tape

# ---------------------------------------------------------------- stop_gradient


def stop_gradient(x: Any) -> Any:
    """`x`, a tree of arrays, as a constant: its derivative is zero.

    >>> from minidiff import grad
    >>> float(grad(lambda x: x * stop_gradient(x))(3.0))
    3.0
    """
    return tree.map(lambda leaf: constant(as_value(leaf)), x)


# ---------------------------------------------------------------- the operations


class Guard(Interpreter):
    """Passes all on, and raises where a rule meets a value that is differentiated around it, but no argument of it."""

    name = "a custom rule"

    def __init__(self, below: Interpreter, outside: JVP, what: str):
        super().__init__(below)
        self.outside = outside
        self.what = what

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        for x in args:
            self.check(x)
        if primitive.in_place:
            params = {**params, "body": self.around(params["body"])}
        with running(self.below):
            return primitive.apply(self.below, args, params)

    def adopt(self, x: Value) -> Value:
        self.check(x)
        return super().adopt(x)

    def check(self, x: Value) -> None:
        if isinstance(x, Tracer):
            outside = self.outside
            while outside is not None:  # as it is around the body of a shard_map, too
                if x.interpreter is outside:
                    raise closed_over(self.what, x)
                outside = outside.outer

    def around(self, body: Body) -> Body:
        """A body, guarded wherever it is run."""

        def guarded(*args):
            guard = Guard(current_interpreter(), self.outside, self.what)
            with running(guard):
                outs = body(*args)
                for x in tree.leaves(outs):
                    guard.check(x)
            return outs

        guarded.__name__ = name_of(body)
        return guarded if not isinstance(body, Tape) else body


def closed_over(what: str, x: Value) -> TypeError:
    return TypeError(
        f"{what} closes over a value of type {typeof(x)} that is being differentiated; its rule gives derivatives in "
        "its arguments alone (but for those of nondiff_argnums): pass the value as one, or through stop_gradient, if "
        "it is to be a constant"
    )


class Custom(Call):
    """A call of a function with a rule. Parameters: `what`, its name; `body`; rules, functions of leaves; `consts`.

    On tapes the body takes `consts` values before the arguments that it closes over: the rules do not know of them.
    """

    rules: tuple[str, ...]

    def jvp_body(self, outside, args, params):
        primals, tangents = outside.split(args)
        guard = Guard(current_interpreter(), outside, params["what"])
        if all(t is None for t in tangents):
            guarded = {name: guard.around(params[name]) for name in ("body", *self.rules)}
            return self.bind(*primals, **{**params, **guarded})
        consts = params["consts"]
        for x, t in zip(args, tangents[:consts]):
            if t is not None:
                raise closed_over(params["what"], x)
        with running(guard), checking(guard.scope, False):
            outs, out_tangents = self.apply_rule(primals[consts:], tangents[consts:], params)
            for x in [*outs, *out_tangents]:
                guard.check(x)
        return [outside.join(x, t) for x, t in zip(outs, out_tangents)]

    def apply_rule(self, primals: list[Value], tangents: list[Value | None], params: dict) -> tuple[list, list]:
        raise NotImplementedError

    def staged_params(self, params, tape, constants):
        return {**params, "body": tape, "consts": params["consts"] + constants}

    def show_params(self, params):
        return params["what"]


class CustomJVP(Custom):
    """Its rule `jvp` takes leaves and their tangents, and gives the results, then their tangents (None for zero)."""

    rules = ("jvp",)

    def apply_rule(self, primals, tangents, params):
        results = params["jvp"](*primals, *[instantiate(t, p) for t, p in zip(tangents, primals)])
        count = len(results) // 2
        return results[:count], results[count:]

    def batched_params(self, params, outside, batched):
        arguments = batched[params["consts"] :]
        rule = batched_body(params["jvp"], outside, [*arguments, *arguments])
        return {**super().batched_params(params, outside, batched), "jvp": rule}


class CustomVJP(Custom):
    """Its rules are `fwd`, from leaves to lists of results and of residuals, and `bwd`, from residuals and cotangents.

    Forward mode makes of it one linear equation, `pull_back_p`, which can do nothing but be transposed.
    """

    rules = ("fwd", "bwd")

    def apply_rule(self, primals, tangents, params):
        outs, residuals = params["fwd"](*primals)
        active = tuple(i for i, t in enumerate(tangents) if t is not None)
        moving = [i for i, x in enumerate(outs) if is_differentiable(typeof(x).dtype)]
        out_tangents = pull_back_p.bind(
            *residuals,
            *[tangents[i] for i in active],
            what=params["what"],
            bwd=params["bwd"],
            active=active,
            out_types=tuple(typeof(x) for x in outs),
        )
        found = dict(zip(moving, out_tangents))
        return outs, [found.get(i) for i in range(len(outs))]

    def batched_params(self, params, outside, batched):
        arguments = batched[params["consts"] :]
        residuals_batched: list[bool] = []

        def fwd(*values):
            inside = BatchInside(current_interpreter(), outside.size_of_batch, outer=outside)
            with transforming(inside):
                outs, residuals = params["fwd"](
                    *[BatchTracer(inside, x, 0) if b else x for x, b in zip(values, arguments)]
                )
                outs, residuals = ([inside.adopt(x) for x in xs] for xs in (outs, residuals))
            residuals_batched[:] = map(inside.owns, residuals)
            return [stacked(inside, x, 0) for x in outs], [inside.in_front(x) for x in residuals]

        def bwd(residuals, cts):
            flat = batched_body(
                lambda *xs: params["bwd"](xs[: len(residuals)], xs[len(residuals) :]),
                outside,
                [*residuals_batched, *[True] * len(cts)],
            )
            return [
                ct if b or ct is None else reduction.sum(ct, axis=0) for ct, b in zip(flat(*residuals, *cts), arguments)
            ]

        return {**super().batched_params(params, outside, batched), "fwd": fwd, "bwd": bwd}


class PullBack(Primitive):
    """The linear part of a function with a backward rule: from tangents to tangents, known by its transpose alone.

    Its operands are the residuals, then the tangents of the `active` ones among the arguments.
    """

    has_body = True
    multiple_results = True
    lifts_operands = False

    def __init__(self):
        super().__init__("pull_back")

    def linearize_body(self, outside: Linearize, args: Sequence[Value], params: dict) -> list[Value]:
        if not any(map(outside.owns, args)):  # forward mode of its own, in a rule
            return self.bind(*args, **params)
        return outside.record(self, args, params)

    def transpose(self, cts, operands, params):
        active, types = params["active"], params["out_types"]
        residuals = operands[: len(operands) - len(active)]
        given = iter(cts)
        cts = [instantiate(next(given) if is_differentiable(t.dtype) else None, t) for t in types]
        found = apart(params["bwd"](residuals, cts), residuals)
        return [None] * len(residuals) + [found[i] for i in active]

    def typecheck(self, types, params):
        return [t for t in params["out_types"] if is_differentiable(t.dtype)]

    def show_params(self, params):
        return params["what"]

    def evaluate(self, args, params):
        raise TypeError(
            f"{params['what']} has a backward rule only (custom_vjp), and no derivative in forward mode (jvp, "
            "jacfwd, a function that linearize returned); take reverse mode, or give it a custom_jvp: it serves both"
        )

    def jvp_body(self, outside, args, params):
        return self.evaluate(args, params)

    batch_body = stage_body = jvp_body


custom_jvp_p = CustomJVP("custom_jvp")
custom_vjp_p = CustomVJP("custom_vjp")
pull_back_p = PullBack()


# ---------------------------------------------------------------- what users call


class _Function:
    """What `custom_jvp` and `custom_vjp` share: they stand for a function, some of whose arguments may be static."""

    def __init__(self, fun: Callable, nondiff_argnums: int | Sequence[int] = ()):
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.what = getattr(fun, "__name__", "f")
        self.nondiff_argnums = (nondiff_argnums,) if isinstance(nondiff_argnums, int) else tuple(nondiff_argnums)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _positional(self, args: tuple, kwargs: dict) -> tuple:
        """All arguments by position, defaults put in: rules take them that way."""
        try:
            bound = None if isinstance(self.fun, numpy.ufunc) else inspect.signature(self.fun).bind(*args, **kwargs)
        except ValueError:  # a function written in C, as ufuncs are, whose `out` and `where` no rule knows
            bound = None
        if bound is not None:
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        if kwargs:
            raise TypeError(f"{self.what}: rules take arguments by position, but {sorted(kwargs)} go by keyword only")
        return args


class _Call:
    """One call of a function with a rule: which arguments are static, and how the others' leaves make them up.

    The leaves themselves it does not hold: rules live as long as the tapes that they are on.
    """

    def __init__(self, function: _Function, args: tuple):
        self.function = function
        for n in function.nondiff_argnums:
            if not -len(args) <= n < len(args):
                raise TypeError(
                    f"{function.what}: nondiff_argnums names argument {n}, but it was called with {len(args)}"
                )
        self.static = {n % len(args): args[n] for n in sorted(function.nondiff_argnums)}
        self.moving = [i for i in range(len(args)) if i not in self.static]
        leaves, self.structure = tree.flatten_with_paths([args[i] for i in self.moving])
        places = [path[1:].partition("]") for path, _ in leaves]
        self.paths = [f"argument {self.moving[int(n)]}{rest}" for n, _, rest in places]
        self.types = [typeof(as_value(x)) for _, x in leaves]
        self.out_structure: tree.Structure | None = None
        self.out_types: list[ShapedArray] | None = None  # of the function's results, if it has been recorded itself

    def leaves(self, args: tuple) -> list[Value]:
        return [as_value(x) for x in tree.leaves([args[i] for i in self.moving])]

    def all_args(self, leaves: Sequence[Value]) -> list[Any]:
        args = {**self.static, **dict(zip(self.moving, tree.unflatten(self.structure, leaves)))}
        return [args[i] for i in range(len(args))]

    def body(self, *leaves: Value) -> list[Value]:
        outs = self.results(self.function.fun(*self.all_args(leaves)), self.function.what)
        self.out_types = [typeof(x) for x in outs]
        return outs

    def rule(self, f: Callable, *given: Callable) -> Callable:
        """`f`, that calls rules which were `given`: on tapes, the same as that of another call like this one."""
        f.same_as = (self.function, *given, tuple(self.static.items()), self.structure)
        return f

    def results(self, out: Any, who: str) -> list[Value]:
        """The leaves of the function's result, whoever computed it: the function itself or one of its rules."""
        leaves, structure = tree.flatten(out)
        if self.out_structure is not None and structure != self.out_structure:
            raise TypeError(
                f"{who} must return a result like {self.function.what}'s: {self.out_structure}, got {structure}"
            )
        self.out_structure = structure
        return [as_value(x) for x in leaves]

    def results_of_rule(self, out: Any, who: str) -> list[Value]:
        """The same of a rule: the types are the function's, where they are known."""
        outs = self.results(out, who)
        if self.out_types is None:
            return outs
        what = f"{who} returns another result than {self.function.what}: it"
        return [_fitted(x, t, what, _OF_A_RULE) for x, t in zip(outs, self.out_types)]


def _name(rule: Callable) -> str:
    return getattr(rule, "__name__", str(rule))


def _fitted(x: Any, like: ShapedArray, what: str, advice: str) -> Value:
    """A tangent or cotangent `x` as a value of the type `like`: lifted, where it varies along fewer axes.

    Raises TypeError, beginning with `what`; VarianceError, ending with `advice` on the `axes`, where it varies along
    more.
    """
    if isinstance(x, (bool, int, float, complex)) and not isinstance(x, numpy.generic):
        x = numpy.asarray(x, like.dtype)[()]  # a Python number has whatever precision is asked for
    x = as_named_value(x, f"{what} must have the type {like}")
    t = typeof(x)
    if (t.shape, t.dtype) != (like.shape, like.dtype):
        raise TypeError(f"{what} must have the type {like}, got {t}")
    extra = sorted(t.variance - like.variance)
    if extra:
        axes = repr(extra[0] if len(extra) == 1 else tuple(extra))
        varies = f"{what} must have the type {like}, got {t}, which varies along {', '.join(map(repr, extra))}: "
        raise VarianceError(varies + advice.format(axes=axes))
    return lift_to(x, like.variance)


class custom_jvp(_Function):
    """A function whose derivative is given by a rule, for forward and reverse mode alike.

    Declare the rule with `defjvp` (of all arguments at once) or `defjvps` (one for each). `nondiff_argnums` are
    arguments that are no arrays, functions for instance: rules take them first.

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

    jvp: Callable | None = None

    def defjvp(self, jvp: Callable) -> Callable:
        """Declare the rule: `jvp(*nondiff_args, primals, tangents)` returns a pair, the result and its tangent.

        `primals` and `tangents` are tuples of the arguments and of their tangents, which are like them (zeros, where
        an argument is constant; of dtype `float0` for integers). The tangent of the result is like the result, and
        is linear in `tangents`. Raises TypeError, when it is used, where it returns anything else; VarianceError, where
        in the body of a `shard_map` a tangent varies along an axis along which the result does not. (One that varies
        along fewer is lifted.)
        """
        self.jvp = jvp
        return jvp

    def defjvps(self, *jvps: Callable | None) -> None:
        """Declare a rule for each argument: `jvp(tangent, result, *primals)`, or None where it does not contribute."""
        if self.nondiff_argnums:
            raise TypeError(f"{self.what}: with nondiff_argnums, declare one rule with defjvp")

        def jvp(primals, tangents):
            out = self(*primals)
            terms = [rule(t, out, *primals) for rule, t in zip(jvps, tangents, strict=True) if rule is not None]
            zeros = tree.map(lambda x: instantiate(None, as_value(x)), out)
            return out, functools.reduce(lambda a, b: tree.map(lambda x, y: x + y, a, b), terms) if terms else zeros

        self.jvp = jvp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.jvp is None:
            raise AttributeError(f"{self.what} is a custom_jvp without a rule: declare one with {self.what}.defjvp")
        args = self._positional(args, kwargs)
        call = _Call(self, args)

        def rule(*leaves):
            count = len(leaves) // 2
            primals, tangents = (tuple(tree.unflatten(call.structure, x)) for x in (leaves[:count], leaves[count:]))
            return _checked_jvp(self.jvp(*call.static.values(), primals, tangents), call, _name(self.jvp))

        outs = custom_jvp_p.bind(
            *call.leaves(args), what=self.what, body=call.body, jvp=call.rule(rule, self.jvp), consts=0
        )
        return tree.unflatten(call.out_structure, outs)


_OF_A_RULE = "the function makes it the same on all ranks there; so must the rule, as by psum(result, {axes})"
_OF_A_RESULT = (
    "the result is the same on all ranks there, and so is its derivative. Sum the tangent as the function sums its "
    "result, psum(tangent, {axes}); or let the result vary, pbroadcast(result, {axes})"
)
_OF_AN_ARGUMENT = (
    "the argument is one value that all ranks there share, and each rank has found its own part of the cotangent. "
    "Return the sum of them, psum(cotangent, {axes}); or call the function with pbroadcast(argument, {axes}), whose "
    "transpose is that sum"
)


def _checked_jvp(pair: Any, call: _Call, name: str) -> list[Value | None]:
    """What a rule returned, as results and their tangents."""
    who = f"{name}, the jvp rule of {call.function.what},"
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise TypeError(f"{who} must return a pair (result, tangent), got {tree.structure(pair)}")
    outs = call.results_of_rule(pair[0], who)
    paths, structure = tree.flatten_with_paths(pair[1])
    if structure != call.out_structure:
        raise TypeError(f"{who} must return a tangent like its result: {call.out_structure}, got {structure}")
    tangents = []
    for x, (path, t) in zip(outs, paths):
        like = typeof(x)
        if not is_differentiable(like.dtype):
            tangents.append(None)
            continue
        tangents.append(_fitted(t, like, f"{who} returns a result{path} of type {like}: its tangent", _OF_A_RESULT))
    return [*outs, *tangents]


class custom_vjp(_Function):
    """A function whose derivative in reverse mode is given by two rules. Forward mode it has none.

    >>> import numpy as np
    >>> from minidiff import grad
    >>> @custom_vjp
    ... def clipped(x):
    ...     return x
    >>> clipped.defvjp(lambda x: (x, None), lambda _, ct: (np.clip(ct, -1.0, 1.0),))
    >>> float(grad(lambda x: 5.0 * clipped(x))(3.0))
    1.0
    """

    fwd: Callable | None = None
    bwd: Callable | None = None

    def defvjp(self, fwd: Callable, bwd: Callable) -> None:
        """Declare the rules: `fwd(*args)` returns a pair (result, residuals), a tree of arrays that `bwd` needs.

        `bwd(*nondiff_args, residuals, ct)` takes a cotangent like the result, and returns a tuple of cotangents like
        the arguments (but for the `nondiff_argnums`); None stands for zeros. Raises TypeError, when they are used,
        where they return anything else; VarianceError, where in the body of a `shard_map` a cotangent varies along an
        axis along which the argument does not: such a one is to be summed, with `psum`. (One that varies along fewer
        axes is lifted.)
        """
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fwd is None or self.bwd is None:
            raise AttributeError(f"{self.what} is a custom_vjp without rules: declare them with {self.what}.defvjp")
        args = self._positional(args, kwargs)
        call = _Call(self, args)
        residual_structure: list[tree.Structure] = []

        def fwd(*leaves):
            who = f"{_name(self.fwd)}, the forward rule of {self.what},"
            pair = self.fwd(*call.all_args(leaves))
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
                raise TypeError(f"{who} must return a pair (result, residuals), got {tree.structure(pair)}")
            residuals, structure = tree.flatten(pair[1])
            residual_structure[:] = [structure]
            return call.results_of_rule(pair[0], who), [_residual(x, who) for x in residuals]

        def bwd(residuals, cts):
            residuals = tree.unflatten(residual_structure[0], residuals)
            try:
                cts = self.bwd(*call.static.values(), residuals, tree.unflatten(call.out_structure, cts))
            except LeakedTracerError as error:
                raise LeakedTracerError(
                    f"{_name(self.bwd)}, the backward rule of {self.what}, runs in the backward pass, and what it "
                    f"closes over is of the forward pass: {error} A rule gets such a value as a residual: return it "
                    f"from {_name(self.fwd)}, the forward rule, beside the result"
                ) from None
            return _checked_cotangents(cts, call, f"{_name(self.bwd)}, the backward rule of {self.what},")

        rules = {"fwd": call.rule(fwd, self.fwd), "bwd": call.rule(bwd, self.bwd)}
        outs = custom_vjp_p.bind(*call.leaves(args), what=self.what, body=call.body, **rules, consts=0)
        return tree.unflatten(call.out_structure, outs)


def _residual(x: Any, who: str) -> Value:
    advice = "; what is none is an argument of its own, named by nondiff_argnums: both rules get it"
    return as_named_value(x, f"{who} must return residuals that are arrays", advice)


def _checked_cotangents(cts: Any, call: _Call, who: str) -> list[Value | None]:
    """What a backward rule returned, as a cotangent for each leaf of the arguments; None for zero."""
    count = len(call.moving)
    if not (isinstance(cts, (tuple, list)) and len(cts) == count):
        raise TypeError(
            f"{who} must return a tuple of {count} cotangents, one for each argument, got {tree.structure(cts)}"
        )
    leaves: list[Any] = []
    for i, ct, structure in zip(call.moving, cts, call.structure.children):
        _cotangent_leaves(ct, structure, leaves, f"{who} must return a cotangent like argument {i}: {structure}, got ")
    return [
        None
        if ct is None or not is_differentiable(t.dtype)
        else _fitted(ct, t, f"{who} returns a cotangent of {path}: it", _OF_AN_ARGUMENT)
        for ct, t, path in zip(leaves, call.types, call.paths)
    ]


def _cotangent_leaves(ct: Any, structure: tree.Structure, found: list, message: str) -> None:
    """The leaves of a cotangent; None stands for a whole tree of zeros."""
    if ct is None:
        found.extend([None] * structure.size)
        return
    leaves, given = tree.flatten(ct)
    if given == structure:
        found.extend(leaves)
        return
    if given.keys != structure.keys or given.node is not structure.node or given.node is None:
        raise TypeError(message + str(given))
    children = [ct[k] for k in given.keys] if isinstance(ct, dict) else list(ct)
    for child, inner in zip(children, structure.children):
        _cotangent_leaves(child, inner, found, message)
