"""Feedback on exercises: `check`, in the cell below each."""

import html
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from IPython.display import display

#: What is shown of each verdict: its color, and what stands in front of it.
_LOOKS = {"your turn": ("#6b6b6b", "✎"), "right": ("#1a7f37", "✓"), "not yet": ("#b35900", "✗")}


class Verdict:
    """The checker's verdict on an answer: "your turn", "right", or "not yet" and why."""

    def __init__(self, verdict: str, why: str = ""):
        self.text = f"{verdict}: {why}" if why else verdict
        self.looks = _LOOKS[verdict]

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        color, sign = self.looks
        style = f"border-left:4px solid {color};padding:.2em .8em;margin:0;white-space:pre-wrap"
        return f'<pre style="{style}"><b style="color:{color}">{sign}</b> {html.escape(self.text)}</pre>'


def check(*answers: Any) -> Callable[[Callable], None]:
    """Decorate a function of the answers that asserts what is true of right ones: it runs at once, and a verdict shows.

    An answer that is `...`, or raises NotImplementedError, is none yet. Nothing is raised, whatever an answer does.

    >>> def slope(f, x):
    ...     return (f(x + 1e-6) - f(x)) / 1e-6
    >>> @check(slope)
    ... def _(slope):
    ...     for x in (1.0, 2.0):
    ...         assert abs(slope(lambda x: x * x, x) - 3 * x) < 1e-3, f"not {3 * x} at x = {x}"
    not yet: not 3.0 at x = 1.0
    >>> @check(...)
    ... def _(answer):
    ...     assert answer == 42
    your turn
    """

    def run(test: Callable) -> None:
        display(judge(test, answers))

    return run


def judge(test: Callable, answers: tuple, files: Collection[str] = ()) -> Verdict:
    """Run the test of the answers and return its verdict. An error is looked for in these files of `mine` first."""
    if any(answer is ... for answer in answers):
        return Verdict("your turn")
    try:
        test(*answers)
    except NotImplementedError as error:
        return Verdict("your turn", str(error).removeprefix("your turn"))
    except AssertionError as error:
        why = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or ""
        return Verdict("not yet", f"{why}{_where(error, files)}")
    except (Exception, SystemExit) as error:
        return Verdict("not yet", f"{type(error).__name__}: {error}{_where(error, files)}")
    return Verdict("right")


def _where(error: BaseException, files: Collection[str]) -> str:
    """The line of the student's own files, in the folder `mine`, that the error passed last."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent.name == "mine"]
    frames = [f for f in frames if Path(f.filename).stem in files] or frames
    return f"\nmine/{Path(frames[-1].filename).name}, {frames[-1].name}: {frames[-1].line}" if frames else ""
