"""Arguments that differ over ranks: all ranks say so, at the calls that compare values, and never where they agree."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy

ARRAYS = [
    "rng.normal(size={})",
    "numpy.asfortranarray(rng.normal(size={}))",
    "rng.normal(size={})[..., ::-1]",
    "rng.normal(size={}).astype('f4')",
    "rng.normal(size={}).astype('f2')",
    "rng.normal(size={}) + 1j",
    "rng.integers(-5, 5, size={})",
    "rng.integers(0, 2, size={}).astype(bool)",
    "numpy.full({}, numpy.nan)",
]
NUMBERS = ["float(rng.normal())", "int(rng.integers(9))", "numpy.float32(rng.normal())"]
#: What is made of the function; each calls it once.
WRAPS = [
    "lambda f: f",
    "md.jit",
    "lambda f: lambda *args: md.value_and_grad(lambda s: s * f(*args))(2.0)[0]",
    "lambda f: lambda *args: md.jit(md.grad(lambda s: s * f(*args)))(2.0)",
    "lambda f: lambda *args: md.vmap(lambda s: s * f(*args))(numpy.ones(2))[0]",
    "lambda f: md.jit(lambda *args: md.scan(lambda c, _: (c + f(*args), None), 0.0, None, length=1)[0])",
]
OTHERS: dict[str, Callable[[Any], Any]] = {
    "larger": lambda x: x + 1,
    "a number": lambda x: 7 if x != 7 else 8,
    "infinite": lambda x: numpy.inf if x != numpy.inf else 0,
    "not a number": lambda x: numpy.nan if x == x else 0,
    "negative": lambda x: -x - 1,
}


def change(x: Any, other: str, at: int) -> Any:
    """A copy of an array, or a number, with another value of the element `at`."""
    array = numpy.array(x, order="C")
    flat = array.reshape(-1)
    k = at % flat.size
    if array.dtype == bool:
        flat[k] = not flat[k]
    else:
        with numpy.errstate(all="ignore"):
            value = OTHERS[other](flat[k]) if flat[k] == flat[k] else 1
        flat[k] = value if array.dtype.kind in "fc" or numpy.isfinite(value) else flat[k] + 1
    return array if isinstance(x, numpy.ndarray) else type(x)(array)


def function(name: str) -> Callable:
    """A function of blocks, under a name that no program has used: calls are counted by it."""
    import minidiff as md
    import minidiff.numpy as np
    from collectives import psum

    def total(*args: Any) -> Any:
        return psum(sum([np.sum(np.abs(x * 1.0)) for x in md.tree.leaves(args)]) * 1.0 + np.zeros(1)[0], "i")

    total.__name__ = name
    return total


def arguments_differ(rng: random.Random) -> str:
    """Draw a function of a tree of arguments; on one rank, from some call on, one element may be another."""
    count, calls = rng.randint(1, 5), rng.randint(1, 9)
    leaves, specs = [], []
    for _ in range(count):
        shape, split = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))], rng.random() < 0.4
        first = f"SIZE * {shape[0]}" if split else str(shape[0])
        array = rng.choice(ARRAYS).format(f"({first}, {', '.join(map(str, shape[1:]))})")
        leaves.append(array if split or rng.random() < 0.7 else rng.choice(NUMBERS))
        specs.append("P('i')" if split else "P()")
    half = rng.randint(0, count)  # a dictionary of some, and a list of the others
    tree = f"({{k: [v[k]] for k in range({half})}}, v[{half}:])"
    return f"""
        from tests.fuzz.routes.agreement import change, function
        rng = numpy.random.default_rng({rng.getrandbits(32)})
        v, specs = [{", ".join(leaves)}], [{", ".join(specs)}]
        differ, leaf, who = {rng.random() < 0.5} and SIZE > 1, {rng.randrange(count)}, {rng.randrange(12)} % SIZE
        begins = {rng.randint(1, calls)}
        total = function('f{rng.getrandbits(48)}')
        def make():
            f = spmd.shard_map(total, mesh, in_specs={tree.replace("v[", "specs[")}, out_specs=P(), check_rep=False)
            return ({rng.choice(WRAPS)})(f)
        f = make()
        for call in range(1, {calls + 1}):
            if differ and call == begins and rank == who:
                v[leaf] = change(v[leaf], {rng.choice([*OTHERS])!r}, {rng.getrandbits(20)})
            try:
                ({"make()" if rng.random() < 0.3 else "f"})(*{tree})
                message = ''
            except ValueError as error:
                message = str(error)
            due = differ and call >= begins and call & (call - 1) == 0
            assert bool(message) == due, f'call {{call}}, differs from {{begins}}, {{due}}: {{message}}'
            if due:
                name = f'args[0][{{leaf}}][0]' if leaf < {half} else f'args[1][{{leaf - {half}}}]'
                assert f'ranks have different values of {{name}} of {{total.__name__}}: ' in message, message
                break
        spmd.barrier()
    """
