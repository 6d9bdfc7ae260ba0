"""Compiled kernels on disk: written once, read without LLVM, and left alone where that is not safe."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from minidiff.compiler import native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs llvmlite: pip install '.[compiled]'")
of_posix = pytest.mark.skipif(os.name != "posix", reason="Windows has no such locks and permissions")

ELF = sys.platform == "linux" and platform.machine() == "x86_64"
PROGRAM = "import numpy, minidiff as md; x = numpy.ones(20_000); print(md.jit(lambda x: x * 2.5 + 1)(x)[0])"


FOUR = "; ".join([PROGRAM, *[f"md.jit(lambda x: x * {k}.5 - 1)(x)" for k in range(3)]])


def start(directory, code=PROGRAM):
    env = {**os.environ, "MINIDIFF_CACHE": str(directory)}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=-1, stderr=-1, text=True)


def run_with(directory, code=PROGRAM):
    """Run a program; return what it prints, and its errors."""
    process = start(directory, code)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return out, errors


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The object file of the program's kernel, and those of three others."""
    folder = tmp_path_factory.mktemp("kernels")
    run_with(folder, FOUR)
    return {path.name: path.read_bytes() for path in folder.glob("*.o")}


@pytest.fixture
def compiled(whole, tmp_path):
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_kernels_are_compiled_once_and_then_read(compiled):
    created = {path: path.stat().st_mtime_ns for path in compiled.iterdir()}
    assert run_with(compiled)[0] == "3.5\n"
    assert created == {path: path.stat().st_mtime_ns for path in compiled.iterdir()}


DAMAGES = [lambda b: b[:-10], lambda b: b"", lambda b: b[:100] + b"x" + b[101:], lambda b: b * 2]


def test_damaged_files_are_compiled_anew(compiled, whole):
    for path, damage in zip(sorted(compiled.iterdir()), DAMAGES, strict=True):
        path.write_bytes(damage(whole[path.name]))
    assert run_with(compiled, FOUR)[0] == "3.5\n"
    assert {path.name: path.read_bytes() for path in compiled.iterdir()} == whole


@pytest.mark.parametrize("load", ["native._load_elf", "lambda *_: None"])
def test_cached_kernels_run_without_llvm(compiled, load):
    code = f"import sys; from minidiff.compiler import native; native._load_elf = {load}\n{PROGRAM}"
    code += "\nprint('llvmlite.binding' in sys.modules)"
    assert run_with(compiled, code)[0] == f"3.5\n{not (ELF and 'native' in load)}\n"


@pytest.mark.skipif(not ELF, reason="these files are for Linux on x86-64")
def test_object_files_with_other_addresses_are_left_to_llvm(whole):
    data = next(iter(whole.values()))[32:]
    sections, count = int.from_bytes(data[40:48], "little"), int.from_bytes(data[60:62], "little")
    headers = [data[at : at + 64] for at in range(sections, sections + 64 * count, 64)]
    place = next(int.from_bytes(h[24:32], "little") for h in headers if h[4] == 4)  # of addresses
    other = data[: place + 8] + b"\2" + data[place + 9 :]
    assert native._load_elf(data, "kernel") and native._load_elf(other, "kernel") is None
    assert native._load_elf(b"MZ" + data[2:], "kernel") is None


def test_processes_that_start_together_compile_once(tmp_path):
    counting = (
        "from minidiff.compiler import native; compile_ = native.compile_module\n"
        "def counted(ir): print('compiled'); return compile_(ir)\n"
        "native.compile_module = counted\n"
    )
    texts = [p.communicate(timeout=120)[0] for p in [start(tmp_path, counting + PROGRAM) for _ in range(4)]]
    assert all("3.5" in text for text in texts)
    assert sum("compiled" in text for text in texts) == 1
    assert not list(tmp_path.glob("*.lock"))


def test_a_lock_that_was_left_does_not_stop_anyone(compiled):
    for path in [*compiled.iterdir()]:
        path.rename(path.with_suffix(".lock"))
    assert run_with(compiled, FOUR)[0] == "3.5\n"
    assert {path.suffix for path in compiled.iterdir()} == {".o"}


#: Programs with a lock: a child that was forked while another thread compiled; and a process that dies.
HOLDERS = {
    "a forked child": "if not os.fork():\n"
    "  with native._locked(path): os._exit(0)\n"
    " time.sleep(0.5)  # the child waits meanwhile\n"
    "os.wait()",
    "a process that died": "os._exit(0)",
}


@of_posix
@pytest.mark.parametrize("name", HOLDERS)
def test_locks_are_free_when_their_holder_is_gone(tmp_path, name):
    path = tmp_path / "kernel.o"
    code = f"import os, time; from minidiff.compiler import native; path = {str(path)!r}\nwith native._locked(path):\n "
    run_with(tmp_path, code + HOLDERS[name])
    with native._locked(path):
        assert path.with_suffix(".lock").exists()
    assert not path.with_suffix(".lock").exists()


FULL_DISK = "import os\ndef full(*a): raise OSError(28, 'No space left on device')\nos.replace = full\n"
#: What the cache's directory is like, the program, and what the warning names.
REFUSED = {
    "others may write": (lambda path: path.chmod(0o777) or path, PROGRAM, "chmod 700"),
    "it is in a file": (lambda path: (path / "file").touch() or path / "file" / "cache", PROGRAM, "cache"),
    "the disk is full": (lambda path: path, FULL_DISK + PROGRAM, "No space left"),
}


@of_posix
@pytest.mark.parametrize("name", REFUSED)
def test_a_directory_that_is_not_safe_is_only_a_warning(tmp_path, name):
    prepare, program, words = REFUSED[name]
    out, errors = run_with(prepare(tmp_path), program)
    assert out == "3.5\n" and errors.count("RuntimeWarning") == 1 and words in errors
    assert [p for p in tmp_path.iterdir() if Path(p).name != "file"] == []
