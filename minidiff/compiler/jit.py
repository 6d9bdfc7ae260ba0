"""`jit`: stage a function to a tape, optimize it, and compile it to NumPy source.

This shows another way to implement differentiation, source transformation: `jit(grad(f))` is a Python program that
computes the gradient, and `jit(grad(f)).source(*args)` shows it.

>>> import numpy as np
>>> from minidiff import grad
>>> g = jit(grad(lambda x, y: np.log(x) + x * y - np.sin(y), argnums=(0, 1)))
>>> print(g.source(2.0, 5.0))
def f(a, b):  # f64[], f64[]
    c = cos(b)  # f64[]
    d = a - c  # f64[]
    e = 1 / a  # f64[]
    f = b + e  # f64[]
    return f, d
"""

from __future__ import annotations

import operator
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.api.recording import jit_is_disabled, stage_flat
from minidiff.api.vmap import named_axes
from minidiff.compiler.cache import Recent, has_closures, programs_of
from minidiff.compiler.codegen import current_profiler
from minidiff.compiler.program import CompiledProgram, all_passes, check_options, optimize
from minidiff.control_flow.bodies import Call
from minidiff.control_flow.partial_eval import interpreters
from minidiff.core.interpreter import EVALUATE, Evaluate, current_interpreter, current_scope
from minidiff.core.ranks import ranks
from minidiff.core.tape import Stage, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray
from minidiff.errors import PrintedText, did_you_mean, name_of
from minidiff.errors.tracebacks import trim_traceback
from minidiff.inputs.arguments import are_weak, as_value, check_function, close_over, key_of, key_of_type
from minidiff.inputs.key_reuse import use_operands, used_inputs
from minidiff.inputs.keywords import check_keywords, copy_metadata, make_decorator
from minidiff.tree.compiled import source_of_reader
from minidiff.values.settings import override, setting, types_in

#: True while a tape records the programs of jitted functions, and not the operations that they are compiled from.
records_programs: ContextVar[bool] = setting("records_programs", False)
#: Such a program, on the tape of what calls it.
program_p = Call("jit")

# ---------------------------------------------------------------- static arguments


class Static(NamedTuple):
    """The static arguments of a function, by position and by name.

    If the function's signature is known, a parameter that can be passed either way is in both.
    """

    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()  # parameters that can be passed by position

    def __bool__(self) -> bool:
        return bool(self.positions or self.names)

    def __str__(self) -> str:
        shown = {"static_argnums": self.positions, "static_argnames": self.names}
        return "".join(f", {option}={value}" for option, value in shown.items() if value)

    def among(self, args: tuple, kwargs: dict, name: str, kind: str = "static") -> dict[int | str, Any]:
        """Return the static (or the donated) arguments of a call, by position or by name."""
        for n in self.positions:
            if not -len(args) <= n < max(len(args), len(self.parameters)):
                raise TypeError(
                    f"jit: {kind}_argnums names argument {n} of {name}, which was called with {len(args)} "
                    f"positional arguments; if it is passed by name, list it in "
                    f"{kind}_argnames"
                )
        positions = sorted({n % len(args) if n < 0 else n for n in self.positions if n < len(args)})
        return {**{n: args[n] for n in positions}, **{k: kwargs[k] for k in sorted(kwargs) if k in self.names}}


def static_arguments(
    f: Callable, argnums: int | Sequence[int], argnames: str | Sequence[str], kind: str = "static"
) -> Static:
    """Resolve `static_argnums` and `static_argnames`, or the donated ones, against a signature.

    Raises TypeError if they are not integers and strings, ValueError for a name that is not a parameter's.
    """
    try:
        positions = tuple(map(operator.index, argnums if isinstance(argnums, Iterable) else (argnums,)))
    except TypeError:
        raise TypeError(f"jit: {kind}_argnums must be an int or a tuple of ints, got {argnums!r}") from None
    names = tuple(argnames) if isinstance(argnames, Iterable) and not isinstance(argnames, str) else (argnames,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"jit: {kind}_argnames must be a string or a tuple of strings, got {argnames!r}")
    if not (positions or names):
        return Static()
    import inspect  # only needed for static arguments

    try:
        known = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # a function written in C
        return Static(positions, names)
    kinds = {p.name: p.kind for p in known}
    if inspect.Parameter.VAR_KEYWORD not in kinds.values():
        for name in names:
            if name not in kinds:
                raise ValueError(
                    f"jit: {kind}_argnames names {name!r}, but the parameters of {name_of(f)} are {', '.join(kinds)}"
                    f"{did_you_mean(name, kinds)}"
                )
    ordered = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = tuple(p for p, kind in kinds.items() if kind in ordered)
    if inspect.Parameter.VAR_POSITIONAL not in kinds.values():  # else negative ones count from the end of each call
        positions = tuple(n + len(parameters) if -len(parameters) <= n < 0 else n for n in positions)
    by_name = tuple(parameters.index(name) for name in names if name in parameters)
    by_position = tuple(parameters[n] for n in positions if 0 <= n < len(parameters))
    return Static((*dict.fromkeys((*positions, *by_name)),), (*dict.fromkeys((*names, *by_position)),), parameters)


