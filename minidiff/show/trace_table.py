"""Trace tables: each value next to its tangent or its adjoint.

This module has no derivative rules. It stages the function, and differentiates each equation of its tape separately, on
another tape. The table shows the equations of that tape as a formula, and its results as the values.
"""

from __future__ import annotations

import html
import inspect
import itertools
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.api.derivatives import jvp, vjp
from minidiff.api.recording import stage_flat
from minidiff.core.tape import Atom, Equation, Tape, evaluate_equation, read
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import Var, typeof
from minidiff.errors import TracerError
from minidiff.inputs.arguments import as_value
from minidiff.ops.base import Elementwise
from minidiff.values.dtypes import is_differentiable

DOT, BAR = "\u0307", "\u0304"  # combining characters, shown over the letter before them
LONGEST = 60  # columns of a formula; a longer derivative is written as a Jacobian

_SUBSCRIPTS = str.maketrans("-0123456789", "₋₀₁₂₃₄₅₆₇₈₉")
_INFIX = {"add": ("+", 1), "subtract": ("-", 1), "multiply": ("×", 2), "divide": ("/", 2), "matmul": ("@", 2)}
_INFIX["power"] = ("**", 4)
_CALLED = {"log": "ln"}
_SIGN, _CALL, _NAME = 2, 8, 9  # the precedence of a sign, of a call without parentheses, and of a name


class Line(NamedTuple):
    """One line, `name = rule = formula = value`.

    `formula` is the chain `rule` as it was computed.
    """

    name: str
    formula: str
    value: Value
    rule: str = ""


