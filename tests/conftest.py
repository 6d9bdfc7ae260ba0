"""What holds for all tests: every tape that is made is checked, and of ranks that say the same, one speaks."""

import functools
import gc
import io
import itertools
import os
import pathlib
import random
import signal
import sys
import threading
import weakref

import hypothesis
import numpy
import pytest
from mpi4py import MPI

import minidiff
import spmd  # noqa: F401  (whoever takes tapes from elsewhere is loaded here: he is to take watched ones)
from minidiff import transposition
from minidiff.compiler import simplify as optimize
from minidiff.core import reverse
from minidiff.core.interpreter import current_interpreter, current_scope
from minidiff.core.scope import Scope
from minidiff.core.vmap import named_axes
from minidiff.diagnostics import typecheck
from minidiff.transforms import recording

# ---------------------------------------------------------------- tapes are checked

_made = itertools.count()  # all ranks make the same tapes: each checks its share of them
_checked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # bodies, and how: they are parts of many tapes
_here = threading.local()  # `watches`, while a thread checks what it has made; a test's own checks are whole
_check_tape = typecheck.check_tape


def _check_body(body, typed, scope):
    how = typed, scope and (tuple(scope.axes.items()), scope.typed, scope.explicit, scope.checks)
    if not getattr(_here, "watches", False) or _checked.get(body) != how:
        _check_tape(body, typed, scope)
        _checked[body] = how


typecheck.check_tape = _check_body


def _watched(make, tape_of):
    """`make`, with a check of the tape that is in its result, and of the bodies on that."""

    @functools.wraps(make)
    def checking(*args, **kwargs):
        result = make(*args, **kwargs)
        if next(_made) % MPI.COMM_WORLD.size != MPI.COMM_WORLD.rank:
            return result
        scopes = [x for x in [*args, *kwargs.values(), current_scope()] if isinstance(x, Scope)]
        typed = not scopes or scopes[0].typed
        _here.watches = True
        try:
            tape_of(result).check(typed and not named_axes(current_interpreter()))  # the axes of a vmap have no types
        finally:
            _here.watches = False
        return result

    return checking


#: The functions that tapes come from: where they are, and where in the result the tape is.
WATCHED = [
    (recording, "stage_flat", lambda result: result[0]),
    (reverse.engine, "linearize_flat", lambda result: result[1]),
    (transposition, "transpose", lambda result: result),
    (optimize, "optimize", lambda result: result),
]
minidiff.grad(lambda x: x)(1.0)  # loads the functions of `minidiff.fast`
for _module, _name, _tape_of in WATCHED:
    _make = getattr(_module, _name)
    _others = [m for name, m in sys.modules.items() if name.split(".")[0] in ("minidiff", "spmd", "collectives")]
    for _other in [_module, *_others]:
        if vars(_other).get(_name) is _make or _other is _module:
            setattr(_other, _name, _watched(_make, _tape_of))


# ---------------------------------------------------------------- NumPy's warnings


@pytest.fixture(autouse=True)
def _numbers_warn():
    """NumPy warns as by default, also after a test that interrupted a `numpy.errstate` on its way out."""
    numpy.seterr(divide="warn", over="warn", under="ignore", invalid="warn")


# ---------------------------------------------------------------- hypothesis

# It does not mind how long examples take, which is the machine's business. What `CI=true` sets otherwise stays.
hypothesis.settings.register_profile(
    "any machine",
    hypothesis.settings(derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]),
)
hypothesis.settings.load_profile("any machine")


# ---------------------------------------------------------------- the terminal

# Help is broken into lines as wide as the terminal. Tests look for lines of the usual width, whatever they run in.
os.environ["COLUMNS"] = "80"


# ---------------------------------------------------------------- Ctrl-C

# A shell that starts a command in the background has it ignore Ctrl-C, and all that the command starts. Tests that
# interrupt what they start need the usual meaning of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# ---------------------------------------------------------------- the order of the tests


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order, drawn from a seed")


def pytest_collection_modifyitems(config, items):
    """No test may need another one to have run before it: the order may be random."""
    expect_copies(items)
    if (seed := config.getoption("shuffle")) is not None:
        random.Random(seed).shuffle(items)


# ---------------------------------------------------------------- copies of a result

_HERE = pathlib.Path(__file__).parent
_PROGRAMS = tuple(_HERE / "spmd" / name for name in ("examples", "parallel"))


def expect_copies(items):
    """Tests name all axes in out_specs to look at what each rank has. Programs, and pages, must say what they mean."""
    copies = pytest.mark.filterwarnings("ignore:.*, one after another:minidiff.diagnostics.errors.VarianceWarning")
    for item in items:
        if _HERE in item.path.parents and not any(folder in item.path.parents for folder in _PROGRAMS):
            item.add_marker(copies)


# ---------------------------------------------------------------- garbage collection


def pytest_collection_finish(session):
    """Leave what was imported and collected, which stays, to no garbage collection: each would go through all of it.

    Those of what tests make are rarer than by default, for a tape is thousands of objects that are no garbage.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


# ---------------------------------------------------------------- under mpiexec, every rank runs pytest


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if MPI.COMM_WORLD.rank:
        config.pluginmanager.getplugin("terminalreporter")._tw._file = io.StringIO()


def pytest_unconfigure(config):
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if MPI.COMM_WORLD.rank and reporter.stats.keys() & {"failed", "error"}:
        sys.stderr.write(f"on rank {MPI.COMM_WORLD.rank}:\n{reporter._tw._file.getvalue()}\n")
