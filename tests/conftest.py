"""Settings of all tests: every tape is checked, the order may be random, and one rank prints for all."""

import gc
import io
import os
import pathlib
import random
import signal
import sys

import hypothesis
import numpy
import pytest
from mpi4py import MPI

pytest_plugins = ["tests.checks.tapes"]
_HERE = pathlib.Path(__file__).parent
collect_ignore = [  # they need mpmath, and are run by hand
    f"minidiff/scipy/make_{kind}_derivatives.py" for kind in ("shape", "special")
]


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


# ---------------------------------------------------------------- options, and the order of the tests


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order, drawn from a seed")
    parser.addoption("--fast", action="store_true", help="leave out the tests that tests/slow.txt lists")
    parser.addoption("--slow", action="store_true", help="run only the tests that tests/slow.txt lists")
    parser.addoption("--update", action="store_true", help="write the golden texts of tests/golden as they are now")
    parser.addoption("--site", metavar="FOLDER", help="test the site that is built there, in Chromium (tests/site)")


#: Files whose tests wait, or take long. They come first, so that no worker is left with them at the end.
LONG = ("test_notebooks", "test_faults_mpi", "test_notebook", "test_rank_tables", "test_as_python", "test_decoder")
LONG += ("test_benchmarks", "test_launch", "test_saving", "test_examples", "test_install", "test_bugs", "test_gpt")


def pytest_collection_modifyitems(config, items):
    """No test may need another one to have run before it: the order may be random."""
    expect_copies(items)
    if config.getoption("fast") or config.getoption("slow"):
        select(config, items, slow=config.getoption("slow"))
    if (seed := config.getoption("shuffle")) is not None:
        random.Random(seed).shuffle(items)
    elif config.pluginmanager.hasplugin("dsession") or hasattr(config, "workerinput"):
        items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def select(config, items, slow):
    """Keep the tests that `slow.txt` names, case by case or by a test's name, or all others; deselect the rest."""
    names = {*(_HERE / "slow.txt").read_text().splitlines()}
    is_slow = {item: bool(names & {item.nodeid, item.nodeid.partition("[")[0]}) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if is_slow[item] != slow])
    items[:] = [item for item in items if is_slow[item] == slow]


# ---------------------------------------------------------------- copies of a result

_PROGRAMS = tuple(_HERE / "spmd" / name for name in ("examples", "parallel"))


def expect_copies(items):
    """Tests look at what each rank has, sum values that are the same, and draw the same numbers to compare them.

    Programs, and pages, say what they mean.
    """
    text = ".*, one after another|psum of a value that is already the same on all ranks"
    copies = pytest.mark.filterwarnings(f"ignore:({text}):minidiff.errors.VarianceWarning")
    for item in items:
        if _HERE in item.path.parents and not any(folder in item.path.parents for folder in _PROGRAMS):
            item.add_marker(copies)
            item.add_marker(pytest.mark.filterwarnings("ignore::minidiff.errors.KeyReuseWarning"))


# ---------------------------------------------------------------- golden texts


@pytest.fixture
def golden(request):
    """Compare a text, as a report or a drawing, with `tests/golden/<name>.txt`; with `--update`, write it there."""

    def check(name, text):
        path = _HERE / "golden" / f"{name}.txt"
        if request.config.getoption("update"):
            path.write_text(f"{text}\n")
        assert f"{text}\n" == path.read_text(), f"{path} differs: pytest --update writes it, if the change is meant"

    return check


# ---------------------------------------------------------------- garbage collection


def pytest_collection_finish(session):
    """Exclude from garbage collection what was imported and collected: it stays, and each collection would visit it.

    Collections are rarer than by default, because a test's tapes are thousands of objects that are still in use.
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
