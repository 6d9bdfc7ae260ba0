"""Every operation has a cost; `work.md` shows closed forms."""

import importlib
import pkgutil

import collectives
import minidiff as md
import spmd
from minidiff.core.primitive import Primitive
from spmd.prices.work import cost_rule


def all_operations():
    """All operations that modules of the three packages hold, also in their functions, tables and tuples."""
    actual = {}
    for package in (md, collectives, spmd):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "__main__" not in module.name and "examples" not in module.name:
                for value in vars(importlib.import_module(module.name)).values():
                    inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else []
                    several = [value, getattr(value, "primitive", None), *inside]
                    actual.update((id(x), x) for x in several if isinstance(x, Primitive))
    return [*actual.values()]


def test_every_operation_has_a_cost_or_bodies():
    """Derivatives on linear tapes are no operations of programs: they expand when they are applied."""
    actual = [p for p in all_operations() if not p.is_higher_order and type(p).__name__ != "Differential"]
    assert len(actual) > 150
    for primitive in actual:
        assert callable(cost_rule(primitive))


def test_names_in_the_walk_are_those_of_operations():
    """An operation that is renamed is renamed there, too."""
    views = {"gather", "slice", "recompute", "name", "schedule", "axis_index", "pbroadcast"}
    assert {*views, "convert", "add", "matmul", "einsum"} <= {p.name for p in all_operations()}
