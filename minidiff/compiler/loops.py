"""The loop of a fused group of operations, as text in LLVM's intermediate representation.

`body` is one loop over adjacent elements, which LLVM turns into vector instructions. `kernel` is what NumPy calls: it
walks over rows, hands out columns in chunks, and copies those that are not adjacent into buffers. A sum adds up
each chunk alone, and the chunks' sums with compensation, so it is as accurate as NumPy's pairwise one.

Names: of a parameter x, `%x` is the address that NumPy passes, `%x.row` that of its row, `%x.at` that of its chunk,
`%x.p` that of the adjacent elements, `%x.a` that of an element, and `%x.v` the element.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterable

from minidiff.compiler.ir import Code, Value
from minidiff.compiler.layout import REDUCTIONS, Layout, Parameter, iteration_shape, stages_of
from minidiff.compiler.lowering import lower_equation
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var
from minidiff.ops.base import sum_p

CHUNK = 256  # elements: their sum is added up without compensation, in as many parts as a vector has lanes

#: What a kernel reports: an operation of which NumPy may warn, or results that NumPy has to compute. The report has
#: these bits, and counts of both. A call compares the counts before and after it, and clears nothing, since another
#: thread may be running the same loop.
WARNING, EXCEPTION = 1, 2
_WARNINGS_FROM, EXCEPTIONS_FROM = 2, 32  # the lowest bits of the counts

#: The C library's bits for "invalid", "divide by zero" and "overflow".
_FLAGS = 13 if platform.machine().lower() in ("x86_64", "amd64", "i386", "i686") else 7

# ---------------------------------------------------------------- text for one parameter

_ELEMENT = "%{x}.a = getelementptr inbounds {memory}, ptr %{x}.p, i64 %i"
_LOAD = "%{x}.v = load {memory}, ptr {address}, !llvm.access.group !0"
_LOAD_BOOL = """%{x}.b = load i8, ptr {address}, !llvm.access.group !0
%{x}.v = icmp ne i8 %{x}.b, 0"""
_STORE = "store {memory} {value}, ptr %{x}.a, !llvm.access.group !0"
_STORE_BOOL = """%{x}.b = zext i1 {value} to i8
store i8 %{x}.b, ptr %{x}.a, !llvm.access.group !0"""

#: Sums along rows: each element of the result is added to, from the first row on.
_ADD_TO_ELEMENT = """%{x}.old = load {type}, ptr %{x}.a, !llvm.access.group !0
%{x}.before = select i1 %first, {type} {zero}, {type} %{x}.old
%{x}.sum = {add}%{x}.before, {second}{value}{close}"""

#: Sums along columns: of a chunk, in any order; then of chunks, with what each addition rounds off.
_SUM = "%{x}.so.far = phi {type} [ {zero}, %entry ], [ %{x}.sum, %loop ]"
_ADD = "%{x}.sum = {add_any}%{x}.so.far, {second}{value}{close}"
_STORE_SUM = "store {type} %{x}.sum, ptr %{x}.chunk"
_TOTAL = """%{x}.chunk = alloca {type}
%{x}.total = alloca {type}
%{x}.lost = alloca {type}"""
_CLEAR = """store {type} {zero}, ptr %{x}.total
store {type} {zero}, ptr %{x}.lost"""
_ADD_CHUNK = """%{x}.s1 = load {type}, ptr %{x}.total
%{x}.s2 = load {type}, ptr %{x}.chunk
%{x}.s = {add}%{x}.s1, {second}%{x}.s2{close}
store {type} %{x}.s, ptr %{x}.total"""
_ADD_LOST = """%{x}.s3 = fsub {type} %{x}.s, %{x}.s1
%{x}.s4 = fsub {type} %{x}.s, %{x}.s3
%{x}.s5 = fsub {type} %{x}.s1, %{x}.s4
%{x}.s6 = fsub {type} %{x}.s2, %{x}.s3
%{x}.s7 = fadd {type} %{x}.s5, %{x}.s6
%{x}.s8 = load {type}, ptr %{x}.lost
%{x}.s9 = fadd {type} %{x}.s8, %{x}.s7
store {type} %{x}.s9, ptr %{x}.lost"""
_FINISH = """%{x}.end = load {type}, ptr %{x}.total
store {type} %{x}.end, ptr {address}"""
_FINISH_FLOAT = """%{x}.end = load {type}, ptr %{x}.total
%{x}.correction = load {type}, ptr %{x}.lost
%{x}.corrected = fadd {type} %{x}.end, %{x}.correction
%{x}.is.finite = fcmp ord {type} %{x}.correction, 0.0
%{x}.result = select i1 %{x}.is.finite, {type} %{x}.corrected, {type} %{x}.end
store {type} %{x}.result, ptr {address}"""

#: Elements of NumPy's own loop, rows, and chunks of columns. What is not adjacent is copied into a buffer, and back.
_BUFFER = "%{x}.buffer = alloca [{bytes} x i8], align 64"
_ADJACENT = "%{x}.adjacent = icmp eq i64 %{x}.columnstep, {size}"
_OUTER = """%{x}.over = mul i64 %o, %{x}.outerstep
%{x} = getelementptr i8, ptr %{x}.first, i64 %{x}.over"""
_ROW = """%{x}.down = mul i64 %r, %{x}.rowstep
%{x}.row = getelementptr i8, ptr %{x}, i64 %{x}.down"""
_CHUNK = """%{x}.offset{s} = mul i64 %start{s}, %{x}.columnstep
%{x}.at{s} = getelementptr i8, ptr %{x}.row, i64 %{x}.offset{s}
%{x}.p{s} = select i1 %{x}.adjacent, ptr %{x}.at{s}, ptr %{x}.buffer"""
_COPY_IN = (
    "call void @copy{size}(i1 %{x}.adjacent, ptr %{x}.buffer, i64 {size}, ptr %{x}.at{s}, i64 %{x}.columnstep, "
    "i64 %count{s})"
)
_COPY_OUT = (
    "call void @copy{size}(i1 %{x}.adjacent, ptr %{x}.at{s}, i64 %{x}.columnstep, ptr %{x}.buffer, i64 {size}, "
    "i64 %count{s})"
)

#: Values that cross stages: those of a row's elements, and one of each row.
_STORED = "%{x}.row = alloca [{count} x {memory}], align 64"
_STORED_CHUNK = "%{x}.p{s} = getelementptr {memory}, ptr %{x}.row, i64 %start{s}"
_ONE = "%{x}.p{s} = getelementptr i8, ptr %{x}.row, i64 0"

#: Elements that a condition is true for.
_EVENT = "%{x} = phi i1 [ false, %entry ], [ {last}, %loop ]"
_REPORT = """%{x}.bits = select i1 {last}, i32 {bits}, i32 0
%{x}.before = load i32, ptr %events
%{x}.after = or i32 %{x}.before, %{x}.bits
store i32 %{x}.after, ptr %events"""

# ---------------------------------------------------------------- text of a loop

_BODY = """define internal void @body{s}(i64 %n, i1 %first, ptr %events{arguments}) {{
entry:
{entry}
br label %loop
loop:
%i = phi i64 [ 0, %entry ], [ %next, %loop ]
{phis}
{loop}
%next = add nuw nsw i64 %i, 1
%more = icmp ult i64 %next, %n
br i1 %more, label %loop, label %end{hints}
end:
{end}
ret void
}}"""

#: The end of a kernel: it adds the processor's flags to those of `%events`, and reports them.
FINISH = f"""end:
%flags = call i32 @fetestexcept(i32 {_FLAGS})
%raised = icmp ne i32 %flags, 0
%of.flags = select i1 %raised, i32 {WARNING}, i32 0
%of.body = load i32, ptr %events
%all = or i32 %of.flags, %of.body
%any = icmp ne i32 %all, 0
br i1 %any, label %tell, label %done
tell:
%bits = zext i32 %all to i64
%reported = atomicrmw or ptr %report, i64 %bits monotonic
%warning = and i64 %bits, {WARNING}
%warnings = shl i64 %warning, {_WARNINGS_FROM}
%exception = lshr i64 %bits, 1
%exceptions = shl i64 %exception, {EXCEPTIONS_FROM}
%counts = or i64 %warnings, %exceptions
%counted = atomicrmw add ptr %report, i64 %counts monotonic
%cleared = call i32 @feclearexcept(i32 {_FLAGS})
br label %done
done:
ret void
}}"""

_KERNEL = """define void @kernel(ptr %args, ptr %sizes, ptr %steps, ptr %report) {{
entry:
%events = alloca i32
store i32 0, ptr %events
{entry}
%some = icmp sgt i64 %n, 0
br i1 %some, label %outer, label %done
outer:
%o = phi i64 [ 0, %entry ], [ %o.next, %outer.end ]
{outer}
br label %rows
rows:
%r = phi i64 [ 0, %outer ], [ %r.next, %row.end ]
%first = icmp eq i64 %r, 0
{row}
br label %stage.0
{stages}
row.end:
%r.next = add i64 %r, 1
%r.more = icmp slt i64 %r.next, %m
br i1 %r.more, label %rows, label %outer.end
outer.end:
{outer_ends}
%o.next = add i64 %o, 1
%o.more = icmp slt i64 %o.next, %count.outer
br i1 %o.more, label %outer, label %end
{finish}"""

#: A stage of a row: over its chunks, or over one element.
_STAGE = """stage.{k}:
{begin}
%most{s} = select i1 {adjacent}, i64 {n}, i64 {chunk}
br label %chunks{s}
chunks{s}:
%start{s} = phi i64 [ 0, %stage.{k} ], [ %start{s}.next, %chunks{s} ]
%rest{s} = sub i64 {n}, %start{s}
%count{s} = call i64 @llvm.smin.i64(i64 %rest{s}, i64 %most{s})
{chunk_begins}
call void @body{s}(i64 %count{s}, i1 %first, ptr %events{arguments})
{chunk_ends}
%start{s}.next = add i64 %start{s}, %count{s}
%start{s}.more = icmp slt i64 %start{s}.next, {n}
br i1 %start{s}.more, label %chunks{s}, label %stage.{k}.end
stage.{k}.end:
{end}
br label %{next}"""

#: Copy elements between memory with different steps, unless `skip` says that they are used where they are.
_COPY = """define internal void @copy{size}(i1 %skip, ptr %to, i64 %to.step, ptr %from, i64 %from.step, i64 %n)
noinline {{
entry:
br i1 %skip, label %end, label %loop
loop:
%i = phi i64 [ 0, %entry ], [ %next, %loop ]
%a = mul i64 %i, %from.step
%b = mul i64 %i, %to.step
%source = getelementptr i8, ptr %from, i64 %a
%target = getelementptr i8, ptr %to, i64 %b
%x = load i{bits}, ptr %source, align {size}
store i{bits} %x, ptr %target, align {size}
%next = add i64 %i, 1
%more = icmp slt i64 %next, %n
br i1 %more, label %loop, label %end
end:
ret void
}}"""

#: No iteration of a loop over elements depends on another one.
_END = """declare i64 @llvm.smin.i64(i64, i64)
{declarations}
!0 = distinct !{{}}
!1 = distinct !{{!1, !2, !3, !4}}
!2 = !{{!"llvm.loop.parallel_accesses", !0}}
!3 = !{{!"llvm.loop.vectorize.enable", i1 true}}
!4 = !{{!"llvm.loop.interleave.count", i32 {interleaved}}}"""


def _is_compensated(p: Parameter) -> bool:
    return p.reduction is sum_p and p.dtype.kind == "f"


def _fill(template: str, parameters: Iterable[Parameter], **texts: object) -> list[str]:
    return [template.format(**p.texts, **texts) for p in parameters]


class Section:
    """A stage of a kernel: its operands, its results with their values, and the instructions for one element.

    At an even place it walks over the elements of a row, at an odd one it has one element.
    """

    def __init__(self, place: int):
        self.place = place
        self.suffix = str(place or "")
        self.is_row = place % 2 == 1
        self.code = Code()
        self.values: dict[Var, Value] = {}
        self.operands: list[Parameter] = []
        self.results: dict[Parameter, Value] = {}

    @property
    def parameters(self) -> list[Parameter]:
        return [*self.operands, *self.results]

    @property
    def totals(self) -> list[Parameter]:
        return [p for p in self.results if p.reduction and not p.has_columns]

    def lower(self, eqn: Equation, parameters: dict[Var, Parameter]) -> Value:
        """Write an operation, and return its value: that which is added up, of a reduction."""
        for a in eqn.inputs:
            if isinstance(a, Var):
                self.load(a, parameters)
        is_reduction = eqn.primitive in REDUCTIONS
        value = self.values[eqn.inputs[0]] if is_reduction else lower_equation(self.code, eqn, self.values)
        return self.values.setdefault(eqn.outputs[0], value)

    def load(self, v: Var, parameters: dict[Var, Parameter]) -> Value:
        """Return a value, which is an operand unless it was computed in this stage."""
        if v not in self.values:
            p = parameters[v]
            self.operands.append(p)
            self.values[v] = Value(self.code, f"%{p.name}.v", p.dtype)
        return self.values[v]

    def arguments(self, suffix: str = "") -> list[str]:
        """Return the names of the addresses that the body takes."""
        return [f"{p.name}.chunk" if p in self.totals else f"{p.name}.p{suffix}" for p in self.parameters]

    def body(self) -> str:
        entry, loop, phis, end = [], [], [], []
        for p in self.operands:
            load = _LOAD_BOOL if p.dtype.kind == "b" else _LOAD
            if p.has_columns or self.is_row:
                loop += _fill(f"{_ELEMENT}\n{load}", [p], address=f"%{p.name}.a")
            else:
                entry += _fill(load, [p], address=f"%{p.name}.p")
        loop += self.code.lines
        for p, value in self.results.items():
            store = _STORE_BOOL if p.dtype.kind == "b" else _STORE
            if p.reduction and not p.has_columns:
                phis += _fill(_SUM, [p])
                loop += _fill(_ADD, [p], value=value.text)
                end += _fill(_STORE_SUM, [p])
            elif p.reduction:
                loop += _fill(f"{_ELEMENT}\n{_ADD_TO_ELEMENT}", [p], value=value.text)
                loop += _fill(store, [p], value=f"%{p.name}.sum")
            else:
                loop += _fill(f"{_ELEMENT}\n{store}", [p], value=value.text)
        for name, bits, conditions in (
            ("warning", WARNING, self.code.warnings),
            ("exception", EXCEPTION, self.code.exceptions),
        ):
            if conditions:
                names = [f"%{name}", *[f"%{name}.{k}" for k in range(len(conditions))]]
                pairs = zip(conditions, itertools.pairwise(names))
                loop += [f"{after} = or i1 {before}, {condition.text}" for condition, (before, after) in pairs]
                phis.append(_EVENT.format(x=name, last=names[-1]))
                end.append(_REPORT.format(x=name, last=names[-1], bits=bits))
        arguments = "".join([f", ptr noalias %{name}" for name in self.arguments()])
        hints = "" if self.is_row else ", !llvm.loop !1"
        blocks = {"entry": entry, "phis": phis, "loop": loop, "end": end}
        texts = {name: "\n".join(lines) for name, lines in blocks.items()}
        return _BODY.format(s=self.suffix, arguments=arguments, hints=hints, **texts)


class Loop:
    """The parts of a kernel: its parameters, and its stages."""

    def __init__(self, body: Tape, layout: Layout | None):
        self.body = body
        self.layout = layout
        inputs = body.inputs if layout is None else [*layout.operands]  # results of reads among them
        stages, shape = stages_of(body), iteration_shape(body)
        reductions = {e.outputs[0]: e.primitive for e in body.equations if e.primitive in REDUCTIONS}
        stored = {
            v: Parameter(f"t{k}", v.type.dtype, "n" * (v.type.shape == shape), reductions.get(v))
            for k, v in enumerate(stages.crossing)
        }
        self.stored = [*stored.values()]
        self.operands = [self._parameter(f"x{k}", v) for k, v in enumerate(inputs)]
        summed = {v: p for v, p in reductions.items() if v not in stored}
        self.results = [self._parameter(f"y{k}", v, summed.get(v)) for k, v in enumerate(body.outputs)]
        self.result_views = [layout.view(layout.reduced.get(v, v.type.shape)) for v in body.outputs] if layout else []
        self.parameters = [*self.operands, *self.results]
        self.with_columns = [p for p in self.parameters if p.has_columns]
        sections = [Section(k) for k in range(stages.count)]
        known = dict(zip(inputs, self.operands)) | stored
        for section, equations in zip(sections, stages.equations):
            for eqn in equations:
                value, (v,) = section.lower(eqn, known), eqn.outputs
                if v in stored:
                    section.results[stored[v]] = value
        for y, v in zip(self.results, body.outputs):
            section = sections[stages.place[v] + (v in stored and v in reductions)]  # there once the row is reduced
            section.results[y] = section.load(v, known)
        self.sections = [section for section in sections if section.results]
        self.totals = [p for section in self.sections for p in section.totals]
        self.at_end = [p for p in self.totals if "m" not in p.dimensions and p not in self.stored]

    def _parameter(self, name: str, v: Var, reduction: Primitive | None = None) -> Parameter:
        if self.layout is None:
            return Parameter(name, v.type.dtype, "" if v.type.size == 1 and name.startswith("x") else "n")
        shape = self.layout.reduced.get(v, v.type.shape)
        view = self.layout.views[v][0] if v in self.layout.views else self.layout.view(shape)
        dimensions = self.layout.dimensions_of(view)
        # A sum along axes of size 1 has rows and columns: it adds nothing up.
        return Parameter(name, v.type.dtype, dimensions, reduction if dimensions != "mn" else None)

    @property
    def signature(self) -> str | None:
        """The signature of the generalized ufunc; None for an ordinary one."""
        if self.layout is None:
            return None
        groups = [[f"({','.join(p.dimensions)})" for p in ps] for ps in (self.operands, self.results)]
        return "->".join(",".join(group) for group in groups)

    @property
    def interleaved(self) -> int:
        """The number of vectors that are computed at once, so that the processor need not wait for results.

        They are fewer in long loops, which take longer to compile.
        """
        lines = max([len(section.code.lines) for section in self.sections])
        return 4 if lines < 1000 else 2 if lines < 2000 else 1

    def text(self) -> str:
        """Return the module."""
        sizes = sorted({p.dtype.itemsize for p in self.with_columns})
        declarations = set().union(*[section.code.declarations for section in self.sections])
        for p in self.totals + self.results:
            if p.reduction not in (None, sum_p):
                declarations.add("declare {0} {1}({0}, {0})".format(p.texts["type"], p.intrinsic))
        end = _END.format(declarations="\n".join(sorted(declarations)), interleaved=self.interleaved)
        bodies = [section.body() for section in self.sections]
        return "\n\n".join([*bodies, self._kernel(), *[_COPY.format(size=n, bits=8 * n) for n in sizes], end])

    # ------------------------------------------------ rows and chunks

    def _kernel(self) -> str:
        stored = [_fill(_STORED, [p], count=self._columns if p.has_columns else 1) for p in self.stored]
        labels = [*[f"stage.{k}" for k in range(len(self.sections))], "row.end"]
        blocks = {
            "entry": [
                *self._loads(),
                *_fill(_BUFFER, self.with_columns, bytes=CHUNK * 8),
                *_fill(_ADJACENT, self.with_columns),
                *_fill(_TOTAL, self.totals),
                *itertools.chain(*stored),
            ],
            "outer": [*_fill(_OUTER, self.parameters), *_fill(_CLEAR, self.at_end)],
            "row": _fill(_ROW, self.parameters),
            "stages": [self._stage(k, section, labels[k + 1]) for k, section in enumerate(self.sections)],
            "outer_ends": [self._finish(p, f"%{p.name}") for p in self.at_end],
        }
        return _KERNEL.format(finish=FINISH, **{name: "\n".join(lines) for name, lines in blocks.items()})

    @property
    def _columns(self) -> int:
        return self.layout.sizes[-1] if self.layout else 0

    def _stage(self, k: int, section: Section, label: str) -> str:
        """Return the text of a stage, which is followed by that with a label."""
        s, totals = section.suffix, section.totals
        stored = [p for p in section.parameters if p in self.stored]
        columns = [p for p in section.parameters if p.has_columns and p not in stored]
        by_row = [p for p in totals if p not in self.at_end]
        adjacent = [f"%{p.name}.adjacent" for p in columns] if not totals else ["false"]
        names = ["true", *[f"%all{s}.{j}" for j in range(len(adjacent))]]
        blocks = {
            "begin": [
                *[f"{b} = and i1 {a}, {x}" for x, (a, b) in zip(adjacent, itertools.pairwise(names))],
                *_fill(_ONE, [p for p in section.parameters if not p.has_columns and p not in totals], s=s),
                *_fill(_CLEAR, by_row),
            ],
            "chunk_begins": [
                *_fill(_CHUNK, columns, s=s),
                *_fill(_STORED_CHUNK, [p for p in stored if p.has_columns], s=s),
                *_fill(_COPY_IN, [p for p in columns if p in section.operands or p.reduction], s=s),
            ],
            "chunk_ends": [
                *_fill(_COPY_OUT, [p for p in columns if p in section.results], s=s),
                *_fill(_ADD_CHUNK, totals),
                *_fill(_ADD_LOST, [p for p in totals if _is_compensated(p)]),
            ],
            "end": [self._finish(p, f"%{p.name}.row") for p in by_row],
        }
        texts: dict[str, object] = {name: "\n".join(lines) for name, lines in blocks.items()}
        texts |= {"k": k, "s": s, "n": 1 if section.is_row else "%n", "adjacent": names[-1], "next": label}
        texts["arguments"] = "".join([f", ptr %{name}" for name in section.arguments(s)])
        return _STAGE.format(chunk=CHUNK, **texts)

    def _finish(self, p: Parameter, address: str) -> str:
        (text,) = _fill(_FINISH_FLOAT if _is_compensated(p) else _FINISH, [p], address=address)
        return text

    def _loads(self) -> list[str]:
        """Load the addresses, sizes and steps that NumPy passes.

        An ordinary ufunc gets one size, and one step for each parameter. A generalized one gets the number of elements
        of its own loop, one step there for each parameter, and then the sizes and steps of the signature.
        """
        lines: list[str] = []

        def load(name: str, source: str, k: int | None, default: int = 0, type_: str = "i64") -> None:
            """Load element `k` of an array; without one, it is a number."""
            if k is None:
                lines.append(f"%{name} = add i64 0, {default}")
            else:
                lines.append(f"%{name}.address = getelementptr {type_}, ptr %{source}, i64 {k}")
                lines.append(f"%{name} = load {type_}, ptr %{name}.address")

        generalized = self.layout is not None
        load("count.outer", "sizes", 0 if generalized else None, 1)
        for k, p in enumerate(self.parameters):
            load(f"{p.name}.first", "args", k, type_="ptr")
            load(f"{p.name}.outerstep", "steps", k if generalized else None)
        sizes = list(dict.fromkeys("".join(p.dimensions for p in self.parameters)))
        steps = itertools.count(len(self.parameters) if generalized else 0)
        for name in "mn":
            load(name, "sizes", sizes.index(name) + generalized if name in sizes else None, 1)
        for p in self.parameters:
            for name, step in (("m", "rowstep"), ("n", "columnstep")):
                load(f"{p.name}.{step}", "steps", next(steps) if name in p.dimensions else None)
            if not generalized and not p.dimensions:
                next(steps)  # that of one element, which is not used
        return lines
