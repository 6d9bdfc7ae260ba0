"""The names that `spmd.parallel` had before they moved: they work, and warn."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import spmd
from spmd import parallel


def test_the_page_of_changes_has_the_names_that_moved_with_their_places():
    text = (Path(__file__).parents[3] / "docs" / "changes" / "0.1.0.md").read_text()
    tables = {"spmd.examples.": r"new place, in `spmd\.examples`", "": "new place"}
    actual = {}
    for prefix, head in tables.items():
        (rows,) = re.findall(
            rf"^  \| old name, in `spmd\.parallel` \| {head} \|\n  \|---\|---\|\n((?:  \|.*\n)+)", text, re.M
        )
        for old, new in re.findall(r"^  \| (.*) \| `([\w.]+)`.*\|$", rows, re.M):
            actual |= {name: f"{prefix}{new}.{name}" for name in re.findall(r"`(\w+)`", old)}
    assert {name: path for name, path in actual.items() if name not in parallel._OPTIONS} == parallel._MOVED
    assert not {*actual} & {*parallel.__all__} and len(parallel.__all__) <= 47


@pytest.mark.parametrize("name", parallel._MOVED)
def test_old_names_work_and_warn(name):
    vars(parallel).pop(name, None)
    module, _, attribute = parallel._MOVED[name].rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"^spmd\.parallel\.{name} is now {module}\.{attribute}$") as caught:
        moved = getattr(parallel, name)
    assert moved is getattr(importlib.import_module(module), attribute)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", parallel._OPTIONS)
def test_names_that_are_options_now_work_and_warn(name):
    vars(parallel).pop(name, None)
    call = parallel._OPTIONS[name]
    module, _, function = call.partition("(")[0].rpartition(".")
    expected = f"spmd.parallel.{name} is now {call}"
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(expected)}$") as caught:
        old = getattr(parallel, name)
    assert old.func is getattr(importlib.import_module(module), function)
    assert {*old.keywords} <= {*inspect.signature(old.func).parameters}
    assert caught[0].filename == __file__


def test_old_names_of_products_work_in_their_module():
    with pytest.warns(DeprecationWarning, match=r"^spmd.parallel.matmul.matmul_all_gather_overlapped is now "):
        from spmd.parallel.matmul import matmul_all_gather_overlapped
    assert matmul_all_gather_overlapped.keywords == {"directions": 1}


def test_old_modules_work_and_warn():
    for name, path in parallel._MODULES.items():
        vars(parallel).pop(name, None)
        with pytest.warns(DeprecationWarning, match=f"^spmd.parallel.{name} is now {path}$"):
            assert getattr(parallel, name) is importlib.import_module(path)
    vars(spmd).pop("list_schedule", None)
    with pytest.warns(DeprecationWarning, match="spmd.list_schedule is now spmd.examples.placement.list_schedule"):
        from spmd import list_schedule
    assert list_schedule.__module__ == "spmd.examples.placement"
