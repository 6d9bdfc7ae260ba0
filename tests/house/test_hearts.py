"""The two hearts: what a lecturer projects is small, and works with everything else deleted."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.code_lines import code_lines

ROOT = Path(__file__).parents[2]

#: The heart of ranks, in the order in which it is read.
RANKS = (
    *("collectives/axes.py", "collectives/collective.py", "collectives/operands.py", "collectives/ops.py"),
    *("collectives/checks.py", "collectives/typing_rules.py", "collectives/casts.py"),
    *("collectives/backends/base.py", "collectives/backends/simulated.py"),
    *("spmd/mesh/specs.py", "spmd/mesh/mesh.py"),
    *("spmd/shard_map/calls.py", "spmd/shard_map/interpreter.py", "spmd/shard_map/residuals.py"),
    *("spmd/shard_map/operation.py", "spmd/shard_map/mapped.py"),
)

#: The parts of minidiff that it stands on: no speed, no compiler, no libraries.
STANDS_ON = (
    *("core", "api", "ops", "control_flow", "numpy", "errors", "values", "inputs", "checks", "tree"),
    *("printing.py", "__init__.py"),
)

#: The packages' `__init__.py` in the copy.
PACKAGES = {
    "collectives": (
        "from collectives.casts import *\n"
        "from collectives.ops import *\n"
        "from minidiff.core.ranks import install\n"
        "install(TypedRanks)\n"
    ),
    "spmd": (
        "from spmd.mesh.mesh import Mesh, make_mesh\n"
        "from spmd.mesh.specs import P\n"
        "from spmd.shard_map.mapped import Mapped as shard_map\n"
    ),
}


@pytest.fixture
def copy(tmp_path):
    """A copy of the library that has the heart of ranks, and what it stands on."""
    for name in RANKS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
        (tmp_path / name).parent.joinpath("__init__.py").touch()
    for name, text in PACKAGES.items():
        (tmp_path / name / "__init__.py").write_text(text)
    for name in STANDS_ON:
        source, target = ROOT / "minidiff" / name, tmp_path / "minidiff" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    for name in ("house/heart_of_ranks.py", "programs/jep_examples.py", "checks/whole.py"):
        target = tmp_path / "tests" / name
        target.parent.mkdir(parents=True)
        shutil.copy(ROOT / "tests" / name, target)
        (target.parent / "__init__.py").touch()
    (tmp_path / "tests" / "__init__.py").touch()
    return tmp_path


def test_the_heart_of_ranks_works_with_everything_else_deleted(copy):
    run = [sys.executable, "-m", "tests.house.heart_of_ranks"]
    result = subprocess.run(run, cwd=copy, env={"PYTHONPATH": str(copy)}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    files = {name.removesuffix(".py").replace("/", ".") for name in RANKS}
    assert files < {*result.stdout.split()}  # it has run from all of them


def test_lines_of_code_are_counted(tmp_path):
    text = '"""A module."""\n\nx = (\n    1\n)\n\ndef f():\n    """Do."""  # not\n    return x\n'
    (tmp_path / "module.py").write_text(text)
    assert code_lines(tmp_path / "module.py") == 5


def test_the_heart_of_ranks_can_be_projected():
    assert sum(code_lines(ROOT / name) for name in RANKS) <= 1_900
