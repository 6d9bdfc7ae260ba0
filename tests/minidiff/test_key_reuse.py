"""A key that is used twice is a warning at the user's line, under every transformation; one that is used once none."""

import gc
import linecache
import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff import random
from minidiff.inputs import key_reuse
from tests.programs.key import check, reuses, transformations


@pytest.mark.parametrize("name", transformations("simulated"))
def test_transformations(name):
    check("simulated", name)


def test_the_warning_is_at_the_second_line_and_names_the_first():
    key = random.key(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        random.split(key)
        random.normal(key)  # the second line
    (warning,) = caught
    assert linecache.getline(warning.filename, warning.lineno).strip().endswith("# the second line")
    first = f"test_key_reuse.py:{warning.lineno - 1}: random.split(key)"
    assert str(warning.message).startswith(f"normal uses a key again: split used it at {first}. ")


def test_each_line_warns_once():
    """Python's filters show a warning of a line once."""
    key = random.key(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(5):
            random.normal(key)
    assert len(caught) == 1


def test_it_is_an_error_while_checking():
    key = random.key(0)
    with spmd.checking():
        random.normal(key)
        with pytest.raises(ValueError, match=r"uniform uses a key again: normal used it at .*random.clone"):
            random.uniform(key)
        random.uniform(random.clone(key))
    assert reuses(random.uniform, key)


def _sample(key):
    return random.normal(key)


def _noise(key):
    return random.uniform(key)


def test_functions_that_are_called_again():
    """To measure a function, or to compare it with another, one calls it twice with one key."""
    f, g = md.jit(_sample), md.grad(lambda x, key: x * random.normal(key))
    key = random.key(0)
    assert not reuses(lambda: [f(key), f(key), md.vmap(_sample)(key[None]), g(1.0, key), g(1.0, key)])
    assert not reuses(lambda: [_sample(key), *[_sample(key) for _ in range(2)]])
    assert reuses(lambda: _noise(key))
    for both in (lambda key: _sample(key) + _sample(key), lambda key: f(key) + f(key)):  # in one program
        assert reuses(md.jit(both), key) and reuses(md.grad(lambda x: x * both(key)), 1.0)  # noqa: B023


def test_a_cell_that_runs_again():
    code = lambda: compile("random.normal(key)", "<cell>", "eval")  # noqa: E731
    names = {"random": random, "key": random.key(0)}
    assert not reuses(lambda: [eval(code(), names), eval(code(), names)])
    assert reuses(lambda: eval(compile("random.normal(key)\n", "<another cell>", "eval"), names))


def test_two_keys_of_one_seed_and_copies_are_keys_of_their_own():
    key = random.key(0)
    assert not reuses(lambda: [random.normal(k) for k in (key, random.key(0), key.copy(), random.clone(key))])
    assert reuses(lambda: random.normal(np.asarray(key)))  # the same array


def test_clones():
    keys = random.split(random.key(0), 3)
    for clone in (random.clone, md.jit(random.clone), md.vmap(random.clone)):
        assert (clone(keys) == keys).all() and not np.shares_memory(clone(keys), keys)


def test_branches_of_elements():
    """Under vmap both branches run, for elements of their own."""
    f = lambda x, key: md.cond(x > 0, lambda: x * random.normal(key), lambda: random.uniform(key))  # noqa: E731
    for more, count in ((lambda x, key: 0.0, 0), (lambda x, key: random.normal(key), 1)):
        g = lambda x, key, more=more: f(x, key) + more(x, key)  # noqa: E731
        run = md.vmap(g, in_axes=(0, None))
        assert len(reuses(run, np.array([-1.0, 1.0]), random.key(0))) == count


def test_recomputation_is_no_use():
    def loss(x, key):
        layer = md.checkpoint(lambda x, key: np.sin(md.nn.dropout(key, x, 0.5)))
        for each in random.split(key):
            x = layer(x, each)
        return x.sum()

    for derivative in (md.grad(loss), md.jit(md.grad(loss)), md.hessian(loss)):
        assert not reuses(derivative, np.ones(3), random.key(0))


def test_nothing_is_left_of_keys():
    gc.collect()
    before = len(key_reuse._outside)
    for seed in range(5):
        key = random.key(seed)
        a, b = random.split(key)
        random.normal(a), random.normal(b)
    assert len(key_reuse._outside) >= before + 2
    del key, a, b
    assert len(key_reuse._outside) == before


def test_compiled_programs_check_nothing(monkeypatch):
    f, key = md.jit(lambda key: random.normal(key) + random.uniform(random.clone(key))), random.key(0)
    x = f(key)
    monkeypatch.setattr(key_reuse, "_uses_in", None)
    assert f(key) == x
