"""Exported programs: what the file computes where the packages are not installed, and what cannot be exported."""

import ast
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

import collectives as c
import collectives.exported
import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pbroadcast, psum
from minidiff.core.types import ShapedArray
from minidiff.ops.elementwise import elementwise
from spmd import P
from tests import PATIENCE
from tests.checks.collective_cases import Case, one_case_each
from tests.checks.exported_code import load, read, same
from tests.checks.launch import mpiexec
from tests.checks.meshes import mapped, mesh
from tests.checks.of_collectives import on_blocks, sample
from tests.checks.samples import check_each, check_raises, each
from tests.minidiff.compiler.programs import PROGRAMS
from tests.table import TABLE

x = numpy.linspace(0.1, 1.0, 12).reshape(3, 4)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A directory with NumPy and mpi4py alone: an isolated Python without `site` finds no other package."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("numpy", "mpi4py"):
        actual = Path(importlib.util.find_spec(name).origin).parent
        for path in (actual, actual.with_name(f"{name}.libs")):
            if path.exists():
                (folder / path.name).symlink_to(path)
    return folder


def alone(packages, folder, program, ranks=1):
    """Return the output of a program that can import NumPy, mpi4py and a folder's files, but none of our packages."""
    library = next(Path(sys.prefix, "lib").glob("libmpi.so.[0-9]*"), None)  # which `-S` does not know
    begin = f"import os; os.environ['MPI4PY_LIBMPI'] = {str(library)!r}\n" if library else ""
    begin += f"import sys; sys.path += [{str(packages)!r}, {str(folder)!r}]\nfrom importlib.util import find_spec\n"
    begin += "assert not any(map(find_spec, ['minidiff', 'collectives', 'spmd', 'scipy', 'pytest']))\n"
    command = ("-I", "-S", "-c", begin + program)
    whole = {"capture_output": True, "text": True, "timeout": PATIENCE}
    done = mpiexec(ranks, *command) if ranks > 1 else subprocess.run([sys.executable, *command], **whole)
    assert done.returncode == 0, done.stderr
    return done.stdout


def exported(f, *args, folder):
    """The function of the file that a function was exported to."""
    result = md.export(f)(*args)
    imports = [n for n in ast.walk(ast.parse(result.code)) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {getattr(n, "module", None) or n.names[0].name for n in imports}
    assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, *result.needs}
    name = getattr(f, "__name__", type(f).__name__)
    return getattr(load(result, folder), name if name.isidentifier() else "function")


# ---------------------------------------------------------------- what a file computes


def is_program(row):
    """Whether a row can be recorded: some need values."""
    try:
        md.make_tape(row.f)(*row.args)
    except (md.TracerError, TypeError):
        return False
    return True


def test_every_operation_computes_what_the_compiled_program_does(tmp_path):
    first = {row.function: row for row in reversed(TABLE)}
    rows = [row for row in first.values() if is_program(row) and row.name != "by_differences"]  # it calls jvp
    assert len(rows) > 300

    def everything(args):
        return [row.f(*inputs) for row, inputs in zip(rows, args)]

    args = [row.args for row in rows]
    actual, expected = exported(everything, args, folder=tmp_path)(args), md.jit(everything, kernels=False)(args)
    check_each((row.key, functools.partial(same, *pair)) for row, *pair in zip(rows, actual, expected))


def rules(x):
    scaled = md.custom_vjp(lambda x: np.exp(x))
    scaled.defvjp(lambda x: (np.exp(x), np.exp(x)), lambda saved, ct: (ct * saved,))
    saved = md.checkpoint(lambda y: np.sin(np.cos(y)).sum())
    return md.grad(lambda y: scaled(y).sum() + saved(y))(x), md.vmap(md.grad(lambda r: np.tanh(r).prod()))(x)


def numbers(x):
    key = md.random.key(3)
    return md.random.normal(key, (3,)), md.random.gamma(key, 2.0, (2,)), md.nn.softmax(x), md.scipy.special.erf(x)


