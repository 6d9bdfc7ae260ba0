"""Random programs of assignments, branches, loops and jumps: rewritten and compiled, they return what Python's do.

So do their gradients, which are compared with those of the steps that Python takes.
"""

import importlib.util

import hypothesis.strategies as st
import numpy
import pytest
from hypothesis import HealthCheck, given, settings

import minidiff as md

NAMES = ("a", "b", "c")
VALUES = st.sampled_from([*NAMES, "0.5", "1.5", "-2.0"])
EXPRESSIONS = st.one_of(
    VALUES,
    st.builds("{} {} {}".format, st.sampled_from(NAMES), st.sampled_from("+-*"), VALUES),
    st.builds("abs({}) / 3.0".format, VALUES),
    st.builds("({} if {} > {} else {})".format, VALUES, st.sampled_from(NAMES), VALUES, VALUES),
)
COMPARISONS = st.builds("{} {} {}".format, st.sampled_from(NAMES), st.sampled_from(["<", ">", "<=", ">="]), VALUES)
CONDITIONS = st.one_of(
    COMPARISONS,
    st.builds("not {}".format, COMPARISONS),
    st.builds("{} {} {}".format, COMPARISONS, st.sampled_from(["and", "or"]), COMPARISONS),
    st.builds("{} < {} <= {}".format, VALUES, st.sampled_from(NAMES), VALUES),
)


@st.composite
def blocks(draw, depth, in_loop):
    lines = []
    for _ in range(draw(st.integers(1, 2))):
        kinds = ["assign", "assign", "temporary"] + ["if", "while", "for"] * (depth > 0)
        kinds += ["break", "continue"] * in_loop + ["return"] * (depth < 2)
        kind = draw(st.sampled_from(kinds))
        if kind == "assign":
            # Values stay small, so that products of steps neither overflow nor lose the order of sums.
            lines.append(f"{draw(st.sampled_from(NAMES))} = clip({draw(EXPRESSIONS)})")
        elif kind == "temporary":
            lines += [f"t = {draw(EXPRESSIONS)}", f"{draw(st.sampled_from(NAMES))} = clip(t)"]
        elif kind == "if":
            lines += [f"if {draw(CONDITIONS)}:", *draw(indented(depth, in_loop))]
            if draw(st.booleans()):
                lines += ["else:", *draw(indented(depth, in_loop))]
        elif kind == "while":
            counter = f"k{depth}"
            lines += [f"{counter} = 0", f"while {counter} < 4 and ({draw(CONDITIONS)}):", f"    {counter} += 1"]
            lines += draw(indented(depth, True))
            if draw(st.booleans()):
                lines += ["else:", *draw(indented(depth, in_loop))]
        elif kind == "for":
            index, items = (
                f"i{depth}",
                draw(st.sampled_from(["range(n)", "range(3)", "range(n, 0, -1)", "xs", "[1.0, 2.0]"])),
            )
            lines += [f"for {index} in {items}:", f"    a = clip(a + {index})", *draw(indented(depth, True))]
        elif kind == "return":
            lines.append(f"return {draw(EXPRESSIONS)}, b")
        else:
            lines.append(kind)
    return lines


def indented(depth, in_loop):
    return blocks(depth - 1, in_loop).map(lambda lines: ["    " + line for line in lines])


@st.composite
def programs(draw):
    lines = [*draw(blocks(2, False)), "return a - 2 * c, b"]
    return "\n".join(["def f(a, b, c, n, xs):", *("    " + line for line in lines)]) + "\n"


HEADER = """import minidiff.numpy as np


def clip(x):
    return np.clip(x, -10.0, 10.0)


"""


def load(path, text):
    """Return the function of a program, which has a file, as functions of users have."""
    path.write_text(HEADER + text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


ARGUMENTS = [(1.0, -0.5, 2.0, 2), (-3.0, 0.25, 0.0, 0), (4.0, 1.5, -2.0, 3)]
XS = numpy.array([0.5, -1.0, 2.5])
COUNT = iter(range(1 << 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@settings(max_examples=12, deadline=None, suppress_health_check=[*HealthCheck])
@given(programs())
def test_random_programs(folder, text):
    f = load(folder / f"program_{next(COUNT)}.py", text)
    g = md.autograph(f, max_steps=10)
    compiled = md.jit(g)
    gradient, steps = (md.value_and_grad(lambda *args, h=h: sum(h(*args)), (0, 1, 2)) for h in (compiled, f))
    expected = [f(*args, XS) for args in ARGUMENTS]
    for args, values in zip(ARGUMENTS, expected):
        numpy.testing.assert_allclose(g(*args, XS), values, rtol=1e-12)
        numpy.testing.assert_allclose(compiled(*args, XS), values, rtol=1e-12)
        numpy.testing.assert_allclose(gradient(*args, XS)[1], steps(*args, XS)[1], rtol=1e-10, atol=1e-12)
    columns = [numpy.array(column) for column in zip(*ARGUMENTS)]
    batch = md.jit(md.vmap(g, in_axes=(0, 0, 0, 0, None)))(*columns, XS)
    numpy.testing.assert_allclose(numpy.stack(batch), numpy.array(expected).T, rtol=1e-12)
