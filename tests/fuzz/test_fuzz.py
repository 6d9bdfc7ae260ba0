"""Random programs of all routes, for some seconds; for longer, `python -m tests.fuzz.arrays` and `tests.fuzz.ranks`."""

import itertools
import pathlib
import random
import re
from collections import Counter

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from spmd.mesh.launch import launcher_size
from tests.checks.samples import each
from tests.fuzz import checks, inputs, numpy_programs, programs
from tests.fuzz import ranks as fuzz_ranks
from tests.fuzz.findings import ARRAYS, failures, program_of
from tests.fuzz.programs import ALONE, HERE, ON_RANKS
from tests.fuzz.shrinking import raises_python_numbers, shrunk

#: Routes and seeds whose programs are drawn each time, beside others: each has shown a fault, which the page names.
SEEDS = re.findall(r"^\| ([\w ]+) \| (\S+) \|", pathlib.Path(__file__).with_name("seeds.md").read_text(), re.M)


def check(route, program):
    for failure in failures(program, Counter(), route):
        pytest.fail(str(shrunk(failure, failures)), pytrace=False)


@pytest.mark.parametrize("route", [ARRAYS, *HERE])
def test_programs_of_seeds_have_the_property_of_their_route(route):
    others = [f"CI/{k}" for k in range(30 if route == ARRAYS else 1)]
    for seed in [*(seed for name, seed in SEEDS if name == route), *others]:
        check(route, program_of(route, seed))


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.sampled_from([*HERE, *[ARRAYS] * len(HERE)]), st.randoms(use_true_random=False))
def test_programs_that_hypothesis_draws(route, rng):
    check(route, program_of(route, "0", rng=rng))


@pytest.mark.skipif(launcher_size() is not None, reason="it launches ranks itself")
@pytest.mark.parametrize("size, routes", [(2, ON_RANKS), (4, ON_RANKS[:3]), (2, ALONE), (4, ALONE)])
def test_programs_on_ranks_are_right_or_refused(size, routes):
    for failure, _ in fuzz_ranks.fuzz_ranks("CI", [size], routes, 10, Counter(), programs=2):
        pytest.fail(str(failure), pytrace=False)


# ---------------------------------------------------------------- findings


def test_a_finding_of_a_route_is_a_short_script():
    lines = {"b": "np.exp(x)", "c": "np.cos(x)", "d": "b + c"}
    program = programs.Program({"x": inputs.Input(text="0.0")}, ("x",), lines, ("d",), "0", "agree(f(x), 1.0)")
    (failure,) = failures(program, Counter(), "wrong")
    text = str(shrunk(failure, failures))
    assert text.startswith("# seed '0', wrong: AssertionError: ") and "exp" not in text and "cos" not in text
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        exec(text, {})


def test_a_way_that_is_wrong_is_found(monkeypatch):
    wrong = lambda f: lambda *args: [np.abs(x) for x in checks.leaves(f(*args))]  # noqa: E731
    monkeypatch.setattr(checks, "WAYS", {"wrong": wrong})
    types = {"a": inputs.Input("float64", (3,), "strided"), "b": inputs.Input("int8", (), "C")}
    lines = {"c": "np.exp(b)", "d": "np.cos(a + 4)", "e": "-np.square(d)", "f": "np.exp(e)"}
    program = programs.Program(types, ("a", "b"), lines, ("c", "e", "f"), "0")
    (failure,) = (f for f in failures(program, Counter()) if f.name == "wrong")
    smallest = shrunk(failure, failures)
    assert str(smallest).startswith("# seed '0', wrong: tests.fuzz.shrinking.Finding: result 0 is")
    assert smallest.program.args == ("a",) and [*smallest.program.lines] in (["d"], ["e"], [])


@pytest.mark.skipif(launcher_size() is not None, reason="it launches ranks itself")
@pytest.mark.parametrize("call", ["print('WRONG')", "import os; os._exit(3)"])
def test_a_finding_on_ranks_is_a_script(call):
    program = programs.Program({}, (), {}, (), "0/0", call)
    (failure,) = fuzz_ranks.finding(program, Counter(), "wrong", 2)
    assert str(failure).startswith("# seed '0/0', wrong, 2 ranks: tests.fuzz.ranks.Launched: exit code ")
    assert str(failure).endswith(f"{call}\n")


# ---------------------------------------------------------------- the generator


def test_what_is_in_braces_of_a_piece_can_be_drawn():
    templates = [line for table in programs.PIECES.values() for line in table]
    for route in itertools.chain(*programs.ROUTES.values()):
        templates += [route.check, *route.inputs.values(), *route.lines.values()]
    bound = {*re.findall(r"\{(\w+)=", str(templates)), *programs.PIECES}
    for template in templates:
        for _, choice in programs.PLACE.findall(template):
            assert re.search(r"\||\.\.", choice) or choice in bound or hasattr(numpy_programs.Lines, choice), template


@each("route", [ARRAYS, *HERE])
def test_the_same_seed_is_the_same_program(route):
    one, two = program_of(route, "some seed"), program_of(route, "some seed")
    assert one.script() == two.script() and one.arguments(1) == two.arguments(1)


@each("line", ["a ** (2**40)", "a ** a", "(2**40) ** a", "abs(a) ** (2**40)"])
def test_powers_of_integers_without_an_end_are_not_drawn(line):
    assert numpy_programs.tried(line, {"a": 2}) is None
    types = {"a": inputs.Input(shape=int), "b": inputs.Input("int64")}
    assert raises_python_numbers(types, {"c": line})
    assert not raises_python_numbers(types, {"c": line.replace("a", "b")})


@each("layout", inputs.LAYOUTS)
@each("dtype", inputs.DTYPES)
def test_arguments_have_their_dtypes_and_layouts(dtype, layout):
    (x,) = programs.evaluated({"a": inputs.Input(dtype, (2, 3), layout).source(random.Random(0))})
    assert (x.dtype.newbyteorder("="), x.shape) == (np.dtype(dtype), (2, 3))
    assert x.flags.writeable == (layout not in ("read-only", "stride 0"))
    assert x.flags.c_contiguous == (layout in ("C", "read-only", "unaligned", "big-endian"))
    assert x.flags.aligned == (layout != "unaligned" or x.itemsize == 1)
    assert x.dtype.isnative == (layout != "big-endian" or x.itemsize == 1)