def constants(x):
    w = numpy.arange(4.0)
    return {"sum": [(x * w).sum(), None], "scan": md.scan(lambda c, r: (c * w[::-1] + r, ()), w, x)[0]}


EXPORTED = [(f, (x,)) for f in (rules, numbers, constants)]
EXPORTED += [(f, args) for f, args, *_ in PROGRAMS.values()]


@each("f, args", EXPORTED)
def test_programs(f, args, tmp_path):
    g = lambda *args: f(*args)  # noqa: E731
    same(exported(g, *args, folder=tmp_path)(*args), md.jit(g, kernels=False)(*args))


def test_trees_types_and_static_arguments(tmp_path):
    @functools.partial(md.jit, static_argnames="n")
    def power(params, n, *, scale, bias):
        return {"out": (params["w"] ** n * scale + bias[0], [params["b"]])}

    scale, bias = ShapedArray((), float), (ShapedArray((3,), float),)
    result = md.export(power)({"w": ShapedArray((3,), "float32"), "b": 1.0}, 2, scale=scale, bias=bias)
    w = numpy.arange(3, dtype="float32")
    actual = load(result, tmp_path).power({"w": w, "b": 2}, scale=0.5, bias=[numpy.ones(3)])
    same(actual, {"out": (w**2 * numpy.float64(0.5) + 1, [numpy.float64(2)])})


# ---------------------------------------------------------------- the file


def test_the_file_runs_by_itself_and_knows_whether_it_was_changed(packages, tmp_path):
    md.export(constants)(x).save(tmp_path / "model.py")
    numpy.savez(tmp_path / "in.npz", x=x)
    run = f"import runpy; sys.argv = ['model.py', *{[str(tmp_path / n) for n in ('in.npz', 'out.npz')]}]\n"
    run += f"runpy.run_path({str(tmp_path / 'model.py')!r}, run_name='__main__')"
    assert "result['scan']: float64[4]" in alone(packages, tmp_path, run)
    expected = md.jit(constants, kernels=False)(x)
    numpy.testing.assert_array_equal(numpy.load(tmp_path / "out.npz")["result['scan']"], expected["scan"])
    run = read(tmp_path / "model.py").constants
    check_raises(lambda: run(x[0]), r"TypeError: x is float64\[4\], .* takes float64\[3, 4\]")
    code = (tmp_path / "model.py").read_text()
    (tmp_path / "model.py").write_text(code.replace("carried = outs", "carried = arrays"))
    check_raises(lambda: read(tmp_path / "model.py"), "ValueError: .*checksum")
    (tmp_path / "model.py").write_text(code)
    md.export(lambda x: x * numpy.arange(4.0))(x).save(tmp_path / "other.py")
    (tmp_path / "other.npz").rename(tmp_path / "model.npz")
    check_raises(lambda: read(tmp_path / "model.py"), "ValueError: .*checksum")
    check_raises(lambda: md.export(constants)(x).save("model.txt"), "ValueError: .*'model.txt' does not end in .py")


def identity(x):
    return x


def prints(x):
    md.debug.print("{}", x)
    return x


misspelled = elementwise(lambda x: x if x.size else no_such_name(x), None)  # noqa: F821 (what the error names)


def on(ranks, f=identity, out=P("i")):
    return mapped(f, mesh(ranks), P("i"), out)


#: Functions that are not exported, and which operation and line the error names.
REFUSED = [
    (lambda x: md.pure_callback(numpy.sin, ShapedArray((3, 4), float), x), r"pure_callback \(test_export.py:\d+: "),
    (prints, r"debug_print \(test_export.py:\d+: md.debug.print"),
    (lambda x: x.astype("float16") * 2, r"convert \(test_export.py.*16-bit floats"),
    (on(1, lambda x: psum(c.reduce(x, "i"), "i"), P()), r"reduce \(test_export.py:\d+: .*is not among .* psum"),
    (lambda x: on(1)(x) + on(3)(x), "a program must use one mesh"),
    (lambda x: SimpleNamespace(out=x), "result is a SimpleNamespace"),
    (lambda x: md.scan(lambda c, _: (c * 2, c), x, None, 0)[1], "scan .* is not a function of arrays"),
    (misspelled, "no_such_name is not defined where it is used"),
]


