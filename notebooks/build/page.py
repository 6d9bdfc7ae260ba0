"""Helpers of the pages of "Build it yourself". It has no solutions: read it if you like."""

import queue
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `exercises` and `engines`

#: The files that the pages write, in order, and the page of each.
FILES = {
    "tracer": 1,
    "operations": 1,
    "tape": 2,
    "forward": 3,
    "reverse": 4,
    "ranks": 5,
    "variance": 6,
    "shard_map": 7,
    "ring": 8,
    "mpi": 8,
    "network": 8,
}
_EMPTY = re.compile(
    r"^ *# HOLE (\d+\.\d+) [^\n]*\n(?: *#(?! END)[^\n]*\n)*(?P<raises> *raise NotImplementedError[^\n]*\n)? *# END",
    re.M,
)
MINE = Path("mine")
_page = 0  # the one that has been started last


def check(*answers: Any) -> Callable[[Callable], None]:
    """The `check` of all notebooks, which says of a failure, too, which holes of tables are empty still."""
    import exercises

    def run(test: Callable) -> None:
        written_here = [name for name, page in FILES.items() if page == _page]
        verdict = exercises.judge(_in_words(test), answers, written_here)
        tables = [m[1] for source in _files(range(1, _page + 1)) for m in _EMPTY.finditer(source) if not m["raises"]]
        if tables and verdict.text.startswith("not yet"):
            so_far = verdict.text.removeprefix("not yet: ")
            verdict = exercises.Verdict("your turn", f"still empty: {_listed(tables)}. So far: {so_far}")
        exercises.display(verdict)
        if holes := [hole for source in _files([_page]) for hole in unfilled(source)]:
            print(f"Empty still, on this page: {_listed(holes)}")

    return run


def _files(pages: Sequence[int]) -> list[str]:
    """Return the contents of these pages' files, as far as they are written."""
    paths = [MINE / f"{name}.py" for name, page in FILES.items() if page in pages]
    return [path.read_text() for path in paths if path.exists()]


def _listed(holes: Sequence[str]) -> str:
    return ", ".join(f"hole {hole}" for hole in holes)


def _in_words(test: Callable) -> Callable:
    """A test that says what two frequent errors mean."""

    def run(*answers: Any) -> None:
        try:
            test(*answers)
        except (KeyError, TypeError) as error:
            if "does not support ufuncs" in str(error):
                why = "NumPy was given a tracer, which an interpreter other than `Evaluate` should process"
            elif isinstance(error, KeyError) and type(error.args[0]).__name__ == "Operation":
                why = f"a table has no line for `{error}` yet"
            else:
                raise
            raise AssertionError(why).with_traceback(error.__traceback__) from None

    return run


def last_line(stderr: str) -> str:
    """The last line of the student's files that a traceback names."""
    lines = re.findall(r'(mine.\w+\.py)", line (\d+), in .*\n *(.*)', stderr)
    return "\n{}, line {}: {}".format(*lines[-1]) if lines else ""


def unfilled(source: str) -> list[str]:
    """The numbers of the holes in which nothing has been written yet.

    >>> unfilled("x = [\\n    # HOLE 3.5 [1 point]\\n    # Some numbers.\\n    # END\\n]")
    ['3.5']
    >>> unfilled("x = [\\n    # HOLE 3.5 [1 point]\\n    # Some numbers.\\n    1, 2,\\n    # END\\n]")
    []
    """
    return [match[1] for match in _EMPTY.finditer(source)]


def start(page: int) -> None:
    """Begin a page: say what of earlier ones is missing, and read their files anew."""
    global _page
    _page = page
    MINE.mkdir(exist_ok=True)
    fresh()
    for name, written in FILES.items():
        path = MINE / f"{name}.py"
        if written < page and not path.exists():
            print(f"{path} is missing: page {written} writes it. Run the cells of that page first.")
        elif written < page and (holes := unfilled(path.read_text())):
            print(f"{path}: not filled yet, and this page may need it: {_listed(holes)}.")


def fresh() -> None:
    """Forget the modules of `mine`, so that the next import reads them as the cells have written them."""
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def ring_of(size: int, collective: Callable, blocks: Sequence[np.ndarray]) -> tuple[list[Any], list[int]]:
    """Run collective(block, shift, rank, size) on a ring of threads: each one's result, and the bytes that it sent."""
    links: list[queue.Queue] = [queue.Queue() for _ in range(size)]
    results: list[Any] = [None] * size
    sent = [0] * size

    def rank_runs(rank: int) -> None:
        def shift(x: np.ndarray) -> np.ndarray:
            sent[rank] += np.asarray(x).nbytes
            links[(rank + 1) % size].put(np.copy(x))
            try:
                return links[rank].get(timeout=2)
            except queue.Empty:
                before = (rank - 1) % size
                raise AssertionError(f"rank {rank} waits for a message that rank {before} does not send") from None

        try:
            results[rank] = collective(blocks[rank], shift, rank, size)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results, sent
