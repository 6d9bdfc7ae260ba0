"""Random NumPy programs under every transformation, for some seconds; for longer, `python -m tests.fuzz`."""

import os
import time
from collections import Counter

import numpy as np
import pytest

from tests import fuzz
from tests.samples import each

#: As Hypothesis does it: where a change is judged (CI), the same programs each time; else new ones.
SEED = "CI" if os.environ.get("CI") else str(time.time_ns())


@pytest.mark.parametrize("part", range(8))
def test_random_programs_are_what_numpy_makes_of_them(part):
    for found in fuzz.fuzz((f"{SEED}/{part}/{k}" for k in range(12)), Counter()):
        pytest.fail(str(fuzz.shrunk(found[0])), pytrace=False)


def wrong(f):
    """Forgets the sign of cosines."""
    return lambda *args: [np.abs(x) if "cos" in f.__doc__ else x for x in f(*args)]


def test_what_is_wrong_is_found_and_printed_as_a_script(monkeypatch):
    def described(program, *args):
        f = function(program, *args)
        f.__doc__ = program.source()
        return f

    function = fuzz.Program.function
    monkeypatch.setattr(fuzz.Program, "function", described)
    monkeypatch.setattr(fuzz, "WAYS", {"wrong": wrong})
    inputs = {"a": fuzz.Input("float64", (3,), "strided"), "b": fuzz.Input("int8", (), "C")}
    lines = {"c": "np.negative(a)", "d": "np.exp(b)", "e": "np.cos(a + 4)", "f": "np.tan(e)"}
    program = fuzz.Program(inputs, lines, ("c", "d", "e", "f"), "0")
    (failure,) = (f for f in fuzz.failures(program, Counter()) if f.name == "wrong")
    text = str(fuzz.shrunk(failure))
    names = {}
    exec(text, names)
    assert list(fuzz.shrunk(failure).program.lines.values()) == ["np.cos(a + 4)"]
    assert text.startswith("# seed '0', wrong: tests.fuzz.Finding: result 0 is")
    assert len(names["f"](names["a"])) == 1


def test_the_same_seed_is_the_same_program():
    one, two = (fuzz.drawn("some seed") for _ in range(2))
    assert (one, one.arguments(), one.arguments(1)) == (two, two.arguments(), two.arguments(1))


@each("layout", fuzz.LAYOUTS)
@each("dtype", fuzz.DTYPES)
def test_arguments_have_their_dtypes_and_layouts(dtype, layout):
    (x,) = fuzz.evaluated(fuzz.Program({"a": fuzz.Input(dtype, (2, 3), layout)}, {}, (), "0").arguments())
    assert (x.dtype.newbyteorder("="), x.shape) == (np.dtype(dtype), (2, 3))
    assert x.flags.writeable == (layout not in ("read-only", "stride 0"))
    assert x.flags.c_contiguous == (layout in ("C", "read-only", "unaligned", "big-endian"))
    assert x.flags.aligned == (layout != "unaligned" or x.itemsize == 1)
    assert x.dtype.isnative == (layout != "big-endian" or x.itemsize == 1)
