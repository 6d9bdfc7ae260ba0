"""Every operation has a cost, and it is the closed form."""

import importlib
import math
import pkgutil

import numpy
import pytest

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.core.primitive import Primitive
from spmd.prices.work import ProductSize, cost_rule, work_of_equation


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


def test_an_operation_without_a_cost_is_refused_by_name():
    with pytest.raises(TypeError, match=r"^the operation strange has no cost: add a rule for it to .*COSTS$"):
        cost_rule(Primitive("strange"))


def work(f, *shapes, dtype="float32"):
    tape = md.make_tape(f)(*[md.ShapedArray(shape, dtype) for shape in shapes])
    works = [work_of_equation(eqn) for eqn in tape.equations]
    return sum(w.flops for w in works), sum(w.bytes for w in works), [w.product for w in works if w.product]


@pytest.mark.parametrize(
    "f, shapes, product",
    [
        (np.matmul, [(3, 4), (4, 5)], ProductSize(1, 3, 5, 4)),
        (np.matmul, [(2, 3, 4), (4, 5)], ProductSize(1, 6, 5, 4)),
        (np.matmul, [(2, 3, 4), (2, 4, 5)], ProductSize(2, 3, 5, 4)),
        (np.matmul, [(4,), (4, 5)], ProductSize(1, 1, 5, 4)),
        (np.matmul, [(4,), (4,)], ProductSize(1, 1, 1, 4)),
        (lambda x, w: np.einsum("btf,fhs->bths", x, w), [(2, 3, 4), (4, 5, 6)], ProductSize(1, 6, 30, 4)),
        (lambda q, k: np.einsum("bthd,bshd->bhts", q, k), [(2, 3, 5, 7), (2, 4, 5, 7)], ProductSize(10, 3, 4, 7)),
    ],
)
def test_products_have_two_operations_for_each_term(f, shapes, product):
    flops, nbytes, products = work(f, *shapes)
    assert (flops, products) == (2 * math.prod(product), [product])
    out = md.eval_shape(f, *[md.ShapedArray(shape, "float32") for shape in shapes])
    assert nbytes == 4 * (sum(map(math.prod, shapes)) + out.size)


@pytest.mark.parametrize(
    "f, flops, numbers",
    [
        (lambda x: x.T, 0, 0),
        (lambda x: x.reshape(-1), 0, 0),
        (np.tanh, 64 * 32, 2 * 64 * 32),
        (lambda x: x + x[0], 64 * 32, 2 * 64 * 32 + 32 + 2 * 32),
        (lambda x: np.sum(x, 0), 64 * 32, 64 * 32 + 32),
        (lambda x: x[:8], 0, 2 * 8 * 32),
        (lambda x: np.concatenate([x, x]), 0, 4 * 64 * 32),
    ],
)
def test_other_operations_read_their_operands_and_write_their_results(f, flops, numbers):
    assert work(f, (64, 32))[:2] == (flops, 4 * numbers)


@pytest.mark.parametrize("f, cubes", [(numpy.linalg.cholesky, 1 / 3), (numpy.linalg.inv, 2)])
def test_factorizations_take_a_share_of_the_cube(f, cubes):
    assert work(f, (30, 30))[0] == pytest.approx(cubes * 30**3, rel=1e-3)