class TraceTable:
    """The result of `trace_table`. Printing it shows the table, as does a notebook.

    `primals` are the steps of the evaluation; `derivatives` the steps of the derivative, in order of computation.
    `result` is the value of the function; `derivative` is its tangent (forward mode), or the tuple of gradients, one
    for each argument (reverse mode).
    """

    def __init__(self, mode: str, rows: list[tuple[list[Line], list[Line]]], result: Any, derivative: Any, digits: int):
        self.mode = mode
        self.rows = rows  # each row: the steps of an equation, and the steps of its derivative
        self.result = result
        self.derivative = derivative
        self.digits = digits

    @property
    def primals(self) -> list[Line]:
        return [step for left, _ in self.rows for step in left]

    @property
    def derivatives(self) -> list[Line]:
        if self.mode == "forward":
            return [step for _, right in self.rows for step in right]
        return [step for _, right in reversed(self.rows) for step in right]

    @property
    def heads(self) -> tuple[str, str]:
        return ("primal trace ↓", "tangent trace ↓" if self.mode == "forward" else "adjoint trace ↑")

    def cells(self) -> list[list[str]]:
        """Return the table's lines.

        Each holds name, formula and value of a primal step; name, rule, formula and value of a derivative's step.
        """
        lines = []
        for left, right in self.rows:
            right = right if self.mode == "forward" else right[::-1]
            for primal, derivative in itertools.zip_longest(left, right):
                name, _, *texts = self._cells(primal)
                lines.append([name, *texts, *self._cells(derivative)])
        return lines

    def _cells(self, step: Line | None) -> list[str]:
        return [step.name, step.rule, step.formula, show_value(step.value, self.digits)] if step else [""] * 4

    def __str__(self) -> str:
        lines = self.cells()
        widths = [max(map(width, column)) for column in zip(*lines)]

        def half(line: list[str], columns: range) -> str:
            shown = [i for i in columns if widths[i]]  # in forward mode the column of rules is empty
            signs = {i: "" if i in (0, 3) else "= " if line[i] else "  " for i in shown}
            return " ".join(signs[i] + pad(line[i], widths[i]) for i in shown)

        text = [(half(line, range(3)), half(line, range(3, 7))) for line in lines]
        across = [max(map(width, column)) for column in zip(self.heads, *text)]
        rule = tuple("─" * w for w in across)
        return "\n".join(f"{pad(a, across[0])} │ {b}".rstrip() for a, b in [self.heads, rule, *text])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def cell(i: int, text: str, tag: str = "td") -> str:
            style = "text-align:left" + (";border-left:1px solid" if i == 3 else "")
            sign = "= " if text and i not in (0, 3) else ""
            return f'<{tag} style="{style}">{sign}{html.escape(text)}</{tag.split()[0]}>'

        head = cell(0, self.heads[0], 'th colspan="3"') + cell(3, self.heads[1], 'th colspan="4"')
        body = "".join(f"<tr>{''.join(map(cell, range(7), line))}</tr>" for line in self.cells())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def trace_table(f: Callable, *args: Any, mode: str = "forward", seed: Any = None, digits: int = 3) -> TraceTable:
    """Tabulate the values of `f` at `args` next to their tangents or adjoints.

    Args:
        f: a function of trees of arrays, which is traced on abstract values, as by `make_tape`.
        args: trees of arrays.
        mode: "forward" for tangents, "reverse" for adjoints.
        seed: in forward mode the direction, a tuple of trees like `args` (by default ones for the first differentiable
            argument, zeros for the others); in reverse mode the cotangent, a tree like the result (by default ones).
        digits: the number of decimals that are shown.

    Returns:
        A `TraceTable`.

    Raises:
        TracerError: inside another transformation, where there are no numbers to show.
        ValueError: for another mode, or a seed that does not match.

    >>> import numpy as np
    >>> trace_table(lambda x1, x2: np.log(x1) + x1 * x2, 2.0, 5.0)
    primal trace ↓          │ tangent trace ↓
    ─────────────────────── │ ───────────────────────────────
    v₋₁ = x₁       = 2      │ v̇₋₁ = ẋ₁                  = 1
    v₀  = x₂       = 5      │ v̇₀  = ẋ₂                  = 0
    v₁  = ln v₋₁   = 0.693  │ v̇₁  = v̇₋₁ / v₋₁           = 0.5
    v₂  = v₋₁ × v₀ = 10     │ v̇₂  = v̇₋₁ × v₀ + v̇₀ × v₋₁ = 5
    v₃  = v₁ + v₂  = 10.693 │ v̇₃  = v̇₁ + v̇₂             = 5.5
    y   = v₃       = 10.693 │ ẏ   = v̇₃                  = 5.5
    """
    if mode not in ("forward", "reverse"):
        raise ValueError(f"trace_table: mode must be 'forward' or 'reverse', got {mode!r}")
    values = [as_value(x) for x in tree.leaves(args)]
    if any(isinstance(x, Tracer) for x in values):
        raise TracerError("trace_table shows numbers: call it outside of other transformations")
    tape, structure, out_structure = stage_flat(f, args)
    names = _Names(tape, _input_names(f, args), tree.paths(out_structure))
    env = dict(zip(tape.inputs, values))
    for eqn in tape.equations:
        evaluate_equation(eqn, env)
    outs = [read(env, a) for a in tape.outputs]
    result = tree.unflatten(out_structure, outs)
    if mode == "forward":
        seeds = _seed_leaves(seed, _first_ones(values), structure, values)
        rows, tangents = _tabulate_forward(tape, names, env, seeds)
        derivative = tree.unflatten(out_structure, tangents)
    else:
        cts = _seed_leaves(seed, [numpy.ones_like(x)[()] for x in outs], out_structure, outs)
        rows, adjoints = _tabulate_reverse(tape, names, env, cts)
        derivative = tree.unflatten(structure, adjoints)
    return TraceTable(mode, rows, result, derivative, digits)


# ---------------------------------------------------------------- the seeds


