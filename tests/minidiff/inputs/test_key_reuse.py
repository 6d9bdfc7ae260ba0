"""A key that is used twice is a warning at the user's line, under every transformation; one that is used once none."""

import linecache
import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff import random
from tests.checks.samples import each
from tests.programs.key import check, reuses, transformations


@each("name", transformations("simulated"))
def test_transformations(name):
    check("simulated", name)


def test_the_warning_is_at_the_second_line_and_names_the_first():
    key = random.key(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # which shows a warning of a line once
        random.split(key)
        for _ in range(5):
            random.normal(key)  # the second line
    (warning,) = caught
    assert linecache.getline(warning.filename, warning.lineno).strip().endswith("# the second line")
    first = f"test_key_reuse.py:{warning.lineno - 2}: random.split(key)"
    assert str(warning.message).startswith(f"normal uses a key again: split used it at {first}. ")


def test_it_is_an_error_while_checking():
    key = random.key(0)
    with spmd.checking():
        random.normal(key)
        with pytest.raises(ValueError):
            random.uniform(key)
        random.uniform(random.clone(key))
    assert reuses(random.uniform, key)


def _sample(key):
    return random.normal(key)


def test_functions_that_are_called_again():
    """To measure a function, or to compare it with another, one calls it twice with one key."""
    f, g = md.jit(_sample), md.grad(lambda x, key: x * random.normal(key))
    key = random.key(0)
    assert not reuses(lambda: [f(key), f(key), md.vmap(_sample)(key[None]), g(1.0, key), g(1.0, key)])
    assert not reuses(lambda: [_sample(key), *[_sample(key) for _ in range(2)]])
    assert reuses(lambda: (lambda key: random.uniform(key))(key))
    for both in (lambda key: _sample(key) + _sample(key), lambda key: f(key) + f(key)):  # in one program
        assert reuses(md.jit(both), key) and reuses(md.grad(lambda x, both=both: x * both(key)), 1.0)


def test_a_cell_that_runs_again():
    run = lambda text, cell: eval(compile(text, cell, "eval"), names)  # noqa: E731
    names = {"random": random, "key": random.key(0)}
    assert not reuses(lambda: [run("random.normal(key)", "<cell>") for _ in range(2)])
    assert reuses(lambda: run("random.normal(key)\n", "<another cell>"))


def test_two_keys_of_one_seed_and_copies_are_keys_of_their_own():
    key = random.key(0)
    assert not reuses(lambda: [random.normal(k) for k in (key, random.key(0), key.copy(), random.clone(key))])
    assert reuses(lambda: random.normal(np.asarray(key)))  # the same array


@each("clone", [random.clone, md.jit(random.clone), md.vmap(random.clone)])
def test_clones(clone):
    keys = random.split(random.key(0), 3)
    assert (clone(keys) == keys).all() and not np.shares_memory(clone(keys), keys)


@each("more, count", [(lambda x, key: 0.0, 0), (lambda x, key: random.normal(key), 1)])
def test_branches_of_elements(more, count):
    """Under vmap both branches run, for elements of their own."""
    f = lambda x, key: md.cond(x > 0, lambda: x * random.normal(key), lambda: random.uniform(key))  # noqa: E731
    run = md.vmap(lambda x, key: f(x, key) + more(x, key), in_axes=(0, None))
    assert len(reuses(run, np.array([-1.0, 1.0]), random.key(0))) == count


@each("derivative", [md.grad, lambda f: md.jit(md.grad(f)), md.hessian])
def test_recomputation_is_no_use(derivative):
    layer = md.checkpoint(lambda x, key: np.sin(md.nn.dropout(key, x, 0.5)))
    loss = lambda x, keys: layer(layer(x, keys[0]), keys[1]).sum()  # noqa: E731
    assert not reuses(derivative(loss), np.ones(3), random.split(random.key(0)))


def test_keys_that_have_the_address_of_others_are_new():
    assert not reuses(lambda: [random.normal(random.split(random.key(0))[0]) for seed in range(50)])
