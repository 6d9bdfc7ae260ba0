"""Random NumPy programs under every transformation, for some seconds; for longer, `python -m tests.fuzz.arrays`."""

from collections import Counter

import numpy as np
import pytest

from spmd.mesh.launch import launcher_size
from tests.checks.samples import each
from tests.fuzz import arrays as fuzz
from tests.fuzz import checks, programs
from tests.fuzz import ranks as fuzz_ranks
from tests.fuzz import scripts as fuzz_routes

#: The same programs each time: a test fails because of a change, not because of the day.
SEED = "CI"


@pytest.mark.parametrize("part", range(8))
def test_random_programs_are_what_numpy_makes_of_them(part):
    for actual in fuzz.fuzz((f"{SEED}/{part}/{k}" for k in range(12)), Counter()):
        pytest.fail(str(fuzz.shrunk(actual[0])), pytrace=False)


@pytest.mark.parametrize("route", fuzz_routes.ROUTES)
def test_programs_of_a_route_are_what_a_loop_or_numpy_makes_of_them(route):
    for text in fuzz_routes.fuzz_routes((f"{SEED}/{k}" for k in range(4)), Counter(), [route]):
        pytest.fail(text, pytrace=False)


def test_a_finding_of_a_route_is_a_script(monkeypatch):
    monkeypatch.setitem(fuzz_routes.ROUTES, "wrong", lambda rng: f"agree(md.jit(np.cos)(0.0), {rng.choice([2.0])})")
    (text,) = fuzz_routes.fuzz_routes(["0"], Counter(), ["wrong"])
    assert text.startswith("# wrong, seed '0': AssertionError: ")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        exec(text, {})


@pytest.mark.skipif(launcher_size() is not None, reason="it launches ranks itself")
@pytest.mark.parametrize("route", [*fuzz_ranks.ROUTES, *fuzz_ranks.ALONE])
def test_programs_on_ranks_are_right_or_refused(route):
    for text in fuzz_ranks.fuzz_ranks(SEED, [2, 4], [route], 10, Counter(), programs=3):
        pytest.fail(text, pytrace=False)


@pytest.mark.skipif(launcher_size() is not None, reason="it launches ranks itself")
@pytest.mark.parametrize("program", ["print('WRONG')", "raise OSError", "os._exit(3)"])
def test_a_finding_on_ranks_is_a_script(program, monkeypatch):
    monkeypatch.setitem(fuzz_ranks.ALONE, "wrong", lambda rng: program)
    (text,) = fuzz_ranks.fuzz_ranks("0", [2], ["wrong"], 10, Counter(), programs=1)
    assert text.startswith("# wrong, seed '0/0', 2 ranks: exit code ")
    assert text.endswith(f"{program}\n")


@each("line", ["a ** (2**40)", "a ** a", "(2**40) ** a", "abs(a) ** (2**40)"])
def test_powers_of_integers_without_an_end_are_not_drawn(line):
    assert programs.tried(line, {"a": 2}) is None
    program = programs.Program({"a": programs.Input(shape=int), "b": programs.Input("int64")}, {"c": line}, ("c",), "0")
    assert fuzz.raises_python_numbers(program)
    of_an_array = programs.Program(program.inputs, {"c": line.replace("a", "b")}, ("c",), "0")
    assert not fuzz.raises_python_numbers(of_an_array)


def wrong(f):
    """Forgets the sign of cosines."""
    return lambda *args: [np.abs(x) if "cos" in f.__doc__ else x for x in f(*args)]


def test_what_is_wrong_is_found_and_printed_as_a_script(monkeypatch):
    def described(program, *args):
        f = function(program, *args)
        f.__doc__ = program.source()
        return f

    function = programs.Program.function
    monkeypatch.setattr(programs.Program, "function", described)
    monkeypatch.setattr(checks, "WAYS", {"wrong": wrong})
    inputs = {"a": programs.Input("float64", (3,), "strided"), "b": programs.Input("int8", (), "C")}
    lines = {"c": "np.negative(a)", "d": "np.exp(b)", "e": "np.cos(a + 4)", "f": "np.tan(e)"}
    program = programs.Program(inputs, lines, ("c", "d", "e", "f"), "0")
    (failure,) = (f for f in fuzz.failures(program, Counter()) if f.name == "wrong")
    text = str(fuzz.shrunk(failure))
    names = {}
    exec(text, names)
    assert list(fuzz.shrunk(failure).program.lines.values()) == ["np.cos(a + 4)"]
    assert text.startswith("# seed '0', wrong: tests.fuzz.checks.Finding: result 0 is")
    assert len(names["f"](names["a"])) == 1


def test_the_same_seed_is_the_same_program():
    one, two = (programs.drawn("some seed") for _ in range(2))
    assert (one, one.arguments(), one.arguments(1)) == (two, two.arguments(), two.arguments(1))


@each("layout", programs.LAYOUTS)
@each("dtype", programs.DTYPES)
def test_arguments_have_their_dtypes_and_layouts(dtype, layout):
    (x,) = programs.evaluated(programs.Program({"a": programs.Input(dtype, (2, 3), layout)}, {}, (), "0").arguments())
    assert (x.dtype.newbyteorder("="), x.shape) == (np.dtype(dtype), (2, 3))
    assert x.flags.writeable == (layout not in ("read-only", "stride 0"))
    assert x.flags.c_contiguous == (layout in ("C", "read-only", "unaligned", "big-endian"))
    assert x.flags.aligned == (layout != "unaligned" or x.itemsize == 1)
    assert x.dtype.isnative == (layout != "big-endian" or x.itemsize == 1)