def _first_ones(values: Sequence[Value]) -> list[Value]:
    first = next((i for i, x in enumerate(values) if is_differentiable(x.dtype)), None)
    if first is None:
        types = ", ".join(str(typeof(x)) for x in values)
        raise TypeError(f"trace_table: no argument carries a derivative ({types}): write 2.0 instead of 2")
    return [(numpy.ones_like(x) if i == first else numpy.zeros_like(x))[()] for i, x in enumerate(values)]


def _seed_leaves(seed: Any, default: list[Value], structure: tree.Structure, like: Sequence[Value]) -> list[Value]:
    """Return the seed's leaves, with the dtypes of `like`; ValueError if they do not match."""
    if seed is None:
        return default
    leaves, structure_of_seed = tree.flatten(seed)
    if structure_of_seed != structure:
        raise ValueError(f"trace_table: the seed has the structure {structure_of_seed}; it must have {structure}")
    for s, x in zip(leaves, like):
        if numpy.shape(s) != numpy.shape(x):
            raise ValueError(f"trace_table: a seed of type {typeof(s)} for a value of type {typeof(x)}")
    return [numpy.asarray(s, x.dtype)[()] for s, x in zip(leaves, like)]


# ---------------------------------------------------------------- the tables


def _tabulate_forward(tape: Tape, names: _Names, env: dict, seeds: Sequence[Value]) -> tuple[list, list[Value]]:
    """Compute the rows of forward mode, and the tangents of the results."""
    dots = {v: t for v, t in zip(tape.inputs, seeds) if is_differentiable(v.type.dtype)}
    rows = names.constant_rows(tape)
    for i, v in enumerate(tape.inputs):
        right = [Line(names.dot(v), accent(names.inputs[i], DOT), dots[v])] if v in dots else []
        rows.append((names.input_step(i, v, env), right))
    for eqn in tape.equations:
        local = Local(eqn)
        right = []
        if local.active and local.results:
            steps, step_names = local.forward(names)
            tangents = steps(*[read(env, a) for a in local.others + local.active], *[dots[v] for v in local.active])
            n = len(local.results)
            for v, atom, t in zip(local.results, steps.outputs[n:], tangents[n:]):
                dots[v] = t
                formula = _write_formula(steps, step_names, atom)
                if formula is None:
                    formula = " + ".join(f"{_jacobian(names[v], names[a])} {names.dot(a)}" for a in local.active)
                right.append(Line(names.dot(v), formula, t))
        rows.append((names.equation_steps(eqn, env), right))
    tangents = [dots.get(a) if isinstance(a, Var) else None for a in tape.outputs]
    tangents = [numpy.zeros_like(read(env, a))[()] if t is None else t for a, t in zip(tape.outputs, tangents)]
    for name, a, t in zip(names.outputs, tape.outputs, tangents):
        source = names.dot(a) if isinstance(a, Var) and a in dots else "0"
        rows.append(([Line(name, names[a], read(env, a))], [Line(accent(name, DOT), source, t)]))
    return rows, tangents