# ---------------------------------------------------------------- compiled functions

#: NumPy scalar types for Python numbers: compiled programs take NumPy scalars.
_SCALARS = {float: numpy.float64, int: numpy.int64, bool: numpy.bool_, complex: numpy.complex128}
_SCALARS |= {t: t for t in (numpy.float64, numpy.float32, numpy.int64, numpy.bool_, numpy.complex128)}
_IS_LEAF = {*_SCALARS, numpy.ndarray}
MAX_TREES = 4  # programs for trees on the fast path, which tries one after the other


def _signature(args: tuple) -> tuple:
    """Return the cache key of the fast path: the types of the arguments."""
    key: list = []
    for x in args:  # a loop is faster than a comprehension, before Python 3.12
        kind = type(x)
        key.append((x.shape, x.dtype) if kind is numpy.ndarray else _KEYS.get(kind) or _key_outside(x))
    return tuple(key)


def _reader(structure: tree.Structure, leaves: Sequence[Any]) -> Callable[[tuple], list | None]:
    """Return a function that returns the leaves of arguments like these, and None for those of other types."""
    scope: dict[str, Any] = {"ndarray": numpy.ndarray, "key_outside": _key_outside}
    rest = iter(leaves)

    def differs(t: str) -> str:
        x = next(rest)
        scope[f"kind_{t}"] = type(x)
        if type(x) is numpy.ndarray:
            scope.update({f"shape_{t}": x.shape, f"dtype_{t}": x.dtype})
            return f"type({t}) is not ndarray or {t}.shape != shape_{t} or {t}.dtype != dtype_{t}"
        if isinstance(x, Tracer):
            scope.update({f"type_{t}": x.type, f"key_{t}": _key_outside(x)})
            return f"type({t}) is not kind_{t} or ({t}.type is not type_{t} and key_outside({t}) != key_{t})"
        return f"type({t}) is not kind_{t}"

    exec(compile(source_of_reader(structure, scope, differs), "<arguments, compiled by minidiff>", "exec"), scope)
    return scope["read"]


_KEYS = {t: t for t in _SCALARS}


def _key_outside(x: Any) -> Any:
    """Return the cache key of a sharded array outside of all transformations, or the type of another argument."""
    return key_of_type(x.type) if isinstance(x, Tracer) and x.interpreter is EVALUATE else type(x)


def trace_context() -> tuple:
    """Return the global settings that a trace depends on, as a part of its cache key.

    These are the named axes of enclosing vmaps, with their sizes; the running `shard_map` body; whether `jit` is
    disabled; and the settings of the layers above. Modes that change only how operations run (`debug_nans`,
    `numpy.errstate`) do not matter.
    """
    scope = current_scope()
    body = scope and (tuple(scope.axes.items()), scope.typed, scope.explicit, scope.checks)
    return tuple(named_axes(current_interpreter()).items()), body, jit_is_disabled.get(), ranks.settings()


def donated_leaves(leaves: Sequence[Any], donated: Sequence[Any]) -> tuple[bool, ...]:
    """For each leaf of a call, return True if it belongs to a donated argument, and to no other."""
    counts, all_ = Counter(map(id, tree.leaves(donated))), Counter(map(id, leaves))
    return tuple([counts[id(x)] == all_[id(x)] == 1 for x in leaves])


def copy_shared_arguments(values: list[Value], overwritten: Collection[int]) -> list[Value]:
    """Copy donated arrays that a program cannot write into: views, read-only arrays, and arrays that others view.

    Of a sharded array, it copies the block where it is written into.
    """
    plain = [type(x) is numpy.ndarray for x in values]
    viewed = {id(x.base) for x, is_plain in zip(values, plain) if is_plain and x.base is not None}
    return [
        x.copy() if copied and not (x.flags.owndata and x.flags.writeable and id(x) not in viewed) else x
        for x, copied in zip(values, [is_plain and k in overwritten for k, is_plain in enumerate(plain)])
    ]


