"""Hold the pages about JAX against the JAX that is installed: `python -m tests.benchmarks.jax_pages`.

The programs of `docs/guide/types-elsewhere.md` run here and in JAX, and have equal results; the collectives of both are
those in its table. The names of JAX on `docs/coming-from.md` exist, and the defaults that differ are those that it
lists.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy

import collectives
import minidiff as md
import spmd

from . import jax_states, libraries, state_names

DOCS = Path(__file__).parents[2] / "docs"
TYPES, COMING = (DOCS / name for name in ("guide/types-elsewhere.md", "coming-from.md"))
#: Collectives on the page, by the kinds that both count.
ON_PAGE = {"all-reduce": "psum", "reduce-scatter": "psum_scatter", "all-gather": "all_gather"}

# ---------------------------------------------------------------- programs that run here and there


def section(text: str, heading: str) -> str:
    """Return the text below a heading, up to the next of its level (one "#" begins a comment in code)."""
    level = re.match("#+", heading)[0]
    return re.split(rf"(?m)^#{{2,{len(level)}}} ", text.partition(f"\n{heading}\n")[2])[0]


def programs(text: str) -> dict[str, str]:
    """Return the sections with a program for each side, by title."""
    parts = re.split(r"(?m)^### ", section(text, "## The same programs"))
    return {"": parts[0]} | {title: body for title, _, body in (part.partition("\n") for part in parts[1:])}


def our_code(text: str) -> str:
    return "".join(example.source for example in doctest.DocTestParser().get_examples(text))


def their_code(text: str) -> str:
    return "".join(re.findall(r"(?ms)^```python\n(# JAX.*?)^```", text))


def our_counts(names: dict[str, Any]) -> Counter:
    return state_names.by_kind(spmd.communication(names["program"])(*names["arrays"]).counts)


def their_counts(jax: ModuleType, names: dict[str, Any], arrays: list) -> Counter:
    """Return the collectives of the trace, without dead code."""
    jaxpr = libraries.without_dead_code(jax.make_jaxpr(names["program"])(*arrays).jaxpr)
    return libraries.in_jaxpr(jaxpr, lambda eqn: state_names.KINDS.get(eqn.primitive.name))


def shown(counts: Counter) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted((ON_PAGE.get(kind, kind), n) for kind, n in counts.items()))


def run_ours(text: str) -> dict[str, dict[str, Any]]:
    """Run the programs of the page here; return the names that each defines."""
    common: dict[str, Any] = {}
    results = {}
    for title, body in programs(text).items():
        with contextlib.redirect_stdout(io.StringIO()):
            exec(our_code(body), common)
        results[title] = dict(common)
    results.pop("")
    return results


def table_of_counts(text: str) -> dict[str, list[str]]:
    """Return the rows of the page's table of collectives, by program."""
    table = text.partition("| program | here | JAX |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = re.findall(r"(?m)^\| (.+?) \| (.+?) \| (.+?) \|$", table)
    return {title: [ours, theirs] for title, ours, theirs in rows}


def compare_programs(jax: ModuleType, text: str) -> Iterator[str]:
    """Run every program in JAX too, and yield a line for each.

    Raises AssertionError where results differ from those here, or collectives from the page's table.
    """
    common: dict[str, Any] = {}
    ours, actual = run_ours(text), {}
    for title, body in programs(text).items():
        exec(their_code(body), common)
        if not title:
            continue
        names = ours[title]
        arrays = [jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), spec))
                  for x, spec in zip(names["arrays"], common["specs"], strict=True)]  # fmt: skip
        results = [jax.tree.leaves(common["program"](*arrays)), md.tree.leaves(names["program"](*names["arrays"]))]
        for one, other in zip(*results, strict=True):
            numpy.testing.assert_allclose(numpy.asarray(one), numpy.asarray(other), rtol=1e-10, err_msg=title)
        counts = [shown(our_counts(names)), shown(their_counts(jax, common, arrays))]
        actual[title] = counts
        yield f"{title}: results agree; here {counts[0]}, JAX {counts[1]}"
    rows = "\n".join(f"| {title} | {' | '.join(counts)} |" for title, counts in actual.items())
    assert table_of_counts(text) == actual, f"the table of collectives should have the rows\n{rows}"


# ---------------------------------------------------------------- what each refuses


def _outcome(body: Callable, out_spec: str = "P('i')") -> Callable:
    """Return a function of the names of one side that runs a body on `w`, the same on all ranks, and `x`, split."""

    def run(m: jax_states.Names) -> Any:
        outs = m.P("i") if out_spec == "P('i')" else m.P()
        f = m.shard_map(lambda w, x: body(m, w, x), (m.P(), m.P("i")), outs)
        return m.run(f, m.put(numpy.ones(2), m.P()), m.put(numpy.ones(8), m.P("i")))

    return run