def _tabulate_reverse(tape: Tape, names: _Names, env: dict, seeds: Sequence[Value]) -> tuple[list, list[Value]]:
    """Compute the rows of reverse mode, and the adjoints of the inputs.

    The derivative steps of a row are in order of computation.
    """
    adjoints: dict[Var, Value] = {}

    def add(v: Var, rule: str, formula: str, ct: Value) -> Line:
        before = f"{names.bar(v)} + " if v in adjoints else ""
        adjoints[v] = adjoints[v] + ct if before else ct
        return Line(names.bar(v), before + formula, adjoints[v], before + rule if rule else "")

    rows = []
    for name, a, ct in reversed(list(zip(names.outputs, tape.outputs, seeds))):
        counts = isinstance(a, Var) and is_differentiable(a.type.dtype)
        rows.append(([Line(name, names[a], read(env, a))], [add(a, "", accent(name, BAR), ct)] if counts else []))
    for eqn in reversed(tape.equations):
        local = Local(eqn)
        right = []
        if local.active and any(v in adjoints for v in local.results):
            steps, step_names = local.reverse(names, adjoints)
            cts = [adjoints.get(v, numpy.zeros(v.type.shape, v.type.dtype)) for v in local.results]
            results = steps(*[read(env, a) for a in local.others + local.active], *cts)
            n = len(local.results)
            for v, atom, ct in zip(local.active, steps.outputs[n:], results[n:]):
                rule = " + ".join(
                    f"{names.bar(out)} {_jacobian(names[out], names[v])}" for out in local.results if out in adjoints
                )
                formula = _write_formula(steps, step_names, atom)
                right.append(add(v, rule if formula is not None else "", rule if formula is None else formula, ct))
        rows.append((names.equation_steps(eqn, env), right))
    cotangents = []
    for i, v in reversed(list(enumerate(tape.inputs))):
        ct = adjoints.get(v, numpy.zeros(v.type.shape, v.type.dtype)[()])
        cotangents.append(ct)
        right = [Line(accent(names.inputs[i], BAR), names.bar(v) if v in adjoints else "0", ct)]
        rows.append((names.input_step(i, v, env), right if is_differentiable(v.type.dtype) else []))
    return names.constant_rows(tape) + rows[::-1], cotangents[::-1]


class Local:
    """One equation as a function, differentiated in its differentiable operands."""

    def __init__(self, eqn: Equation):
        self.eqn = eqn
        operands = {id(a): a for a in eqn.inputs if isinstance(a, (Var, numpy.ndarray))}.values()
        self.active = [a for a in operands if isinstance(a, Var) and is_differentiable(a.type.dtype)]
        self.others = [a for a in operands if not any(a is b for b in self.active)]
        self.results = [v for v in eqn.outputs if is_differentiable(v.type.dtype)]

    def apply(self, others: Sequence[Value], active: Sequence[Value]) -> list[Value]:
        """Evaluate the equation; return its differentiable results."""
        known = {id(a): x for a, x in zip([*self.others, *self.active], [*others, *active])}
        out = self.eqn.primitive.bind(*[known.get(id(a), a) for a in self.eqn.inputs], **self.eqn.params)
        outs = out if self.eqn.primitive.multiple_results else [out]
        return [x for x in outs if is_differentiable(typeof(x).dtype)]

    def forward(self, names: _Names) -> tuple[Tape, dict[Var, _Text]]:
        """Return the tape from operands and tangents to (results, tangents), and its names."""

        def step(others, active, tangents):
            return jvp(lambda *xs: self.apply(others, xs), active, tangents)

        return self._stage(names, step, self.active, [_linear(names.dot(v)) for v in self.active])

    def reverse(self, names: _Names, adjoints: dict) -> tuple[Tape, dict[Var, _Text]]:
        """Return the tape from operands and adjoints to (results, adjoints), and its names."""

        def step(others, active, cts):
            outs, pullback = vjp(lambda *xs: self.apply(others, xs), *active)
            return outs, pullback(cts)

        bars = [_linear(names.bar(v)) if v in adjoints else _Text("0", _NAME) for v in self.results]
        return self._stage(names, step, self.results, bars)

    def _stage(self, names: _Names, step: Callable, like: Sequence[Var], texts: list[_Text]) -> tuple[Tape, dict]:
        types = [[typeof(a) for a in atoms] for atoms in (self.others, self.active)]
        tape, _, _ = stage_flat(step, (*types, [v.type for v in like]))
        known = [_Text(names[a], _NAME) for a in [*self.others, *self.active]] + texts
        names_of_results = {a: _Text(names[v], _NAME) for a, v in zip(tape.outputs, self.results) if isinstance(a, Var)}
        return tape, {**names_of_results, **dict(zip(tape.inputs, known))}


# ---------------------------------------------------------------- names


def subscript(i: int) -> str:
    return str(i).translate(_SUBSCRIPTS)


