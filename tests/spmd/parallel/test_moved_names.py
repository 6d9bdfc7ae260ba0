"""The names that `spmd.parallel` had before they moved: they work, and warn."""

import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

import spmd
from spmd import parallel

PAGE = Path(__file__).parents[3] / "docs" / "changes" / "0.1.0.md"


def test_the_page_of_changes_has_the_names_that_moved_with_their_places():
    page = PAGE.read_text()
    tables = {"spmd.examples.": r"new place, in `spmd\.examples`", "": "new place"}
    actual = {}
    for prefix, head in tables.items():
        (rows,) = re.findall(
            rf"^  \| old name, in `spmd\.parallel` \| {head} \|\n  \|---\|---\|\n((?:  \|.*\n)+)",
            page,
            re.M,
        )
        for old, new in re.findall(r"^  \| (.*) \| `([\w.]+)`.*\|$", rows, re.M):
            actual |= {name: f"{prefix}{new}.{name}" for name in re.findall(r"`(\w+)`", old)}
    assert {name: path for name, path in actual.items() if name not in parallel._OPTIONS} == parallel._MOVED
    assert not {*actual} & {*parallel.__all__} and len(parallel.__all__) <= 47


#: Where each old name is, or the call that it is now.
OLD = {(parallel, name): path for name, path in (parallel._MOVED | parallel._OPTIONS | parallel._MODULES).items()}
OLD[spmd, "list_schedule"] = "spmd.examples.placement.list_schedule"


def test_old_names_work_and_warn():
    for (package, name), path in OLD.items():
        vars(package).pop(name, None)
        expected = f"{package.__name__}.{name} is now {path}"
        with pytest.warns(DeprecationWarning, match=f"^{re.escape(expected)}$") as caught:
            old = getattr(package, name)
        assert caught[0].filename == __file__
        module, _, attribute = path.partition("(")[0].rpartition(".")
        new = getattr(importlib.import_module(module), attribute)
        if isinstance(old, functools.partial):
            assert old.func is new and {*old.keywords} <= {*inspect.signature(new).parameters}
        else:
            assert old is new
    with pytest.warns(DeprecationWarning, match=r"^spmd.parallel.matmul.matmul_all_gather_overlapped is now "):
        from spmd.parallel.matmul import matmul_all_gather_overlapped
    assert matmul_all_gather_overlapped.keywords == {"directions": 1}