#: The rows of the table "Programs that each system rejects": a program, and whether this project and JAX run it.
REFUSED: dict[str, tuple[Callable, bool, bool]] = {
    "`tanh` of an unreduced value": (
        _outcome(lambda m, w, x: m.psum(m.np.tanh(m.pcast(x, "unreduced"))), "P()"), False, False),
    "an unreduced plus a varying value": (
        _outcome(lambda m, w, x: m.psum(m.pcast(x, "unreduced") + x), "P()"), False, False),
    "an invariant value times a varying one": (_outcome(lambda m, w, x: w * x), True, True),
    "a reduced value plus an invariant one": (
        _outcome(lambda m, w, x: m.pcast(w, "reduced") + w + x), True, False),
    "a result that varies, with the spec `P()`": (_outcome(lambda m, w, x: x, "P()"), False, False),
    "Python's `if` on a varying value": (
        _outcome(lambda m, w, x: x if m.np.sum(x) > 0 else -x), False, False),
}  # fmt: skip


def accepts(run: Callable, m: jax_states.Names) -> bool:
    try:
        run(m)
    except Exception:  # whatever it is: it is refused
        return False
    return True


# ---------------------------------------------------------------- the names and defaults of "Coming from JAX"


def rows_of_names(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the names in each row of the table of names: JAX's in full, and those here as written."""
    for line in re.findall(r"(?m)^\| (`.*) \|$", section(text, "## JAX").partition("What surprises")[0]):
        theirs, ours = (re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")[:2])
        prefix, full = "", []
        for name in (name.partition("(")[0] for name in theirs if " " not in name.partition("(")[0]):
            if name.startswith(("jax", "optax")):
                prefix = name.rpartition(".")[0]
            full.append(name if name.startswith(("jax", "optax")) else f"{prefix}.{name}")
        if full:
            yield full, ours


def missing_names(text: str) -> list[str]:
    """Return the names of JAX on the page that the installed JAX lacks, or has deprecated."""
    missing = []
    for name in (name for theirs, _ in rows_of_names(text) for name in theirs):
        if name.startswith("jax"):
            try:
                find(name)
            except (AttributeError, ImportError, DeprecationWarning) as error:
                missing.append(f"{name}: {error}")
    return missing


def find(path: str) -> Any:
    """Return what a dotted path names, importing modules on the way. A deprecated name raises DeprecationWarning."""
    import warnings

    package, *rest = path.split(".")
    x, done = importlib.import_module(package), package
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        for name in rest:
            done = f"{done}.{name}"
            if not hasattr(x, name):
                with contextlib.suppress(ImportError):
                    importlib.import_module(done)
            x = getattr(x, name)
    return x


#: Where JAX has functions of the same names, and where they are here.
MODULES = {
    "jax": (md, spmd),
    "jax.lax": (md, collectives),
    "jax.nn": (md.nn,),
    "jax.random": (md.random,),
    "jax.tree": (md.tree,),
}


def differing_defaults() -> set[str]:
    """Return the parameters, as `jax.nn.one_hot(dtype)`, whose default here is another one than in JAX."""
    different = set()
    for module, packages in MODULES.items():
        theirs = find(module)
        for package in packages:
            for name in package.__all__:
                for parameter in _differing(getattr(theirs, name, None), getattr(package, name)):
                    different.add(f"{module}.{name}({parameter})")
    return different


def _differing(theirs: Any, ours: Any) -> Iterator[str]:
    if inspect.isclass(ours) or not (callable(theirs) and callable(ours)):
        return
    with contextlib.suppress(ValueError, TypeError):  # no signature
        there, here = (inspect.signature(f).parameters for f in (theirs, ours))
        for name in there.keys() & here.keys():
            one, other = there[name].default, here[name].default
            if not (_same(one, other) or type(other) is object):  # an object that marks what was not passed
                yield name


def _same(one: Any, other: Any) -> bool:
    nothing = (None, inspect.Parameter.empty, (), frozenset())
    if any(one is x for x in nothing):
        return any(other is x for x in nothing)
    return repr(one) == repr(other) or (isinstance(one, (int, float)) and one == other)


def listed_defaults(text: str) -> set[str]:
    """Return the parameters that the page lists as having another default: `jax.random.normal(dtype)`."""
    part = section(text, "### Defaults that differ")
    return set(re.findall(r"`(jax[\w.]+\(\w+\))`", part))


def main() -> int:
    jax = libraries.jax(jax_states.RANKS)
    if jax is None:
        print("JAX is not installed: pip install jax")
        return 0
    print(f"JAX {jax.__version__}")
    failures = []
    try:
        for line in compare_programs(jax, TYPES.read_text()):
            print(line)
    except AssertionError as error:
        failures.append(str(error))
    ours, theirs = jax_states.our_names(), jax_states.jax_names()
    for title, (run, here, there) in REFUSED.items():
        if (actual := (accepts(run, ours), accepts(run, theirs))) != (here, there):
            failures.append(f"{title}: runs here and in JAX: {actual}, not {(here, there)}")
    text = COMING.read_text()
    failures += [f"{COMING.name} names {name}" for name in missing_names(text)]
    actual, listed = differing_defaults(), listed_defaults(text)
    failures += [f"{COMING.name} does not list the default of {name}" for name in sorted(actual - listed)]
    failures += [f"{COMING.name} lists the default of {name}, which is the same" for name in sorted(listed - actual)]
    print(*failures or ["names, defaults and refused programs are as the pages say"], sep="\n")
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
