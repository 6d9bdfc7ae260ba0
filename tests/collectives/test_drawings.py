"""The drawings in the docstrings of collectives: each is evaluated on simulated ranks, forward and backward."""

import inspect
import re
from typing import NamedTuple

import numpy

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.samples import each

MESH = mesh(2)

#: How a body takes and returns a value, by its states as drawn.
SPECS = {"": P(), "{i}": P("i"), "{U:i}": P(unreduced={"i"}), "{R:i}": P(reduced={"i"})}

#: A number for each letter that a block may have, alone or with an index: no two sums of them are equal.
NUMBERS = {f"{letter}{k}": 2.0**n for n, (letter, k) in enumerate((x, k) for x in "abuv" for k in ("", 0, 1))}


class Drawn(NamedTuple):
    """A value in a drawing: each rank's block, and the states."""

    blocks: list[str]
    states: str

    @property
    def arrays(self):
        return [numpy.array(eval(block, {}, NUMBERS), float) for block in self.blocks]

    def argument(self):
        """The value as a `shard_map` takes it. Raises ValueError for ranks that differ where the states say not."""
        return spmd.from_local(self.arrays, MESH, SPECS[self.states])


def read(text):
    """The value that a part of a line draws; None if there is none."""
    assert re.fullmatch(r"none|\[\S+\] +\[\S+\]( +\{\S+\})?", text), text
    return None if text == "none" else Drawn(re.findall(r"\[\S+\]", text), "".join(re.findall(r"\{\S+\}", text)))


def read_drawing(f):
    """The call that a docstring draws, its operand, its result, and the cotangents of the result and of the operand."""
    doc = inspect.getdoc(f)
    lines = doc.split("\n\n")[1].splitlines()
    assert len(lines) == 3 and lines[0].startswith("    x: "), f"no drawing beneath the first line:\n{doc}"
    (_, x), (call, y), (backward, cotangents) = (re.split(r": +", line.strip(), maxsplit=1) for line in lines)
    assert call.startswith(f"{f.__name__}(") and backward == "backward", lines
    return call, read(x), read(y), [read(part.strip()) for part in cotangents.split("->")]


def check_drawing(f):
    """Raise AssertionError or ValueError if the docstring's drawing is not what a collective does."""
    call, x, y, cotangents = read_drawing(f)
    arguments = [drawn for drawn in (x, cotangents[0]) if drawn]
    drawn = [y, *cotangents[1:]]
    states = []

    def body(*args):
        def collective(x=None):
            return np.ravel(eval(call, {**vars(collectives), "multiply": np.multiply, "x": x}))

        if len(args) > 1:
            out, pullback = md.vjp(collective, args[0])
            results = [out, *pullback(args[1])]
        else:
            results = [collective(*args)]
        states[:] = [str(md.typeof(result).states).replace("{}", "") for result in results]
        return results

    specs = {"in_specs": tuple(SPECS[d.states] for d in arguments), "out_specs": [SPECS[d.states] for d in drawn]}
    actual = spmd.shard_map(body, mesh=MESH, **specs)(*[d.argument() for d in arguments])
    assert states == [d.states for d in drawn]
    for array, d in zip(actual, drawn, strict=True):
        blocks = array.local if isinstance(array, spmd.ShardedArray) else [array] * 2
        assert [block.tolist() for block in blocks] == [block.tolist() for block in d.arrays], (d, blocks)


@each("name", [name for name in collectives.__all__ if name != "InFlight"])
def test_drawings_are_true(name):
    check_drawing(getattr(collectives, name))