class Jitted:
    """The function that `jit` returns; `.source(*args)` shows its program."""

    def __init__(self, f: Callable, static: Static, options: dict, donated: Static):
        self.f = f
        self.name = getattr(f, "__name__", type(f).__name__)
        self.static = static
        self.options = options
        self.donated = donated
        key = static, donated, *[(k, tuple(v) if k == "without" else v) for k, v in sorted(options.items())]
        self.shared = programs_of(f, key)
        self.programs, self.inlined = Recent(), Recent()
        #: The fast path: programs by the types of plain numbers, and by shapes and dtypes if there are arrays; for
        #: trees, programs with functions that return the leaves of arguments of their types. It is taken only outside
        #: any transformation or body, so `trace_context` are the same in each call.
        self.numbers: dict[Any, Callable] = {}
        self.arrays: dict[Any, Callable] = {}
        self.trees: list[tuple[Callable[[tuple], list | None], Callable]] = []

    def __repr__(self) -> str:
        count = len(self.programs)
        return f"<jit of {self.name}{self.static or ''}: {count} program{'s' * (count != 1)} compiled>"

    def __reduce__(self) -> Any:
        """Pickle a decorated function by name, as Python does; others without programs."""
        value: Any = sys.modules.get(self.__module__)
        for name in getattr(self, "__qualname__", "").split("."):
            value = getattr(value, name, None)
        return self.__qualname__ if value is self else (_make_jitted, (self.f, self.static, self.options, self.donated))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if not kwargs and current_interpreter() is EVALUATE:
                run = self.numbers.get((*map(type, args),)) if self.numbers else None
                if run is None and self.arrays:
                    run = self.arrays.get(_signature(args))
                try:
                    if run is not None:
                        return run(*args)
                    for read, program in self.trees:
                        if (leaves := read(args)) is not None:
                            return program(*leaves)
                except OverflowError:  # a Python integer too large for the type the program was compiled for
                    pass
            return self._call(args, kwargs)
        except BaseException as error:
            trim_traceback(error)
            raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _call(self, args: tuple, kwargs: dict) -> Any:
        if jit_is_disabled.get():
            return self.f(*args, **kwargs)
        f, dynamic, values, donated, key = self._prepare_recording(args, kwargs)
        if current_interpreter() is not EVALUATE or any(
            isinstance(x, Tracer) and x.interpreter is not EVALUATE for x in values
        ):
            return self._inline(f, dynamic, key)(values)
        program = self.programs.find(key)
        if program is None:
            program = self._compile(f, dynamic, donated, key)
            if self.programs.add(key, program):  # those of the fast path come back to it, as the last ones used
                self.numbers.clear()
                self.arrays.clear()
                self.trees = []
        if program.overwritten:
            return program.function(*copy_shared_arguments(values, program.overwritten))
        if not kwargs and not self.static:
            self._remember(args, values, program.function)
        return program.function(*values)

    def _compile(self, f: Callable, dynamic: Any, donated: tuple[bool, ...], key: Any) -> CompiledProgram:
        def trace() -> tuple[CompiledProgram, bool]:
            program = CompiledProgram(f, dynamic, self.name, self.options, donated)
            return program, not (program.source.profiler or has_closures(program.tape))

        return trace()[0] if current_profiler.get() else self.shared.get(self.f, key, trace)

    def _prepare_recording(
        self, args: tuple, kwargs: dict, types_too: bool = False
    ) -> tuple[Callable, Any, list[Value], tuple[bool, ...], Any]:
        """Return what a call records: a function, its arguments, their values, and which of these are donated.

        The last result is the key of all that the program depends on. With `types_too`, arguments may be types.
        """
        f, dynamic, settings = self._split(args, kwargs)
        leaves, structure = tree.flatten(dynamic)
        convert: Callable = _value_or_type if types_too else as_value
        try:
            values = list(map(convert, leaves))
        except TypeError:
            dynamic = tree.with_settings(dynamic[0]), tree.with_settings(dynamic[1])
            leaves, structure = tree.flatten(dynamic)
            try:
                values = list(map(convert, leaves))
            except TypeError as error:
                raise TypeError(
                    f"jit: {self.name} was called with a non-array argument: {error}; if the argument is a setting of "
                    "the program, list it in static_argnums"
                ) from None
        donated: tuple[bool, ...] = ()
        if self.donated:
            arguments = [*self.donated.among(args, kwargs, self.name, "donate").values()]
            donated = donated_leaves(leaves, arguments)
        types_ = (*map(key_of, values),), (*are_weak(leaves),)
        return f, dynamic, values, donated, (structure, settings, *types_, donated, trace_context())

    def _inline(self, f: Callable, example: Any, key: Any) -> Callable[[list[Value]], Any]:
        """Return the function recorded for given types, to run op by op under another transformation."""
        scope = current_scope()
        is_program = records_programs.get() and all(
            isinstance(x, (Stage, Evaluate)) and x.scope is None for x in interpreters(current_interpreter())
        )
        key = key, is_program
        if (inlined := self.inlined.find(key)) is not None:
            return inlined

        def trace() -> tuple[tuple, bool]:
            before = scope and scope.transposed
            with override(records_programs, False):  # jitted functions that it calls are parts of it
                tape, _, structure = stage_flat(f, example, f"jit of {self.name}")
            used = used_inputs(tape.inputs)
            tape = optimize(tape, **self.options) if is_program else tape
            shared = not has_closures(tape) and not any(isinstance(c, Tracer) for c in tape.constants)
            return (tape, structure, scope is not None and scope.transposed != before, used), shared

        tape, structure, transposes, used = self.shared.get(self.f, key, trace)
        title = f"jit of {self.name}"  # programs are cached by function: one that refers to it would never be freed

        def run(values: list[Value]) -> Any:
            use_operands(title, values, used)
            if transposes:
                current_scope().transposed += 1
            outs = program_p.bind(*values, body=tape) if is_program else tape(*values)
            return tree.unflatten(structure, outs)

        if not any(isinstance(c, Tracer) for c in tape.constants):  # traced values are those of this call
            self.inlined.add(key, run)
        return run

    def _remember(self, args: tuple, values: list[Value], run: Callable) -> None:
        """Put a program on the fast path for arguments of these structures and types."""
        leaves, structure = tree.flatten(args)
        if not all(type(x) in _IS_LEAF or isinstance(x, Tracer) for x in leaves):
            return
        if any(type(x) is numpy.ndarray and not x.dtype.isnative for x in leaves):
            return
        pairs = list(zip(leaves, values))
        converters = [None if type(x) in (numpy.ndarray, type(v)) else _SCALARS[type(x)] for x, v in pairs]
        if any(c is not None and c is not type(v) for c, v in zip(converters, values)):
            return  # a Python integer that needed a larger type than others
        run, types = _convert_first(run, converters), tuple(map(type, args))
        if not {*structure.children} <= {tree.LEAF}:
            if len(self.trees) < MAX_TREES:
                self.trees.append((_reader(structure, leaves), run))
        elif not all(t in _SCALARS for t in types):
            self.arrays[_signature(args)] = run
        else:
            self.numbers[types] = run

    def _split(self, args: tuple, kwargs: dict) -> tuple[Callable, Any, Any]:
        """Split a call: a function of dynamic arguments, these, and the static ones."""
        if not self.static:
            return lambda args, kwargs: self.f(*args, **kwargs), (args, kwargs), ()
        fixed = self.static.among(args, kwargs, self.name)
        try:
            hash(settings := tuple(fixed.items()))
        except TypeError:
            raise TypeError(
                f"jit: {self.name} was called with a static argument that is not hashable: {fixed}; static arguments "
                "are settings (numbers, strings, tuples, functions); leave arrays out of static_argnums and "
                "static_argnames"
            ) from None

        of_others, dynamic = close_over(self.f, args, fixed)
        static_names = {name: x for name, x in fixed.items() if isinstance(name, str)}
        named = {name: x for name, x in kwargs.items() if name not in fixed}
        key = settings, (*map(types_in, fixed.values()),)
        return lambda args, kwargs: of_others(*args, **kwargs, **static_names), (dynamic, named), key

    def donates(self, *args: Any, **kwargs: Any) -> tuple[bool, ...]:
        """For each leaf of these arguments, return True if it is donated. Each may be an array, or a `ShapedArray`."""
        return self._prepare_recording(args, kwargs, types_too=True)[3]

    def source(self, *args: Any, **kwargs: Any) -> str:
        """Return the Python source for arguments of these types. Each may be an array, or a `ShapedArray`."""
        return PrintedText(self.program(*args, **kwargs).source.text)

    def llvm(self, *args: Any, **kwargs: Any) -> str:
        """Return the fused loops for arguments of these types in LLVM's intermediate representation."""
        return PrintedText(self.program(*args, **kwargs).source.llvm)

    def rewritten(self, *args: Any, **kwargs: Any) -> Tape:
        """Return the tape of the program for arguments of these types, after its rewrites. Nothing is compiled."""
        f, dynamic, *_ = self._prepare_recording(args, kwargs, types_too=True)
        return optimize(stage_flat(f, dynamic, f"jit of {self.name}")[0], **self.options)

    def program(self, *args: Any, **kwargs: Any) -> CompiledProgram:
        """Return the program compiled for arguments of these types: its `tape` and its `source`."""
        f, dynamic, _, donated, key = self._prepare_recording(args, kwargs, types_too=True)
        return self.programs.get(key) or CompiledProgram(f, dynamic, self.name, self.options, donated)


