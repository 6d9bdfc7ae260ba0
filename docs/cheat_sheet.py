"""Write the tables of the cheat sheet from the declarations: `python docs/cheat_sheet.py`."""

import inspect
import re
from pathlib import Path

import numpy

import collectives
import minidiff as md
import spmd
from collectives import cost
from minidiff.core.states import STATES, AxisStates
from spmd import P
from spmd.mesh.specs import axes_of_entry

PAGE = Path(__file__).parent / "cheat-sheet.md"

#: The public functions of each table, in order.
COLLECTIVES = (
    "psum pmean pmax pmin pprod pany pall preduce pscan all_gather all_gather(to='reduced') all_gather_invariant "
    "psum_scatter pscatter all_to_all ppermute ppermute_start broadcast broadcast_varying reduce gather scatter at_root"
)
CASTS = "pbroadcast reduced unreduced pcopies"

#: The operation that a function applies, where its name is another one's.
OPERATION = {
    "pmean": "psum",
    "pany": "pmax",
    "pall": "pmin",
    "preduce": "all_gather_invariant",
    "all_gather(to='reduced')": "all_gather_reduced",
}
#: Names of operations that users write in another way.
WRITTEN = {
    "all_gather_reduced": "all_gather(to='reduced')",
    "exact_psum": "psum(exact=True, axis=0)",
    "ppermute_wait": ".wait()",
}
#: Functions whose derivative is not the transpose of their operation.
BOOLEAN, NOT_LINEAR = ("pany", "pall"), ("pmax", "pmin", "pprod", "preduce")
REVERSED = ("ppermute", "ppermute_start", "pscan")

SPECS = [P(), P("i"), P(None, "i"), P("i", "j"), P(("i", "j")), P(reduced={"i"}), P(unreduced={"i"})]


def markdown(header, rows):
    """Return a table in Markdown."""
    lines = [header, [":--"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def code(text):
    """Return text as code; nothing for none."""
    return "" if text == "" else f"`{text}`"


def drawing_of(name):
    """Return the call and the three blocks of a docstring's drawing: operand, result, backward pass."""
    lines = inspect.getdoc(getattr(collectives, name)).split("\n\n")[1].splitlines()
    (_, x), (call, y), (_, backward) = (re.split(r": +", line.strip(), maxsplit=1) for line in lines)
    return call, *(re.sub(r" +", " ", re.sub(r" *\{\S+\}", "", text)) for text in (x, y, backward))


def formula(text):
    """Return a cost formula as one writes it by hand: `2*(N - 1)*K/N` is 2(N − 1)K/N."""
    text = text.replace("log2(C)", "⌈log₂ N⌉").replace("*(", "(").replace("*", " ")
    return text.replace(")  ", ") ").replace(") K", ")K").replace(" - ", " − ")


def transpose_of(name, state):
    """Return the transpose of a function for operands in one state, as users write it."""
    operation = cost.BY_NAME[OPERATION.get(name, name)]
    if name in BOOLEAN:
        return "of booleans: none"
    if name in NOT_LINEAR:
        return "not linear"
    transposed = operation.takes[state]().name
    shown = code(WRITTEN.get(transposed, transposed))
    return shown + (", / N" if name == "pmean" else ", reversed" if name in REVERSED else "")


def rows_of(names, priced):
    """Return a row for each function, and for each further state that its operation takes."""
    for name in names.split():
        operation = cost.BY_NAME[OPERATION.get(name, name)]
        call, x, y, backward = drawing_of(name.partition("(")[0])
        if "(to=" in name:
            call = call.replace(")", f", {name.partition('(')[2]}")
        sends = formula(cost.ALGORITHMS[operation.cost].bytes.text) if operation.cost else "0"
        for state in operation.takes:
            first = state == next(iter(operation.takes))
            drawn = [code(call), code(f"{x} → {y}")] if first else ["", ""]
            back = backward.replace("->", "→")
            price = [sends if first else ""] if priced else []
            back = [code(back) if first and back != "none" else ""]
            yield [*drawn, f"{state} → {operation.gives}", transpose_of(name, state), *back, *price]


def collectives_table():
    header = ["write", "two ranks, before → after", "type along `i`", "transpose", "backward: cotangents", "bytes sent"]
    return markdown(header, rows_of(COLLECTIVES, True))


def casts_table():
    header = ["write", "two ranks, before → after", "type along `i`", "transpose", "backward: cotangents"]
    return markdown(header, rows_of(CASTS, False))


HOLDS = {
    "invariant": "the same value",
    "varying": "values that may differ",
    "unreduced": "partial sums that are not added up yet",
    "reduced": "the same value; each use adds a part to its cotangent",
}


def states_table():
    states = {state: AxisStates().with_state("i", state) for state in ("invariant", *STATES[:3])}
    rows = [
        [state, code(md.ShapedArray((3,), float).update(states=s)), HOLDS[state], s.cotangent().along("i")]
        for state, s in states.items()
    ]
    return markdown(["state", "type", "ranks along `i` hold", "its cotangent is"], rows)


def specs_table():
    """Return the blocks and types that a body gets of an array of 8 × 6 on 2 × 2 ranks."""
    mesh, rows = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated"), []
    for spec in SPECS:
        types = []
        parts = spmd.from_local(lambda rank: numpy.ones((8, 6)), mesh, spec) if spec.unreduced else numpy.ones((8, 6))
        body = lambda x, types=types: types.append(md.typeof(x)) or x  # noqa: E731
        spmd.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(parts)
        rows.append([code(spec), code(types[0]), described(spec)])
    rows.append([code(P(sum="i")), "", "of a result: the sum along `i` of the ranks' parts, taken after the body"])
    rows.append([code(None), "", "of an argument: it is static (a number, a string, a function)"])
    return markdown(["spec", "block of `f64[8,6]`", "along `i` (and `j`)"], rows)


def described(spec):
    """Return a partition spec in words."""
    if spec.unreduced:
        return "ranks hold partial sums"
    if spec.reduced:
        return "the same on all ranks; its gradient is unreduced"
    parts = [
        f"{dimension} split along {' and '.join(f'`{axis}`' for axis in axes)}"
        for dimension, axes in zip(("rows", "columns"), map(axes_of_entry, spec.entries))
        if axes
    ]
    return "; ".join(parts) or "the whole array on all ranks"


#: The tables of the page, by the heading above each.
TABLES = {
    "Collectives": collectives_table,
    "Casts, which move nothing": casts_table,
    "The four states of a value along an axis": states_table,
    "Partition specs": specs_table,
}


def with_tables(text):
    """Return the text of the page, with the first table below each of the headings written anew."""
    for heading, table in TABLES.items():
        before, mark, after = text.partition(f"## {heading}\n")
        after = re.sub(r"(?m)^\|.*\n(?:\|.*\n)*", lambda _, new=table: new() + "\n", after, count=1)
        text = before + mark + after
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
