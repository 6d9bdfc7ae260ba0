"""Runs tests against one mutant after another, in copies of the checkout."""

import contextlib
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.mutants.reach import Reach, on_ranks, test_id
from tests.mutants.table import ROOT, Mutant, Result

IGNORED = shutil.ignore_patterns(".git", ".venv*", "build", "_build", ".hypothesis")
PYTEST = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout-method=signal"]
FIRST, MOST = 12, 80  # tests that are asked before the module's own ones, and at most: what they import takes time, too
PER_TEST, PER_RUN = 60, 80  # seconds


class Runner:
    """Tries mutants in copies of the checkout, one for each worker; the test that killed one before is asked first."""

    def __init__(self, reach: Reach, before: dict[str, Result], with_ranks: bool, nearest: bool):
        self.reach, self.before, self.with_ranks, self.nearest = reach, before, with_ranks, nearest
        self.trees: queue.Queue[pathlib.Path] = queue.Queue()

    def run(self, mutants: list[Mutant], workers: int) -> Iterator[Result]:
        """Yield the results of mutants as they come."""
        with contextlib.ExitStack() as stack:
            for _ in range(workers):
                self.trees.put(stack.enter_context(copy_of_checkout()))
            pool = stack.enter_context(ThreadPoolExecutor(workers))
            futures = [pool.submit(self._result, mutant) for mutant in mutants]
            yield from (future.result() for future in as_completed(futures))

    def _result(self, mutant: Mutant) -> Result:
        """Try a mutant in a copy of the checkout, which then is as before."""
        place = mutant.place(ROOT)
        if place is None:
            return Result(mutant.id, "gone")
        tree = self.trees.get()
        path = tree / mutant.file
        source, times = path.read_text(), path.stat()
        path.write_text(place.replaced(source, mutant.change.split(" → ")[1]))
        # A time of its own, or Python would read what it compiled of another mutant.
        os.utime(path, (times.st_atime, times.st_mtime + 1 + int(mutant.id)))
        try:
            return self._ask(mutant, self.reach.tests(mutant.file, place), tree)
        finally:
            path.write_text(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            self.trees.put(tree)

    def _ask(self, mutant: Mutant, reaching: list[str], tree: pathlib.Path) -> Result:
        """Ask the former killer, tests that reach the place, the module's examples and tests, and those on ranks."""
        path = pathlib.Path(mutant.file)
        near = [f"tests/{path.with_name(f'test_{path.name}')}", *[f"tests/{path.parent}"] * (len(reaching) < FIRST)]
        # The examples of collectives take their names from the test that runs them.
        examples = (
            "tests/house/test_docs.py::test_examples_of_collectives" if path.parts[0] == "collectives" else mutant.file
        )
        near = [examples, *[name for name in near if (tree / name).exists()][:1]]
        near.append("tests/messages")
        killer = self.before[mutant.id].killer if mutant.id in self.before else ""
        file, _, name = killer.partition("::")
        former = [killer] if (tree / file).is_file() and not name.startswith("test_") else [test_id(file, name)]
        former = [test for test in former if test]
        runs = [[test for test in former if not needs_ranks(test)], reaching[:FIRST]]
        runs = [tests for tests in runs if tests]
        runs += [reaching[FIRST:MOST] + near] * (not (runs and self.nearest))
        if self.with_ranks:
            runs += [[file] for file in dict.fromkeys([*former, *on_ranks(mutant.file)]) if needs_ranks(file)]
        asked = 0
        for tests in runs:
            status, more, failed = outcome(tests, tree)
            asked += more
            if status != "survived":
                break
        return Result(mutant.id, status, str(asked), *failed[:1])


def needs_ranks(test: str) -> bool:
    """Return whether a test must be launched on ranks; those of faults launch them."""
    return "/mpi/" in test and "/test_faults_mpi" not in test


@contextlib.contextmanager
def copy_of_checkout() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = pathlib.Path(shutil.copytree(ROOT, f"{folder}/tree", ignore=IGNORED))
        (tree / ".cache").mkdir(mode=0o700)
        yield tree


def outcome(tests: list[str], tree: pathlib.Path, most: int = 1) -> tuple[str, int, list[str]]:
    """Run tests until `most` fail; return killed, survived or timeout, how many tests ran, and which failed.

    Slow tests run only if they are asked for by name.
    """
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MINIDIFF_CACHE": str(tree / ".cache")}
    command = [sys.executable, "-m", "pytest"]
    if needs_ranks(tests[0]):
        command = ["mpiexec", "-n", "2", sys.executable, "-m", "tests.run_on_ranks", "2", "1"]
    command += [
        *PYTEST,
        *["--fast"] * (len(tests) > 1 or "::" not in tests[0]),
        f"--maxfail={most}",
        f"--timeout={PER_TEST}",
        f"--session-timeout={PER_RUN * most}",
        *tests,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=tree, env=env, text=True, start_new_session=True, **pipes) as process:
        try:
            output = process.communicate(timeout=3 * PER_RUN * most)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # so that a launcher ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return "timeout", 0, tests[:1]
    asked = sum(int(n) for n in re.findall(r"(\d+) (?:passed|failed|error)", output))
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?( - .*)?$", output, re.MULTILINE)
    if failed:
        return "timeout" if "Timeout (>" in failed[0][1] else "killed", asked, [name for name, _ in failed]
    is_alive = process.returncode in (0, 5) or "session-timeout:" in output
    return ("survived", asked, []) if is_alive else ("killed", asked, tests[:1])


def failing(tests: Iterable[str]) -> list[str]:
    """Return those of the tests, but for those on MPI ranks, that fail without a mutant, and so say nothing."""
    alone = sorted({test for test in tests if not needs_ranks(test)})
    with copy_of_checkout() as tree:
        return sorted(set(outcome(alone, tree, len(alone))[2])) if alone else []