def accent(name: str, mark: str) -> str:
    """Put a dot or bar over a one-letter name; describe any other in words."""
    if re.fullmatch(r"\w[₀-₉₋]*", name):
        return unicodedata.normalize("NFC", name[0] + mark) + name[1:]
    return f"{'tangent' if mark == DOT else 'adjoint'} of {name}"


def _input_names(f: Callable, args: tuple) -> list[str]:
    """Names of the arguments' leaves, from the signature or `x₁`, `x₂`, …."""
    try:
        signature, roots = inspect.signature(f), []
        for name, value in signature.bind(*args).arguments.items():
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            roots += [f"{name}[{i}]" for i in range(len(value))] if several else [name]
    except (TypeError, ValueError):  # NumPy's own functions have no signature, or one that does not fit the call
        roots = [f"x{i + 1}" for i in range(len(args))]
    paths = [path for root, x in zip(roots, args) for path in tree.paths(tree.structure(x), root)]
    return [p[0] + subscript(int(p[1:])) if re.fullmatch(r"[^\W\d]\d+", p) else p for p in paths]


class _Names:
    """Names: inputs v₁₋ₙ … v₀, results v₁, v₂, …; array constants c₁, c₂, …."""

    def __init__(self, tape: Tape, inputs: list[str], output_paths: Sequence[str]):
        self.inputs = inputs
        results = [v for eqn in tape.equations for v in eqn.outputs]
        self.of = {v: f"v{subscript(i + 1 - len(tape.inputs))}" for i, v in enumerate([*tape.inputs, *results])}
        self.constants = {id(c): f"c{subscript(i + 1)}" for i, c in enumerate(tape.constants)}
        self.outputs = [f"y{path}" for path in output_paths]

    def __getitem__(self, a: Atom) -> str:
        if isinstance(a, Var):
            return self.of[a]
        return self.constants.get(id(a)) or show_value(a, 3)

    def dot(self, v: Var) -> str:
        return accent(self.of[v], DOT)

    def bar(self, v: Var) -> str:
        return accent(self.of[v], BAR)

    def constant_rows(self, tape: Tape) -> list[tuple[list[Line], list[Line]]]:
        return [([Line(self[c], "constant", c)], []) for c in tape.constants]

    def input_step(self, i: int, v: Var, env: dict) -> list[Line]:
        return [Line(self.of[v], self.inputs[i], env[v])]

    def equation_steps(self, eqn: Equation, env: dict) -> list[Line]:
        operands = [_Text(self[a], _NAME) for a in eqn.inputs]
        text = _write_operation(eqn, operands).text
        several = eqn.primitive.multiple_results
        return [Line(self.of[v], f"{text}[{i}]" if several else text, env[v]) for i, v in enumerate(eqn.outputs)]


def _jacobian(out: str, of: str) -> str:
    return f"∂{out}/∂{of}"


# ---------------------------------------------------------------- formulas


class _Text(NamedTuple):
    """A formula as text, with the precedence of its outermost operation."""

    text: str
    binds: int
    linear: bool = False  # whether a tangent or an adjoint is in it
    inverse: _Text | None = None  # x, if the formula is 1 / x

    def within(self, binds: int) -> str:
        """Return the text as an operand: in parentheses if it binds less strongly."""
        return self.text if self.binds >= binds else f"({self.text})"


_TOO_LONG = _Text("…", _NAME)


def _linear(name: str) -> _Text:
    return _Text(name, _NAME, linear=True)


def _write_formula(tape: Tape, names: dict[Var, _Text], atom: Atom) -> str | None:
    """Return the definition of `atom` as one formula in the names; None if it is too long."""
    texts = dict(names)

    def text(a: Atom) -> _Text:
        return texts[a] if isinstance(a, Var) else _Text(_write_constant(a), _NAME)

    for eqn in tape.equations:
        operands = [text(a) for a in eqn.inputs]
        whole = _TOO_LONG if _TOO_LONG in operands else _write_operation(eqn, operands)
        if width(whole.text) > LONGEST:
            whole = _TOO_LONG
        for i, v in enumerate(eqn.outputs):
            several = eqn.primitive.multiple_results and whole is not _TOO_LONG
            texts.setdefault(v, _Text(f"{whole.text}[{i}]", _NAME, whole.linear) if several else whole)
    return None if text(atom) is _TOO_LONG else text(atom).text


