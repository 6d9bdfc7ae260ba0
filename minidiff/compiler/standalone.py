"""The functions that exported programs call: they are written into their files, and run there without this package.

A file defines the names in capitals, and `_program`, itself. See `export.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

TYPES: dict[str, tuple] = {}  # of each argument: its shape and dtype
RESULTS: list[str] = []
CONSTANTS: list[str] = []
CHECKSUM = ""
_program: Callable[..., list] = list


def scan_loop(*args: Any, body: Callable, length: int, consts: int, carry: int, reverse: bool) -> list:
    """Run `body(*consts, *carry, *elements)` for each element of arrays; stack its results after the carries."""
    shared, carried, arrays = args[:consts], list(args[consts : consts + carry]), args[consts + carry :]
    rows = []
    for i in range(length)[:: -1 if reverse else 1]:
        outs = body(*shared, *carried, *[x[i] for x in arrays])
        carried = outs[:carry]
        rows.append(outs[carry:])
    return [*carried, *[numpy.stack(column) for column in zip(*(rows[::-1] if reverse else rows))]]


def while_loop(*args: Any, cond: Callable, body: Callable, cond_consts: int, body_consts: int) -> list:
    """Run the body while the condition, which takes constants of its own, is true."""
    start = cond_consts + body_consts
    carry = args[start:]
    while cond(*args[:cond_consts], *carry)[0]:
        carry = body(*args[cond_consts:start], *carry)
    return list(carry)


def run_branch(index: Any, *args: Any, **branches: Callable) -> list:
    """Run the branch of this number; of True, the first one."""
    return list(branches.values())[int(index) if numpy.asarray(index).dtype != bool else 1 - int(index)](*args)


def run_body(*args: Any, body: Callable) -> list:
    return body(*args)


def as_argument(name: str, x: Any) -> Any:
    """Return an argument as an array of the program's type. Raises TypeError if it has another one."""
    shape, dtype = TYPES[name]
    array = numpy.asarray(x, dtype if isinstance(x, (bool, int, float, complex)) else None)
    if array.shape != shape or array.dtype != dtype:
        raise TypeError(f"{name} is {array.dtype}{list(array.shape)}, but this program takes {dtype}{list(shape)}")
    return array[()]


def check_keywords(keywords: dict[str, Any], names: Sequence[str]) -> None:
    """Raise TypeError unless a call has all keywords with these names, and no others."""
    if {*keywords} != {*names}:
        raise TypeError(f"this program takes the keywords {names}, got {[*keywords]}")


def load_constants(path: str) -> list:
    """Return the arrays of the file next to it. Raises ValueError if either file has changed."""
    arrays_path = Path(path).with_suffix(".npz")
    data = arrays_path.read_bytes() if CONSTANTS else b""
    code = Path(path).read_text(encoding="utf-8").replace(CHECKSUM, "", 1)
    checksum = hashlib.sha256(code.encode() + data).hexdigest()
    if checksum != CHECKSUM:
        raise ValueError(
            f"{path} or its arrays in {arrays_path.name} changed after the export: the checksum is {checksum}"
        )
    arrays = numpy.load(arrays_path) if CONSTANTS else {}
    return [arrays[name] for name in CONSTANTS]


def run_file(arguments: Sequence[str]) -> None:
    """Run the program on the arrays of an .npz file, by the names in TYPES, or on zeros; save results in another."""
    arrays = numpy.load(arguments[0]) if arguments else {name: numpy.zeros(*t) for name, t in TYPES.items()}
    outs = dict(zip(RESULTS, _program(*[as_argument(name, arrays[name]) for name in TYPES])))
    if len(arguments) > 1:
        numpy.savez(arguments[1], **outs)
    for name, x in outs.items():
        print(f"{name}: {x.dtype}{list(x.shape)}{f' = {x}' * (x.size == 1)}")
