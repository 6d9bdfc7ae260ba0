"""The installed packages: imports, version, extras, and the files of a source distribution."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import collectives
import minidiff
import spmd
from tests import PATIENCE

ROOT = Path(__file__).parents[2]
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")


def python(*arguments, cwd, **environment):
    """A run of Python that finds the packages as they are installed: not by PYTHONPATH, unless that is given."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=cwd, env={**outside, **environment}, capture_output=True, text=True, timeout=PATIENCE
    )


# ---------------------------------------------------------------- imports


@pytest.fixture
def above_a_clone(tmp_path):
    """A directory with a clone in it, which has the name of a package and is none."""
    (tmp_path / "minidiff").symlink_to(ROOT)
    return tmp_path


def test_import_above_a_clone(above_a_clone):
    run = python("-c", "import minidiff as md, collectives, spmd; md.grad, collectives.psum, spmd.P", cwd=above_a_clone)
    assert (run.returncode, run.stderr) == (0, "")


def test_imports_load_no_module_that_only_errors_need(tmp_path):
    """Python asks modules for names that they lack when it imports, and the advice for these is slow to load.

    The advice for keywords is, too: calls with keywords that are right do not load it.
    """
    command = "import sys, minidiff, spmd, minidiff.optim; minidiff.vmap(abs, in_axes=0)"
    command += "; print({'json', 'difflib'} & {*sys.modules})"
    run = python("-c", command, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert (run.returncode, run.stdout.strip()) == (0, "set()"), run.stderr


def test_type_checkers_find_the_packages_above_a_clone(above_a_clone):
    (above_a_clone / "script.py").write_text("import minidiff as md\nimport collectives, spmd\nfrom spmd import P\n")
    run = python("-m", "mypy", "--follow-imports=skip", "script.py", cwd=above_a_clone)
    assert run.returncode == 0, run.stdout


SUM = "import collectives\n\ntotal: str = collectives.psum(1, 'i')\n"
IN_FLIGHT = """
import numpy as np
import collectives
x: np.ndarray[tuple[int], np.dtype[np.float64]] = np.ones(3)
collectives.ppermute_start(x, 'i', [(0, 1)]) + x
"""
#: Programs, and mypy's errors in them.
TYPED = {
    "right": ((ROOT / "tests/programs/typed_script.py").read_text(), []),
    "wrong_type": (SUM, ['3: error: Incompatible types in assignment (expression has type "int", variable']),
    "not_waited_for": (IN_FLIGHT, ["5: error: "]),
    "waited_for": (IN_FLIGHT.replace(" + x", ".wait() + x"), []),
}


def test_a_users_program_passes_strict_type_checks(tmp_path):
    for name, (program, _) in TYPED.items():
        (tmp_path / f"{name}.py").write_text(program)
    arguments = "-m", "mypy", "--strict", "--follow-imports=silent", *(f"{name}.py" for name in TYPED)
    lines = python(*arguments, cwd=tmp_path, MYPYPATH=str(ROOT)).stdout.splitlines()
    assert f"(checked {len(TYPED)} source files)" in lines[-1], lines
    for name, (_, errors) in TYPED.items():
        actual = [line for line in lines if line.startswith(f"{name}.py:") and " error: " in line]
        assert [e in line for e, line in zip(errors, actual, strict=True)] == [True] * len(errors), lines


def test_a_users_program_runs():
    run = python("-m", "tests.programs.typed_script", cwd=ROOT)
    assert run.returncode == 0, run.stderr
    first, last = map(float, run.stdout.split(" -> "))
    assert last < first / 2


# ---------------------------------------------------------------- the version


def test_there_is_one_version():
    assert minidiff.__version__ == collectives.__version__ == spmd.__version__
    assert SETTINGS["metadata"]["version"] == "attr: minidiff.values.VERSION"
    (newest,) = re.findall(r"\A.*?^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M | re.S)
    released, _, dev = minidiff.__version__.partition(".dev")
    assert newest == ("Unreleased" if dev else released)
    if dev:
        assert f"this will be {released}." in (ROOT / "CHANGELOG.md").read_text()


def test_each_version_has_one_screen_of_the_changelog_and_a_page():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = dict(re.findall(r"^## \[(.+?)\](.*?)(?=^## |\Z)", text, re.M | re.S))
    assert versions and max(section.count("\n") for section in versions.values()) <= 45
    for version, section in versions.items():
        page = minidiff.__version__.partition(".dev")[0] if version == "Unreleased" else version
        assert (ROOT / "docs" / "changes" / f"{page}.md").exists() and f"(docs/changes/{page}.md" in section


# ---------------------------------------------------------------- extras


def test_every_extra_is_explained():
    rows = re.findall(r"^\| (`.*?) \| ", (ROOT / "docs" / "guide" / "install.md").read_text(), re.M)
    assert {*re.findall(r"`(\w+)`", " ".join(rows))} == {*SETTINGS["options.extras_require"]}


# ---------------------------------------------------------------- the source distribution

FOLDERS = ("minidiff", "collectives", "spmd", "tests", "docs", "notebooks", ".ci", ".github")
FILES = ("*.md", "*.cfg", "*.cff", "*.toml", "*.in", "Makefile", "LICENSE", ".gitignore", ".pre-commit-config.yaml")


def test_a_source_distribution_is_whole(tmp_path):
    """Its files are those that setuptools lists: they are not packed here, which takes much longer."""
    junk = shutil.ignore_patterns(*(ROOT / ".gitignore").read_text().replace("/\n", "\n").split())
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=junk, copy_function=os.symlink)
    for file in (file for pattern in FILES for file in ROOT.glob(pattern)):
        os.symlink(file, tmp_path / file.name)
    files = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()}
    run = python("-c", "import setuptools; setuptools.setup(script_args=['egg_info'])", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    listed = (tmp_path / "minidiff.egg-info" / "SOURCES.txt").read_text().splitlines()
    assert sorted(files - {*map(os.path.normpath, listed)}) == [] and len(files) > 400


# ---------------------------------------------------------------- the wheel


def test_every_file_beside_the_modules_is_in_the_wheel():
    listed = {}
    for package, patterns in SETTINGS["options.package_data"].items():
        folder = ROOT / package.replace(".", "/")
        listed[package] = {path for pattern in patterns.split() for path in folder.glob(pattern)}
        assert listed[package], package
    junk = {".pyc", ".py"}
    files = {p for name in ("minidiff", "collectives", "spmd") for p in (ROOT / name).rglob("*") if p.is_file()}
    assert {path for path in files if path.suffix not in junk} == set().union(*listed.values())


def test_the_description_has_no_link_into_the_repository():
    """A package index has neither the files that README links to, nor its pictures."""
    (name,) = re.fullmatch(r"file: (\S+)", SETTINGS["metadata"]["long_description"]).groups()
    text = (ROOT / name).read_text()
    assert re.findall(r"\]\((?!https?://)|<img|<picture", text) == []
    sentence = (ROOT / "README.md").read_text().split("\n\n")[1]
    assert sentence in text and "without types" in text


# ---------------------------------------------------------------- where settings are


def test_pyproject_has_only_what_setup_cfg_cannot():
    tables = re.findall(r"^\[(?:tool\.)?([\w-]+)", (ROOT / "pyproject.toml").read_text(), re.M)
    assert {*tables} == {"build-system", "ruff"}
    assert {"metadata", "options", "tool:pytest", "mypy"} <= {*SETTINGS}


def test_the_oldest_python_is_tested():
    (matrix,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/test.yml").read_text())
    assert SETTINGS["options"]["python_requires"] == ">=" + matrix.split(", ")[0].strip('"')
