"""Warn of a key that is used twice: the draws are the same numbers, or depend on each other.

A key is an object, not its value: `key(0)` makes a new one in each call. The array that owns a key's memory identifies
it, and its value tells it from others in that array, as in `keys[i]`; a variable identifies a traced key. Keys are used
where Python runs. A recorded function runs once, so compiled programs, transposes and recomputation check nothing.
"""

from __future__ import annotations

import dis
import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy

from minidiff.core.interpreter import Evaluate, Interpreter, current_interpreter
from minidiff.core.tape import RecordedTracer, Stage
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import Var
from minidiff.errors import KeyReuseWarning
from minidiff.errors.location import Location, _belongs_to_library, warn_at
from minidiff.values.settings import checks, override, restores_settings, setting

BRANCHES, LOOPS = ("cond", "switch"), ("scan", "map", "while_loop", "fori_loop")

#: The attributes in which tracers hold values of the interpreter below: of a derivative, a vmap, the ranks of a body.
HOLDS = ("primal", "value", "data")

Uses = dict[int, tuple[Any, dict[Any, "Use"]]]  # id of an owner of keys -> the owner or a weak reference, uses by key

_outside: Uses = {}  # of all transformations

#: The loop that runs step by step, an object of its own; False where a function runs for its types alone.
current_loop: ContextVar[object] = setting("current_loop", None)


class Use(NamedTuple):
    """A draw from a key, or its split. If it is a block, `whole` is the shape of the draw of which it is a part."""

    function: str
    code: Any
    instruction: int
    whole: tuple[int, ...] | None
    loop: object
    branches: frozenset[int] = frozenset()

    @property
    def source(self) -> Location:
        return _source_of(self.code, self.code.co_filename, self.instruction)  # equal codes may be of two files


def repeats(function: Callable) -> Callable:
    """Decorate a function that runs a loop step by step: a key from outside is used again in each step."""

    @restores_settings
    @functools.wraps(function)
    def loop(*args: Any, **kwargs: Any) -> Any:
        with override(current_loop, object()):
            return function(*args, **kwargs)

    return loop


def use_key(function: str, key: Value, whole: tuple[int, ...] | None = None) -> None:
    """Warn at the user's line if the key was used before; `function` draws from it or splits it.

    All uses within one call of the outermost transformation count. Outside, a line that runs again in another call of
    its function does not: a function of a key is called again to get the same numbers.
    """
    frame: Any = sys._getframe(2)
    while frame is not None and _belongs_to_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or (loop := current_loop.get()) is False:
        return
    uses, stack = _uses_in(current_interpreter())
    owner, path, recorder = _identify(key)
    use = Use(function, frame.f_code, frame.f_lasti, whole, loop)
    if stack:
        kinds = [x.origin[0] if isinstance(x, Stage) and x.origin is not None else "" for x in stack]
        use = use._replace(branches=frozenset(id(x) for x, kind in zip(stack, kinds) if kind in BRANCHES))
        inner = next((i for i, kind in enumerate(kinds) if kind in LOOPS), None)
        if inner is not None and recorder not in stack[: inner + 1]:
            _warn(use, f"in each step of {kinds[inner]}: all steps get the same numbers")
    number = id(owner)
    if number not in uses:  # they are forgotten with the owner: its id may become that of another
        uses[number] = owner if isinstance(owner, Var) else weakref.ref(owner, lambda _: uses.pop(number, None)), {}
    by_path = uses[number][1]
    if (first := by_path.get(path)) is not None and _is_reuse(first, use, bool(stack)):
        _warn(use, f"again: {first.function} used it at {first.source}. Their numbers depend on each other")
    else:
        by_path[path] = use


def used_inputs(inputs: Iterable[Var]) -> list[bool]:
    """Return which inputs of a tape, recorded within the current interpreter, are keys that it used."""
    uses, _ = _uses_in(current_interpreter())
    return [() in uses.get(id(v), (None, {}))[1] for v in inputs]


def use_operands(function: str, operands: Iterable[Value], used: Iterable[bool]) -> None:
    """Use the operands of a recorded function that are keys which it uses."""
    for x, is_used in zip(operands, used):
        if is_used:
            use_key(function, x)


def _uses_in(interpreter: Interpreter) -> tuple[Uses, list[Interpreter]]:
    """Return the uses so far within the outermost transformation, and the interpreters from here to it."""
    stack: list[Interpreter] = []
    while interpreter is not None and not isinstance(interpreter, Evaluate):
        stack.append(interpreter)
        interpreter = interpreter.outer or interpreter.below
    return (vars(stack[-1]).setdefault("key_uses", {}) if stack else _outside), stack


def _identify(key: Any) -> tuple[Any, Any, Any]:
    """Return the object that holds a key, what tells the key from others in it, and the recorder of a traced key."""
    while isinstance(key, Tracer) and (name := next((x for x in HOLDS if hasattr(type(key), x)), None)):
        key = getattr(key, name)
    if isinstance(key, numpy.ndarray):
        return key.base if isinstance(key.base, numpy.ndarray) else key, key.tobytes(), None
    if not isinstance(key, RecordedTracer):
        return key, (), None
    for eqn in key.interpreter.equations[:-65:-1]:  # a recent one may have taken the key out of a stack of keys
        if eqn.outputs[0] is key.variable and eqn.primitive.name == "slice":
            keys = eqn.inputs[0]
            owner, path, of = _identify(RecordedTracer(key.interpreter, keys) if isinstance(keys, Var) else keys)
            return owner, (path, str(eqn.params)), of
    return key.variable, (), key.interpreter


def _is_reuse(first: Use, use: Use, transformed: bool) -> bool:
    """Return whether two uses are no blocks of one draw, not in two branches, and not in two calls of a function."""
    if first.whole == use.whole is not None:
        return False
    is_same_line = first.instruction == use.instruction and (first.code is use.code or first.source == use.source)
    if transformed or not is_same_line:
        return not (first.branches - use.branches and use.branches - first.branches)
    in_loop = first.loop is use.loop is not None or _is_in_loop(use.code, use.instruction)
    return first.code is use.code and in_loop  # else this is another run of a notebook's cell


@functools.lru_cache(maxsize=4096)
def _source_of(code: Any, filename: str, instruction: int) -> Location:
    lines = [line for start, end, line in code.co_lines() if line and start <= instruction < end]
    return Location(filename, *lines[:1] or [code.co_firstlineno])


@functools.lru_cache(maxsize=4096)
def _is_in_loop(code: Any, instruction: int) -> bool:
    """Return whether an instruction is in a loop of its function: a later one jumps back over it."""
    jumps = [x for x in dis.get_instructions(code) if x.opcode in (*dis.hasjrel, *dis.hasjabs)]
    return any(x.argval <= instruction < x.offset for x in jumps)


def _warn(use: Use, how: str) -> None:
    text = f"{use.function} uses a key {how}. Use each key once: make new ones by md.random.split(key) or "
    text += "md.random.fold_in(key, i). If it is meant, write md.random.clone(key)"
    if checks.get():
        raise ValueError(f"{text} ({use.source})")
    warn_at(use.source, text, KeyReuseWarning)
