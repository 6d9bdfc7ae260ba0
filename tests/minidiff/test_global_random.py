"""Functions that draw from NumPy's global generator, where what they draw is a constant or differs between ranks."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

import minidiff as md
import spmd
from spmd import P

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")
DRAWS = {
    "rand": lambda: np.random.rand(),
    "normal": lambda: np.random.normal(size=3)[0],
    "integers": lambda: float(np.random.randint(10)),
    "permutation": lambda: float(np.random.permutation(4)[0]),
    "seed": lambda: float(np.random.seed(0) is None),
}
QUIET = {
    "nothing": lambda: 1.0,
    "a generator of one's own": lambda: np.random.default_rng(0).normal(),
    "an old one of one's own": lambda: np.random.RandomState(0).normal(),
}


def mapped(f):
    return spmd.shard_map(f, mesh=MESH, in_specs=P("i"), out_specs=P("i"))


RECORDED = {
    "jit": md.jit,
    "make_tape": md.make_tape,
    "jit of grad": lambda f: md.jit(md.grad(lambda x: np.sum(f(x)))),
    "a loop in jit": lambda f: md.jit(lambda x: md.scan(lambda c, _: (f(c), None), x, None, length=2)[0]),
    "shard_map": mapped,
    "jit of shard_map": lambda f: md.jit(mapped(f)),
    "grad of shard_map": lambda f: md.grad(lambda x: np.sum(mapped(f)(x))),
}


def warned(call):
    """The warnings of a call, by the line that they are in."""
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        call()
    return [(w.filename, str(w.message)) for w in actual]


@pytest.mark.parametrize("how", RECORDED)
@pytest.mark.parametrize("label", DRAWS)
def test_what_draws_is_warned_of_once(how, label):
    def noisy(x):
        return x * DRAWS[label]()

    np.random.seed(7)
    f, x = RECORDED[how](noisy), np.ones(4)
    ((file, text),) = warned(lambda: f(x))
    assert file.endswith(".py")
    where = "shard_map" if "shard_map" in how else "scan" if "loop" in how else how.split()[0]
    assert text.startswith(where)
    assert "draws from NumPy's global random generator (np.random): " in text
    assert ("differ" if "shard_map" in how else "is a constant of the program") in text
    assert "np.random.default_rng(0)" in text
    if how in ("jit", "jit of grad"):
        assert warned(lambda: f(x)) == []  # it has been recorded


@pytest.mark.parametrize("how", RECORDED)
@pytest.mark.parametrize("label", QUIET)
def test_what_does_not_draw_is_not(how, label):
    assert warned(lambda: RECORDED[how](lambda x: x * QUIET[label]())(np.ones(4))) == []


@pytest.mark.parametrize("label, count", [("1", 0), ("np.random.default_rng(0).normal()", 0), ("np.random.rand()", 1)])
def test_in_a_process_that_has_not_loaded_numpys_module(label, count):
    """Then it is loaded only by a function that uses it."""
    lines = (
        "import sys, warnings, minidiff as md, numpy as np",
        "with warnings.catch_warnings(record=True) as found:",
        "    warnings.simplefilter('always')",
        f"    md.make_tape(lambda x: x * {label})(1.0)",
        f"assert len(found) == {count}, found",
        f"assert ('numpy.random' in sys.modules) == {'random' in label}",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_a_function_that_runs_each_time_is_not():
    assert warned(lambda: md.grad(lambda x: x * np.random.rand())(1.0)) == []


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937])
def test_another_global_generator(kind):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(kind(0))
    try:
        assert len(warned(lambda: md.jit(lambda x: x * np.random.rand())(1.0))) == 1
        assert warned(lambda: md.jit(lambda x: x * 2.0)(1.0)) == []
    finally:
        np.random.set_bit_generator(before)


def test_the_line_is_the_users_and_speaks_once():
    """Each warning is shown once for its line, Python's default."""
    program = (
        "import numpy as np, minidiff as md, spmd\n"
        "mesh = spmd.make_mesh((2,), ('i',), backend='simulated')\n"
        "f = spmd.shard_map(lambda x: x * np.random.rand(), mesh=mesh, in_specs=spmd.P(), out_specs=spmd.P())\n"
        "for _ in range(3):\n"
        "    f(1.0)\n"
    )
    with warnings.catch_warnings(record=True) as actual:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        exec(compile(program, "program of a user.py", "exec"), {})
    assert [(w.filename, w.lineno) for w in actual] == [("program of a user.py", 5)]