def _value_or_type(x: Any) -> Any:
    return x if isinstance(x, ShapedArray) else as_value(x)


def _convert_first(run: Callable, converters: Sequence[Any]) -> Callable:
    """Return a program that converts Python numbers to NumPy scalars first."""
    if not any(converters):
        return run
    if len(converters) == 1:
        (convert,) = converters
        return lambda x: run(convert(x))
    if len(converters) == 2 and all(converters):
        first, second = converters
        return lambda x, y: run(first(x), second(y))
    return lambda *xs: run(*[c(x) if c else x for c, x in zip(converters, xs)])


# ---------------------------------------------------------------- public functions


@make_decorator
def jit(
    f: Callable,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    *,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    without: Sequence[str] = (),
    **settings: Any,
) -> Jitted:
    """Compile `f` to a NumPy program for each new set of argument types.

    For each new structure and types of arguments, `f` is traced once on abstract arrays; the tape is simplified and
    written out as Python source (`.source(*args)`). Python side effects happen only during tracing. Arrays that `f`
    closes over are constants, with the values that they have when `f` is traced: each is copied once. Python numbers
    promote as in NumPy: there is one program for `2.0`, and another for `np.float64(2.0)`. A Python branch on a traced
    value raises TracerError. On a method, `self` is the first argument. The 256 programs used last are kept. They are
    kept as long as `f`: all `jit(f)` of one function, or of one object's method, with the same options share them, so a
    loop may call `jit(f)(x)`. `jit(f)` traces again if `f` reads another object than before, not if an array that it
    closes over has changed. Functions that are made anew share nothing: write `jit(grad(f))` before the loop.

    Arguments named by `static_argnums` (positions) or `static_argnames` are settings, not arrays. They must be
    hashable. The program is compiled for their values and types (1 and 1.0 differ, also in tuples and dataclasses), and
    Python may branch on them.

    Arguments named by `donate_argnums` or `donate_argnames` are donated: the program may write into their arrays, whose
    values are not specified afterwards. Results of the same types are written over them: a step of training
    that updates parameters and optimizer states needs no second copy. An array that is read-only, a view, or viewed by
    another argument is copied first; so is a block of a sharded array that another array shares.

    `without` names rewrites to leave out (`minidiff.compiler.program.rewrites()` has all); `settings` are options of
    rewrites, such as `bucket_bytes` for those of all-reduces. An unknown name is an error. If llvmlite is installed,
    groups of elementwise operations on large arrays are compiled into loops, and large matrices are factorized once for
    all operations that need it; `kernels=False` leaves both to NumPy. `threads` is the number of threads on which
    loops over large arrays run (`minidiff.compiler.threads`); it changes no result.

    `jit` works on derivatives (`jit(grad(f))`), and the compiled function can be differentiated, vmapped and staged.

    >>> import numpy as np
    >>> @jit(static_argnames="n")
    ... def power(x, n):
    ...     return x ** n
    >>> power(np.array([1.0, 2.0]), 3), power(np.array([1.0, 2.0]), n=2)
    (array([1., 8.]), array([1., 4.]))
    """
    check_function("jit", f)
    if settings or without:
        parameters = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "without")
        check_keywords("jit", settings, (*parameters, *all_passes().settings))
        check_options(without, settings)
    static = static_arguments(f, static_argnums, static_argnames)
    donated = static_arguments(f, donate_argnums, donate_argnames, "donate")
    both = [*{*static.positions} & {*donated.positions}, *{*static.names} & {*donated.names}]
    if both:
        raise ValueError(f"jit: the argument {both[0]!r} of {name_of(f)} is static, so there is no array to donate")
    return Jitted(f, static, {"without": without, **settings}, donated)


def _make_jitted(f: Callable, static: Static, options: dict, donated: Static) -> Jitted:
    return copy_metadata(f, Jitted(f, static, options, donated))
