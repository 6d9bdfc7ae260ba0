"""No program sends less than its minimum; `minimum.md` shows some whose minimum is known."""

import itertools

import spmd
from tests.benchmarks import array_programs
from tests.checks.meshes import mesh


def test_no_program_sends_less_than_its_minimum():
    for program in itertools.islice(array_programs.programs(), 0, None, 3):
        arrays = [spmd.distribute(x, mesh(4), spec) for x, spec in program.arguments]
        report = spmd.communication(program.function, against="minimum")(*arrays)
        assert report.minimum is None or report.minimum <= report.bytes, program.name