@each("f, pattern", REFUSED)
def test_what_is_not_numpy_is_named_with_its_line(f, pattern):
    with pytest.raises(TypeError, match=pattern):
        md.export(f)(x)


# ---------------------------------------------------------------- ranks


def test_a_program_for_ranks_says_how_to_start_it(monkeypatch):
    monkeypatch.setattr(collectives.exported, "SIZES", {"i": 2})
    check_raises(lambda: collectives.exported.rank_along(["i"]), "RuntimeError: .*{'i': 2}, but there are 1 processes")


SQUARE = mesh(2, 2)
#: Of pscan and ppermute, also those in which some ranks get zeros.
ZEROS = [Case("pscan", (2, 3), {"reverse": True, "exclusive": True}), Case("ppermute", (3,), {"perm": [(0, 1)]})]


def every_collective():
    """Functions of all collectives that files may use, over all ranks of a mesh, and their arguments."""
    for case in (*one_case_each(4), *ZEROS):
        if case.operation in collectives.exported.EXPORTED:
            blocks = sample(SQUARE, case, ("i", "j"))
            yield on_blocks(SQUARE, lambda x, case=case: case(x, ("i", "j")), blocks.varying), blocks.stacked


COLLECTIVES, BLOCKS = zip(*every_collective())


def in_a_body(x):
    """Return blocks whose lengths are known at run time; results of a loop, and of branches that ranks differ in."""
    splits = c.all_gather(np.stack([c.axis_index("i"), 1]), "i", to="invariant")
    ragged = c.all_to_all(x, "i", 0, 0, splits=splits, capacity=3)
    looped = md.fori_loop(0, 3, lambda k, y: y + pbroadcast(psum(y, "i"), "i") * 0.1, x)
    taken = md.cond(c.axis_index("j") == 0, lambda x: x * 3.0, lambda x: pbroadcast(psum(x, "i"), "i"), x)
    return [y[None] for y in (ragged, looped, taken)]


def program(x, blocks):
    """Collectives; parts of a sum, derivatives without types, and along an axis that the body does not map over."""
    split = functools.partial(spmd.shard_map, mesh=SQUARE, in_specs=P("i", "j"))
    parts = split(lambda x: c.unreduced(psum(x.sum(0), "j") * 2.0, "i"), out_specs=P(unreduced={"i"}))
    total = split(lambda x: psum((np.tanh(x) * x).sum(), ("i", "j")), out_specs=P(), check_rep=False)
    auto = split(lambda x: psum(np.sin(x).sum(0), "i"), in_specs=P("i"), out_specs=P(), axis_names={"i"})
    results = [f(x) for f, x in zip(COLLECTIVES, blocks)] + split(in_a_body, out_specs=P(("i", "j")))(x)
    return [*results, parts(x), md.grad(total)(x), md.hvp(total, (x,), (x * 0.5,)), auto(x)]


RUN = """
import numpy, program
x, *blocks = numpy.load("{folder}/in.npz").values()
numpy.savez(f"{folder}/{{program.WORLD.Get_rank()}}.npz", *program.program(x, blocks))
"""


def test_programs_on_mpi_ranks(packages, tmp_path):
    x = numpy.arange(1.0, 33.0).reshape(4, 8) / 7
    numpy.savez(tmp_path / "in.npz", x, *BLOCKS)
    result = md.export(program)(x, [*BLOCKS])
    assert result.needs == ("numpy", "mpi4py")
    result.save(tmp_path / "program.py")
    alone(packages, tmp_path, RUN.format(folder=tmp_path), 4)
    expected = spmd.gather(program(x, BLOCKS))
    for rank in range(4):
        for actual, y in zip(numpy.load(tmp_path / f"{rank}.npz").values(), expected, strict=True):
            numpy.testing.assert_allclose(actual, y, rtol=1e-12)