def _write_constant(a: Value) -> str:
    a = numpy.asarray(a)
    if a.size and (a == a.flat[0]).all():  # all elements equal: zeros, ones
        return f"{a.flat[0].item():g}" if a.dtype.kind in "fiu" else str(a.flat[0].item())
    return str(typeof(a))


def _write_operation(eqn: Equation, operands: Sequence[_Text]) -> _Text:
    """Write an operation in mathematical notation."""
    linear = any(t.linear for t in operands)
    primitive = eqn.primitive
    shown, name = primitive.show_params(eqn.settings), primitive.name
    if name in _INFIX and len(operands) == 2 and not shown:
        return _write_infix(name, *operands)
    if name == "transpose" and eqn.params["axes"] == (1, 0):
        return _Text(f"{operands[0].within(_NAME)}ᵀ", _NAME, linear)
    if name == "negative":
        return _Text(f"-{operands[0].within(_SIGN)}", _SIGN, linear)
    name = _CALLED.get(name, name)
    if isinstance(primitive, Elementwise) and len(operands) == 1 and operands[0].binds == _NAME and not shown:
        return _Text(f"{name} {operands[0].text}", _CALL, linear)
    return _Text(f"{name}({', '.join([*(t.text for t in operands), *([shown] if shown else [])])})", _NAME, linear)


def _write_infix(name: str, left: _Text, right: _Text) -> _Text:
    symbol, binds = _INFIX[name]
    if name == "multiply":
        if right.linear and not left.linear:  # put the tangent or adjoint first
            left, right = right, left
        if right.text == "1":
            return left
        if left.linear and right.inverse is not None:  # t × (1 / x) is t / x
            return _write_infix("divide", left, right.inverse)
    strict = name in ("subtract", "divide", "power")
    second = right.within(binds + strict)
    if second.startswith("-"):
        second = f"({second})"
    inverse = right if name == "divide" and left.text == "1" else None
    return _Text(f"{left.within(binds)} {symbol} {second}", binds, left.linear or right.linear, inverse)


# ---------------------------------------------------------------- values and columns


def show_value(x: Value, digits: int) -> str:
    """Show a number with `digits` decimals, an array by type and numbers or range."""
    a = numpy.asarray(x)
    if not a.shape:
        return _show_number(a.item(), digits)
    if a.size <= 4:
        numbers = numpy.array2string(a, separator=", ", formatter={"all": lambda n: _show_number(n, digits)})
        return f"{typeof(a)} {numbers.replace(chr(10), '')}"
    if a.dtype.kind in "fiu":
        least, most = _show_number(a.min(), digits), _show_number(a.max(), digits)
        return f"{typeof(a)} all {least}" if least == most else f"{typeof(a)} {least} … {most}"
    return str(typeof(a))


def _show_number(x: Any, digits: int) -> str:
    if isinstance(x, (complex, numpy.complexfloating)):
        sign = "-" if numpy.signbit(x.imag) else "+"
        return f"{_show_number(x.real, digits)}{sign}{_show_number(abs(x.imag), digits)}i"
    if not isinstance(x, (float, numpy.floating)):
        return str(x)
    if x == 0:
        return "0"
    if numpy.isfinite(x) and not 10.0**-digits <= abs(float(x)) < 1e6:
        return f"{x:.{digits}e}"
    shown = f"{x:.{digits}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def width(text: str) -> int:
    """Return the columns a text takes: none for an accent, two for a wide character."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def pad(text: str, to: int) -> str:
    return text + " " * (to - width(text))
