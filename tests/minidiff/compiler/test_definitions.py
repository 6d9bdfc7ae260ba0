"""Names and strings of users in code that is generated, to be run or exported: they stay what they are."""

import builtins
import contextlib
import enum
import functools
import inspect
import io
import keyword
import sys

import ml_dtypes
import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from collectives import psum
from minidiff.ops.elementwise import elementwise
from spmd import P
from tests.checks.exported_code import load, same
from tests.checks.launch import mpiexec
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import check_each, check_raises, each

x = numpy.linspace(0.1, 1.0, 4)

#: Names of what files define, import and call, and texts that are no names.
NAMES = ["inf", "nan", "add", "numpy", "scipy", "sys", "functools", "list", "range", "slice", "super", "float"]
NAMES += ["zip", "_program", "_as_argument", "_run_file", "_scan_loop", "TYPES", "CHECKSUM", "CONSTANTS", "SIZES"]
NAMES += ["WORLD", "constant_0", "result_0", "argument_0", "keywords", "scan_body", "_numpy", "a", "match", "_", "x"]
NAMES += ["é", "loss"]
NO_NAMES = ["class", "None", "__debug__", "__file__", "<lambda>", "a b", "x=print(1)", '"""', "ﬁ", "\n", ""]


@pytest.fixture(autouse=True)
def _silent(capsys):
    """Names and texts that are taken for code would print."""
    yield
    assert capsys.readouterr().out == ""


def program(x):
    """Use constants, helpers of files, builtins and loops."""
    carry, _ = md.scan(lambda c, r: (c * r + np.where(r > 0, numpy.inf, numpy.nan), ()), x[0], x)
    return np.add.reduce(np.cumsum(x)) + x * numpy.arange(4.0), np.sort(x), np.clip(x, 0.2, 0.3), carry


def renamed(f, name):
    f.__name__ = name
    return f


@each("name", NAMES + NO_NAMES, ids=repr)
def test_functions(name, tmp_path):
    f, expected = renamed(lambda x: program(x), name), program(x)
    same(md.jit(f)(x), expected)
    same(md.jit(md.checkpoint(f))(x), expected)
    public = f"{name}_" if keyword.iskeyword(name) else "function" if name in NO_NAMES else name
    same(getattr(load(md.export(f)(x), tmp_path), public)(x), expected)


@each("name", [name for name in NAMES if name != "_"], ids=repr)
def test_parameters(name, tmp_path):
    scope = {"np": np}
    exec(f"def f({name}, *, scale): return np.sort(np.clip({name} * scale, 0.2, 0.3))", scope)
    f = load(md.export(scope["f"])(x, scale=2.0), tmp_path).f
    same(f(x, scale=2.0), np.clip(x * 2.0, 0.2, 0.3))
    same(f(**{name: x}, scale=2.0), np.clip(x * 2.0, 0.2, 0.3))


@each("name", NAMES[::4] + NO_NAMES, ids=repr)
def test_keywords(name, tmp_path):
    f = load(md.export(renamed(lambda **named: np.sort(named[name]), "f"))(**{name: x}), tmp_path).f
    same(f(**{name: x}), x)
    check_raises(f, "TypeError: (this program|f.. missing)")
    check_raises(lambda: f(**{name: x, "more": x}), "TypeError: (this program|f.. got)")


#: Functions, arguments, and the signatures in files: as in the call that was exported, or in the exported function.
SIGNATURES = [
    (lambda x, /, **named: x - named["x"], (x,), {"x": 2 * x}, "(x_, /, *, x)"),
    (lambda argument_1, *others: argument_1 - others[0], (x, 2 * x), {}, "(argument_1, argument_1_, /)"),
    (lambda b, a: b - a, (), {"a": x, "b": 2 * x}, "(b, a)"),
    (lambda b, a: b - a, (x,), {"a": 2 * x}, "(b, a)"),
    (lambda x, n=3, y=1.0: x * n - y, (x,), {"y": 2.0}, "(x, *, y)"),
]


@each("f, args, named, expected", SIGNATURES)
def test_signatures(f, args, named, expected, tmp_path):
    written = load(md.export(renamed(f, "f"))(*args, **named), tmp_path).f
    assert str(inspect.signature(written)) == expected
    same(written(*args, **named), f(*args, **named))


Color = enum.Enum("Color", {"RED": "red"}, type=str)
Number = enum.IntEnum("Number", {"THREE": 3})


class Text(str):
    def __repr__(self):
        return "print('this is code')"


KEYS = ['"""', "'", "\\", "\\n", "a\nb", "\x00", "\ud800", "\u2028", "ü", "{x}", "%s", "", "#", "a/b", "x.npy", "\r\n"]
KEYS += ['""" ; print("this is code") ; """', 3, -1, 1.5, numpy.inf, (1, ("\n", None)), None, True, b"'", 1j]
KEYS += [Color.RED, Number.THREE, Text("text"), numpy.int64(3), numpy.str_("s"), numpy.float32(2.5)]


@each("key", KEYS, ids=repr)
def test_keys_of_trees(key, tmp_path):
    module = load(md.export(renamed(lambda tree: {key: tree[key] * 2}, "f"))({key: x}), tmp_path)
    same(module.f({key: x})[key], x * 2)
    numpy.savez(tmp_path / "in.npz", **dict.fromkeys(module.TYPES, x))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        module._run_file([str(tmp_path / "in.npz"), str(tmp_path / "out.npz")])
    assert len(printed.getvalue().splitlines()) == 1
    same([*numpy.load(tmp_path / "out.npz").values()], [x * 2])


