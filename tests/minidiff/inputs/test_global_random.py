"""Functions that draw from NumPy's global generator, where what they draw is a constant or differs between ranks."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

import minidiff as md
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

DRAWS = [
    lambda: np.random.rand(),
    lambda: np.random.normal(size=3)[0],
    lambda: float(np.random.randint(10)),
    lambda: float(np.random.permutation(4)[0]),
    lambda: float(np.random.seed(0) is None),
]
QUIET = [lambda: 1.0, lambda: np.random.default_rng(0).normal(), lambda: np.random.RandomState(0).normal()]


def on_ranks(f):
    return mapped(f, mesh(2), P("i"), P("i"))


#: By the name that the warning begins with.
RECORDED = {
    "jit": md.jit,
    "make_tape": md.make_tape,
    "jit of grad": lambda f: md.jit(md.grad(lambda x: np.sum(f(x)))),
    "scan in jit": lambda f: md.jit(lambda x: md.scan(lambda c, _: (f(c), None), x, None, length=2)[0]),
    "shard_map": on_ranks,
    "shard_map in jit": lambda f: md.jit(on_ranks(f)),
    "shard_map in grad": lambda f: md.grad(lambda x: np.sum(on_ranks(f)(x))),
}


def warned(call):
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in actual]


@each("how", RECORDED)
@each("draw", DRAWS)
def test_drawing_is_warned_of_once(how, draw):
    np.random.seed(7)
    f, x = RECORDED[how](lambda x: x * draw()), np.ones(4)
    (text,) = warned(lambda: f(x))
    why = "differ" if how.startswith("shard_map") else "is a constant of the program"
    assert text.startswith(how.split()[0]) and why in text
    if how.startswith("jit"):
        assert not warned(lambda: f(x))  # it has been recorded


@each("how", RECORDED)
@each("draw", QUIET)
def test_generators_of_ones_own_are_not(how, draw):
    assert not warned(lambda: RECORDED[how](lambda x: x * draw())(np.ones(4)))


def test_a_function_that_runs_each_time_is_not():
    assert not warned(lambda: md.grad(lambda x: x * np.random.rand())(1.0))


@pytest.mark.parametrize("label, count", [("1", 0), ("np.random.default_rng(0).normal()", 0), ("np.random.rand()", 1)])
def test_in_a_process_that_has_not_loaded_numpys_module(label, count):
    """Then it is loaded only by a function that uses it."""
    lines = (
        "import sys, warnings, minidiff as md, numpy as np",
        "with warnings.catch_warnings(record=True) as caught:",
        "    warnings.simplefilter('always')",
        f"    md.make_tape(lambda x: x * {label})(1.0)",
        f"assert len(caught) == {count}, caught",
        f"assert ('numpy.random' in sys.modules) == {'random' in label}",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@each("kind", [np.random.PCG64, np.random.MT19937])
def test_another_global_generator(kind):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(kind(0))
    try:
        assert len(warned(lambda: md.jit(lambda x: x * np.random.rand())(1.0))) == 1
        assert not warned(lambda: md.jit(lambda x: x * 2.0)(1.0))
    finally:
        np.random.set_bit_generator(before)


def test_the_line_is_the_users_and_speaks_once():
    """Each warning is shown once for its line, Python's default."""
    f = on_ranks(lambda x: x * np.random.rand())
    with warnings.catch_warnings(record=True) as actual:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        exec(compile("for _ in range(3):\n    f(x)\n", "program of a user.py", "exec"), {"f": f, "x": np.ones(2)})
    assert [(w.filename, w.lineno) for w in actual] == [("program of a user.py", 2)]
