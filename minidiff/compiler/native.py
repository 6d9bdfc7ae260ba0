"""Machine code: compile LLVM's intermediate representation (IR), keep the result on disk, call it from NumPy.

A kernel becomes a NumPy ufunc, or a generalized one. So NumPy does for it what it does for its own functions: it
broadcasts, walks over strides, and allocates results.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import itertools
import os
import platform
import stat
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from minidiff.values import VERSION


@functools.cache
def is_wanted() -> bool:
    """Return True unless the environment variable MINIDIFF_KERNELS leaves all operations to NumPy."""
    return os.environ.get("MINIDIFF_KERNELS", "1") != "0"


@functools.cache
def is_available() -> bool:
    """Return True if kernels are wanted, and llvmlite is installed."""
    return is_wanted() and importlib.util.find_spec("llvmlite") is not None


# ---------------------------------------------------------------- compiling


@functools.cache
def _llvm() -> Any:
    import llvmlite.binding as llvm  # takes longer to load than all of minidiff

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@functools.cache
def processor() -> tuple[str, str]:
    """Return the name of this processor, and the instructions that it has.

    LLVM takes half of a vector of 512 bits, which the first processors with such vectors ran at a lower frequency.
    Those that have the byte permutations of VBMI2, too, do not slow down.
    """
    llvm = _llvm()
    features = llvm.get_host_cpu_features().flatten()
    return llvm.get_host_cpu_name(), features + ",-prefer-256-bit" * ("+avx512vbmi2" in features)


#: Lines of IR above which LLVM takes its faster code generator, whose time does not grow faster than the code: long
#: kernels are straight lines of arithmetic, which run as fast either way.
LONG = 1500


@functools.cache
def _target(opt: int) -> Any:
    cpu, features = processor()
    return _llvm().Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=opt)


def compile_module(ir: str) -> bytes:
    """Optimize IR, and compile it to an object file."""
    llvm, target = _llvm(), _target(1 if ir.count("\n") > LONG else 2)
    module = llvm.parse_assembly(ir)
    module.triple, module.data_layout = target.triple, str(target.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization, options.slp_vectorization, options.loop_unrolling = True, False, False
    passes = llvm.create_pass_builder(target, options)
    passes.getModulePassManager().run(module, passes)
    return target.emit_object(module)


# ---------------------------------------------------------------- the cache on disk


def cache_directory() -> str | None:
    """Return the directory of compiled kernels, which belongs to its user alone; None if there can be none.

    It is `MINIDIFF_CACHE`, or `minidiff` in the user's directory of caches. Since it holds code, a directory that
    others may write into is refused, with a warning.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = os.path.expanduser(os.environ.get("MINIDIFF_CACHE") or os.path.join(base, "minidiff"))
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.stat(path)
    except OSError as error:
        _warn_once(f"compiled kernels are not kept on disk: {error}")
        return None
    is_owner = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    if not is_owner or (os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        _warn_once(
            f"compiled kernels are not cached on disk, since other users could replace the code in {path}: make the "
            f"directory private (chmod 700), or set MINIDIFF_CACHE to another one"
        )
        return None
    return path


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def object_file(ir: str) -> bytes:
    """Return the object file of IR: from the cache, or compiled and put there."""
    directory = cache_directory()
    if directory is None:
        return compile_module(ir)
    path = os.path.join(directory, f"{_key(ir)}.o")
    data = _read(path)
    if data is not None:
        return data
    with _locked(path):
        data = _read(path)  # another process may have written it since
        if data is None:
            data = compile_module(ir)
            _write(path, data)
    return data


def _key(ir: str) -> str:
    """Return the cache key of an object file: of the IR, the processor and its instructions, and all versions."""
    import llvmlite  # not yet LLVM, which takes long to load

    return _hash("\0".join((ir, _describe_processor(), VERSION, llvmlite.__version__)).encode()).hex()


@functools.cache
def _describe_processor() -> str:
    """Return what tells processors with other instructions apart: in the words of Linux, or of LLVM."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        names = ("vendor_id", "cpu family", "model", "stepping", "flags")
        text = "".join([line for line in itertools.takewhile(str.strip, file) if line.startswith(names)])
        if "flags" in text:
            return text
    return str(processor())


def _hash(data: bytes) -> bytes:
    try:  # `hashlib` loads OpenSSL, which takes longer than the rest
        sha2 = importlib.import_module("_sha2")
    except ImportError:  # before Python 3.12
        sha2 = importlib.import_module("hashlib")
    return sha2.sha256(data).digest()


def _read(path: str) -> bytes | None:
    """Return the content of a file after the hash of it; None if there is none, or it is damaged."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    return data[32:] if _hash(data[32:]) == data[:32] else None


def _write(path: str, content: bytes) -> None:
    """Write a file by another name, then rename it: a reader finds all of it or nothing."""
    import tempfile  # as slow to load

    try:
        descriptor, name = tempfile.mkstemp(dir=os.path.dirname(path))
        try:
            with open(descriptor, "wb") as file:
                file.write(_hash(content) + content)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        _warn_once(f"compiled kernels are not kept on disk: {error}")


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Let one process at a time compile a kernel. The system frees the lock of a process that dies.

    Where there are no such locks (on Windows, on some network file systems), each process compiles.
    """
    lock = f"{os.path.splitext(path)[0]}.lock"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            file = stack.enter_context(open(lock, "w"))
            stack.callback(_remove, lock)
            fcntl.flock(file, fcntl.LOCK_EX)
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a child that was forked meanwhile holds it, too
        yield


# ---------------------------------------------------------------- functions of NumPy

_engines: list[Any] = []  # they own the machine code


def load_function(ir: str, name: str) -> int:
    """Compile IR, or take it from the cache, and return the address of one of its functions."""
    data = object_file(ir)
    if address := _load_elf(data, name):
        return address
    llvm = _llvm()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target(2))
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(name)


_PROGBITS, _SYMBOLS, _RELOCATIONS, _ZEROS = 1, 2, 4, 8  # types of sections in an ELF file


def _load_elf(data: bytes, name: str) -> int | None:
    """Load an object file for Linux on x86-64, and return a function's address; None for any other file.

    LLVM would do the same, but takes long to load. Memory gets a copy of the file in which all addresses, which have 64
    bits, are filled in.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or data[:6] != b"\x7fELF\x02\x01":
        return None
    import mmap  # not on every platform

    start, count = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<H", data, 60)
    sections = [
        *struct.iter_unpack("<4xI16xQQII16x", data[start : start + 64 * count])
    ]  # type, place, size, link, info
    memory, process = mmap.mmap(-1, len(data), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), ctypes.CDLL(None)
    memory.write(data)
    base, values, addresses = ctypes.addressof(ctypes.c_char.from_buffer(memory)), [], {}
    _, place, size, link, _ = next(section for section in sections if section[0] == _SYMBOLS)
    for at, section, value in struct.iter_unpack("<I2xHQ8x", data[place : place + size]):
        at += sections[link][1]
        symbol = data[at : data.index(b"\0", at)].decode()
        if section == 0 and symbol:
            value = ctypes.cast(getattr(process, symbol), ctypes.c_void_p).value
        elif section < count:
            value += base + sections[section][1]
        values.append(value)
        addresses[symbol] = value
    for kind, place, size, _, target in sections:
        if kind == _ZEROS and size:
            return None
        if kind == _RELOCATIONS and sections[target][0] == _PROGBITS:
            for at, kind, symbol, offset in struct.iter_unpack("<QIIq", data[place : place + size]):
                if kind != 1:  # not an address of 64 bits
                    return None
                struct.pack_into("<Q", memory, sections[target][1] + at, values[symbol] + offset)
    if process.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(data)), mmap.PROT_READ | mmap.PROT_EXEC):
        return None
    _engines.append(memory)
    return addresses[name]


