"""The fault matrix, `faults.md`: what goes wrong on some ranks, and what becomes of the job.

Each program ends with the lines and the exit code that stand there, though other ranks would go on for an hour; or it
goes on, where it must. Most of its time is waiting, so a test runs some of one kind at a time. Those marked `slow` (the
watchdog at its usual pace, long computations, thousands of meshes) run by hand:

    SPMD_ALL_FAULTS=1 python -m pytest tests/mpi/test_faults_mpi.py
"""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mpi4py.MPI import Get_library_version

from spmd.mesh.launch import launcher_size
from tests.checks.launch import launching, outcome_of
from tests.checks.samples import each

pytestmark = pytest.mark.skipif(launcher_size() is not None, reason="it launches ranks itself")

PAGE = (Path(__file__).parent / "faults.md").read_text()
START = "from tests.programs.faults import *\nmesh, rank, x, total = start()\n"
ROW = re.compile(
    r"### (?P<name>.+?)(?: \((?P<options>.+)\))?\n```python\n(?P<program>(?s:.+?))```\n\n?(?P<says>(?:>.*\n)*)"
)
KINDS = {kind: [*ROW.finditer(rows + "\n")] for kind, rows in re.findall(r"## (.+)\n((?s:.+?))(?=\n## |\Z)", PAGE)}
SLOW_TOO = "SPMD_ALL_FAULTS" in os.environ
AT_ONCE = 3  # programs


def check(row, script):
    options = (row["options"] or "").split(", ")
    ranks = next((int(o[0]) for o in options if o.endswith(" ranks")), 2)
    goes_on = "goes on" in options
    ended = "print('done')\n" if goes_on and "done" not in row["program"] else ""
    script.write_text(START * ("bare" not in options) + row["program"] + ended)
    run = ["-m", "spmd", "run"] if "spmd run" in options else []
    job = launching(ranks, *run, str(script), SPMD_CHECKING="" if "compares values" in options else "0")
    if "Ctrl-C" in options:
        for _ in range(ranks):
            job.stdout.readline()
        job.send_signal(signal.SIGINT)
    out, err = outcome_of(job)
    codes = [int(o.removeprefix("exit code ")) for o in options if o.startswith("exit code ")]
    assert job.returncode in (codes or [0 if goes_on else 1]) or "any exit code" in options, err
    assert (job.returncode == 0) == goes_on, err
    assert not goes_on or (out.count("done") == ranks and (row["says"] or not err)), err
    if "Ctrl-C" not in options or "Open MPI" not in Get_library_version():  # whose launcher ends ranks itself
        check_text(re.findall("> (.*)", row["says"]), err)
    if "Ctrl-C" not in options:
        count = err.count("Traceback (most recent call last)")
        assert "any tracebacks" in options or count == int("1 traceback" in options), err
        assert not re.search(r'File ".*/(minidiff|collectives|spmd)/\w+\.py"', err), err  # but the program's own


def check_text(lines, err):
    """All lines are in what is said, the part after the last colon of those marked "once" only there."""
    assert "digest" not in err, err
    for line in lines:
        text = line.removesuffix(" (once)")
        assert re.search(re.escape(text).replace("…", ".*"), err), f"{text}\n{err}"
        assert text is line or err.count(text.rpartition("Error: ")[2]) == 1, err


@pytest.mark.parametrize("kind", KINDS)
def test_faults(kind, tmp_path):
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = {
            row["name"]: pool.submit(check, row, tmp_path / f"program{k}.py")
            for k, row in enumerate(KINDS[kind])
            if SLOW_TOO or "slow" not in (row["options"] or "")
        }
    failures = {name: error for name, result in results.items() if (error := result.exception()) is not None}
    assert not failures, "\n\n".join(f"{name}: {error!r}"[:4000] for name, error in failures.items())


def test_all_programs_are_read():
    assert sum(map(len, KINDS.values())) == PAGE.count("\n### ") == PAGE.count("\n```python")


UNDER_PYTEST = """
from tests.programs.faults import *
import pytest
mesh, rank, x, total = start()
@pytest.fixture
def nothing(): pass
def test_one(request):
    print('printed by the test')
    request.getfixturevalue(os.environ['FIXTURE'])
    if rank == 1: raise ValueError('no file')
    spmd.barrier()
def test_two(): total(x)
"""


def test_a_deadlock_under_pytest(tmp_path):
    """The watchdog's text is not lost in what pytest captures, and follows what the test has printed."""
    (tmp_path / "test_program.py").write_text(UNDER_PYTEST)

    def run(options, fixture):
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(tmp_path / "test_program.py")]
        return outcome_of(launching(2, *command, FIXTURE=fixture))

    ways = [(("-s",), "nothing"), (("--capture=sys",), "nothing"), ((), "capfd")]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for way, (out, err) in zip(ways, pool.map(lambda way: run(*way), ways)):
            assert re.search(r"\[rank 0\] .* for others that never arrive:", err), (way, out, err)
            assert re.search(r"\[rank 0\]   rank 0 .*spmd\.barrier\(\)", err), (way, err)
            assert "printed by the test" in out, (way, out, err)


INTERRUPTED = """
from tests.programs.faults import *
mesh, rank, x, total = start()
def body(x):
    one, two = psum((x, x), "i")
    return one + psum(x * 2, "i") + two + ppermute(x, "i", [(0, 1), (1, 0)])
f, left = on(mesh, body), 40
if {compiled}:
    f = md.jit(f)
    for n in range(1, 41): f(np.ones(SIZE * n))
def interrupt():
    for _ in range(left):
        time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)
if {interrupted}: threading.Thread(target=interrupt, daemon=True).start()
n = 0
while n < 300:
    try:
        while n < 300:
            n += 1
            f(np.ones(SIZE * (1 + n % 40)))
    except KeyboardInterrupt:
        pass
"""


@each("interrupted", ["rank", "True"], ids=["one rank", "all ranks"])
@each("compiled", [False, True], ids=["eager", "compiled"])
def test_many_interrupts_that_a_program_catches(interrupted, compiled, tmp_path):
    """The job ends, whatever they interrupt, and what it says is text."""
    (tmp_path / "program.py").write_text(INTERRUPTED.format(compiled=compiled, interrupted=interrupted))
    _, err = outcome_of(launching(2, str(tmp_path / "program.py"), SPMD_CHECKING="0"), timeout=60)
    message = err.replace("-\n\0", "-\n")  # a page of Open MPI's launcher ends so
    assert all(c.isprintable() or c == "\n" for c in message), err
    assert "Error in" not in err, err
