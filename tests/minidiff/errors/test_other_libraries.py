"""Names and functions of other libraries are answered with what exists here (the texts: `tests/messages`)."""

import importlib
import re

import numpy
import pytest
import scipy.stats

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.errors.other_libraries import suggestions
from tests.checks.meshes import mesh
from tests.checks.samples import each

NAMES = suggestions("names")
ROOTS = {"md": md, "np": np, "spmd": spmd, "collectives": collectives}
ROOTS["x"] = spmd.distribute(numpy.ones(2), mesh(2), spmd.P("i"))


def check_names_in(advice):
    for root, path in re.findall(r"\b(md|np|spmd|collectives|x)\.([\w.]+\w)", advice):
        x = ROOTS[root]
        for part in path.split("."):
            x = getattr(x, part)


@each("owner", NAMES)
def test_advice_is_about_names_that_exist_here(owner):
    there = spmd.ShardedArray if owner == "ShardedArray" else importlib.import_module(owner)
    for name, advice in NAMES[owner].items():
        assert name not in getattr(there, "__all__", dir(there)), f"{owner}.{name} exists"
        check_names_in(advice)
        if owner == "collectives":
            assert hasattr(collectives, advice.split()[1].split(".")[0]) or "spmd." in advice


def test_substitutes_of_scipy_exist_here():
    check_names_in(" ".join(suggestions("scipy")["scipy"].values()))


SHAPES = {"beta": (1.0, 2.0), "binom": (3, 0.4), "bernoulli": (0.4,), "chi2": (2.0,), "gamma": (2.0,), "t": (3.0,)}
SHAPES |= {"poisson": (2.0,), "dirichlet": (numpy.array([1.0, 2.0]),)}
METHODS = [
    (name, method)
    for name in md.scipy.stats.__all__
    for method in ("pdf", "logpdf", "pmf", "logpmf", "cdf", "sf", "logcdf", "logsf")
    if hasattr(getattr(md.scipy.stats, name), method) and hasattr(getattr(scipy.stats, name), method)
]


@each("transformation", [md.grad, md.jit])
@each("frozen", [False, True], ids=str)
@each("name, method", METHODS, ids=".".join)
def test_distributions_of_scipy(transformation, frozen, name, method):
    x = numpy.array([0.3, 0.6]) if name in ("dirichlet", "multivariate_normal") else numpy.float64(0.5)
    theirs, shapes = getattr(scipy.stats, name), SHAPES.get(name, ())
    f = getattr(theirs(*shapes), method) if frozen else lambda x: getattr(theirs, method)(x, *shapes)
    with pytest.raises(md.TracerError, match=rf"{name}.{method} is not .*: write md.scipy.stats.{name}.{method}$"):
        transformation(lambda x: f(x))(x)