@functools.cache
def _numpy_api() -> Any:
    """Return the table of C functions that NumPy offers for ufuncs."""
    umath = importlib.import_module("numpy._core._multiarray_umath")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.cast(pointer(umath._UFUNC_API, None), ctypes.POINTER(ctypes.c_void_p))


#: The place of PyUFunc_FromFuncAndDataAndSignature in the table, part of NumPy's binary interface.
_FROM_SIGNATURE = 31


def make_ufunc(
    name: str, address: int, inputs: Sequence[Any], outputs: Sequence[Any], signature: str | None, data: Any
) -> numpy.ufunc:
    """Make a ufunc from the address of its inner loop and the dtypes of operands and results.

    With a signature, it is a generalized one. `data`, a ctypes object, is the loop's last argument.
    """
    loops, datas = (ctypes.c_void_p * 1)(address), (ctypes.c_void_p * 1)(ctypes.addressof(data))
    numbers = bytes([numpy.dtype(d).num for d in (*inputs, *outputs)])
    types = ctypes.create_string_buffer(numbers, len(numbers))
    texts = [name.encode(), b"A fused loop, compiled by LLVM.", signature and signature.encode()]
    make = ctypes.PYFUNCTYPE(
        ctypes.py_object, *[ctypes.c_void_p] * 3, *[ctypes.c_int] * 4, *[ctypes.c_char_p] * 2, ctypes.c_int,
        ctypes.c_char_p,
    )(_numpy_api()[_FROM_SIGNATURE])  # fmt: skip
    ufunc = make(loops, datas, types, 1, len(inputs), len(outputs), -1, *texts[:2], 0, texts[2])
    _references[ufunc] = loops, datas, types, texts, data  # NumPy keeps their addresses only
    return ufunc


_references: dict[numpy.ufunc, tuple] = {}


def loop_of(ufunc: numpy.ufunc) -> tuple[Callable, Any]:
    """Return the inner loop of a ufunc made here, which Python's lock does not hold up, and its last argument."""
    (address,), *_, data = _references[ufunc]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(address), ctypes.addressof(data)
