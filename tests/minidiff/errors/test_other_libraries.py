"""Names of other libraries are answered with names that exist here."""

import importlib
import re

import numpy
import pytest
from scipy import linalg, special

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.errors.other_libraries import suggestions

X = spmd.distribute(numpy.ones(2), spmd.make_mesh((2,), ("i",), backend="simulated"), spmd.P("i"))

INSTEAD = suggestions("names")

TRIED = {
    "md.lax": r"md\.cond.*collectives",
    "md.tree_util": r"write md\.tree$",
    "md.make_jaxpr": r"write md\.make_tape$",
    "md.sin": r"write np\.sin, after import minidiff\.numpy as np",
    "md.elementwise_grad": r"md\.vmap\(md\.grad\(f\)\)",
    "md.random.PRNGKey": r"write md\.random\.key$",
    "md.nn.Linear": r"x @ w \+ b",
    "md.optim.AdamW": r"write md\.optim\.adamw$",
    "spmd.NamedSharding": r"write spmd\.distribute\(x, mesh, P\('i'\)\)",
    "spmd.device_put": r"spmd\.distribute",
    "spmd.with_sharding_constraint": r"spmd\.reshard",
    "spmd.psum": r"write collectives\.psum$",
    "spmd.COMM_WORLD": r"mpirun -n 4 .*spmd\.make_mesh",
    "collectives.Allreduce": r"write psum$",
    "X.sharding": r"x\.mesh and x\.spec",
}


@pytest.mark.parametrize("name", TRIED)
def test_names_of_other_libraries(name):
    with pytest.raises(AttributeError, match=TRIED[name]):
        eval(name)


@pytest.mark.parametrize("name", ["md.gradd", "spmd.distribut", "collectives.psums", "md.optim.adan"])
def test_misspelled_names(name):
    with pytest.raises(AttributeError, match=r"Did you mean '(grad|distribute|psum|adam)'"):
        eval(name)


@pytest.mark.parametrize("owner", INSTEAD)
def test_advice_is_about_names_that_exist_here(owner):
    there = spmd.ShardedArray if owner == "ShardedArray" else importlib.import_module(owner)
    roots = {"md": md, "np": np, "spmd": spmd, "collectives": collectives, "x": X}
    for name, advice in INSTEAD[owner].items():
        assert name not in getattr(there, "__all__", dir(there)), f"{owner}.{name} exists"
        for root, path in re.findall(r"\b(md|np|spmd|collectives|x)\.([\w.]+\w)", advice):
            actual = roots[root]
            for part in path.split("."):
                actual = getattr(actual, part)
        if owner == "collectives":
            assert hasattr(collectives, advice.split()[1].split(".")[0]) or "spmd." in advice


def test_substitutes_of_scipy_exist_here():
    for name, advice in suggestions("scipy")["scipy"].items():
        for root, path in re.findall(r"\b(md|np)\.([\w.]+\w)", advice):
            actual = {"md": md, "np": np}[root]
            for part in path.split("."):
                actual = getattr(actual, part)
        assert advice, name


def convolve2d(a):
    from scipy import signal  # here, for every process that collects tests would take a second to import it

    return signal.convolve2d(a, a)


OF_SCIPY = {
    "solve_triangular": (
        lambda a: linalg.solve_triangular(a, numpy.ones(2)),
        r"write md\.scipy\.linalg\.solve_triangular",
    ),
    "expm": (linalg.expm, r"write md\.scipy\.linalg\.expm"),
    "logm": (linalg.logm, r"write md\.scipy\.linalg\.logm"),
    "funm": (lambda a: linalg.funm(a, numpy.exp), r"write md\.scipy\.linalg\.matrix_function"),
    "cho_solve": (lambda a: linalg.cho_solve((a, True), numpy.ones(2)), r"write md\.scipy\.linalg\.cho_solve"),
    "cholesky": (linalg.cholesky, r"write np\.linalg\.cholesky"),
    "logsumexp": (special.logsumexp, r"write md\.scipy\.special\.logsumexp"),
    "convolve2d": (convolve2d, r"write md\.scipy\.signal\.convolve"),
    "hankel": (linalg.hankel, "write it in NumPy's functions"),
}


@pytest.mark.parametrize("transformation", [md.grad, md.jit])
@pytest.mark.parametrize("name", OF_SCIPY)
def test_functions_of_scipy_are_named_with_a_substitute(name, transformation):
    f, message = OF_SCIPY[name]
    with pytest.raises(md.TracerError, match=rf"scipy\.\w+\.{name} is not supported on traced values .*{message}"):
        transformation(lambda a: f(a).sum())(numpy.eye(2) + 0.1)