@each("key", [object(), numpy.nan, enum.Enum("Other", "A").A])
def test_keys_that_a_file_cannot_have(key):
    check_raises(lambda: md.export(lambda tree: tree[key])({key: x}), "TypeError: export: tree has the key")
    check_raises(lambda: md.export(lambda x: {key: x})(x), "TypeError: export: result has the key")


LONG = numpy.longdouble
NUMBERS = [LONG(1) / 3, -LONG(0), LONG("nan"), LONG(2) ** -16000, numpy.clongdouble(1 + 2j) / 3, complex(-0.0, -0.0)]
NUMBERS += [numpy.nan, -numpy.inf, 10**18, complex(0.0, numpy.inf), numpy.float32(0.1), numpy.complex64(-1j)]
NUMBERS += [True, numpy.uint64(2**63), numpy.bool_(1), numpy.int8(3), numpy.longlong(3), numpy.array(-0.0)]
NUMBERS += [numpy.array([True])]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@each("number", NUMBERS, ids=repr)
def test_constants_of_each_type(number, tmp_path):
    f = lambda x: (x * number, number, np.full((2,), number), np.where(x > 0.5, number, number))  # noqa: E731
    same(load(md.export(renamed(f, "f"))(x), tmp_path).f(x), md.jit(f)(x))


@each("constant", [numpy.ones(2, ml_dtypes.bfloat16), ml_dtypes.bfloat16(1)])
def test_constants_that_a_file_cannot_have(constant):
    check_raises(lambda: md.export(lambda x: (x, constant))(x), "TypeError: .*bfloat16")


# ---------------------------------------------------------------- operations of users

plain, factor, TYPES, SIZES, WEIGHTS = numpy, 3.0, 7.0, 2.0, numpy.arange(4.0)


def helper(x):
    return numpy.abs(x) * factor


CONSTANTS = _program = helper


def hides_a_module(x):
    numpy = x
    return plain.abs(numpy) + helper(numpy)


def hides_a_helper(x):
    _helper = constant_0 = 3.0
    return helper(x) * _helper * WEIGHTS * constant_0


def uses_names_of_files(x):
    return x * TYPES * SIZES + _program(x) + CONSTANTS(x)


def imports(x):
    """A docstring with \"\"\" and \\ in it."""
    import math as factor

    return x * factor.pi


def calls_itself(x, _calls_itself=2.0):
    return calls_itself(x, 1.0) if _calls_itself > 5 else x * _calls_itself


def has_a_text(x, *, text='"""\n#'):
    return x * len(text)


@each("f", [hides_a_module, hides_a_helper, uses_names_of_files, imports, calls_itself, has_a_text])
@each("name", ["numpy", "add", "class", '"""', "x0"], ids=repr)
def test_operations(f, name, tmp_path):
    first = f.__name__
    operation = elementwise(renamed(f, name), lambda out, x: x)
    f.__name__ = first
    same(md.jit(lambda x: operation(x) + numpy.inf)(x), f(x) + numpy.inf)
    same(load(md.export(lambda x: operation(x) + 1)(x), tmp_path).function(x), f(x) + 1)


def test_a_derivative_that_uses_an_operation_of_the_same_name():
    of_twice = elementwise(renamed(lambda x: numpy.cos(2 * x), "cos"), lambda out, x: np.cos(x) * of_twice(x))
    for f in (of_twice, md.jit(of_twice)):
        numpy.testing.assert_allclose(md.vmap(md.grad(f))(x), numpy.cos(x) * numpy.cos(2 * x))


# ---------------------------------------------------------------- ranks

AXES = ["i\n    raise SystemExit #", "'", '"""', "\\", "\x00", "#", "i j", "SIZES"]


def of_axis(axis, ranks):
    body = mapped(lambda x: psum(np.sin(x).sum(), axis), mesh(ranks, names=(axis,)), P(axis), P())
    return lambda x: (body(x), md.grad(body)(x))


@each("axis", AXES, ids=repr)
def test_axes_of_meshes(axis, tmp_path):
    same(md.jit(of_axis(axis, 2))(x), of_axis(axis, 2)(x))
    compile(md.jit(of_axis(axis, 2)).source(x), "source", "exec")
    same(load(md.export(of_axis(axis, 1))(x), tmp_path).function(x), of_axis(axis, 1)(x))


def test_files_for_ranks(tmp_path):
    """Run files on MPI ranks whose functions have the names of what they use."""
    names = ["psum", "mpi4py", "WORLD", "COMMUNICATORS", "_rank_along", "itertools", "int"]
    lines = ["import sys, numpy", f"sys.path.append({str(tmp_path)!r})", "x = numpy.linspace(0.1, 1.0, 4)"]
    for name, axis in zip(names, AXES):
        md.export(renamed(of_axis(axis, 2), name))(x).save(tmp_path / f"of_{name}.py")
        lines += [f"import of_{name}", f"total, ct = of_{name}.{name}(x)"]
        lines += ["assert numpy.allclose(total, numpy.sin(x).sum()) and numpy.allclose(ct, numpy.cos(x))"]
    done = mpiexec(2, "-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr


def test_all_builtins_and_modules(tmp_path):
    """A file may define any name of Python's: beside it, the name means what it always does."""

    def check(name):
        module = load(md.export(renamed(lambda x: np.sort(x) + np.cumsum(x), name))(x), tmp_path)
        same(getattr(module, name + "_" * keyword.iskeyword(name))(x), np.sort(x) + np.cumsum(x))

    names = [*dir(builtins)[::3], *keyword.kwlist[::2], *sorted(sys.stdlib_module_names)[::16]]
    check_each((name, functools.partial(check, name)) for name in names if not name.startswith("__"))
