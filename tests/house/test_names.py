"""Functions that modules share are verbs or nouns, and no function has the name of one that its module imports."""

import ast
import functools
import re
from pathlib import Path

import pytest

import spmd
from spmd.examples import megatron_3d

ROOT = Path(__file__).parents[2]
FILES = [path for layer in ("minidiff", "collectives", "spmd") for path in sorted((ROOT / layer).rglob("*.py"))]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def trees():
    """Each file's tree, and its imports: those of a module and of functions."""
    parsed = {path: ast.parse(path.read_text()) for path in FILES}
    imports = (ast.Import, ast.ImportFrom)
    return {path: (tree, [n for n in ast.walk(tree) if isinstance(n, imports)]) for path, tree in parsed.items()}


#: Words that say in which state a thing is, or where, but neither what to do nor what comes back.
PARTICIPLE = re.compile(
    "[a-z]+(ed|ing)|apart|alone|along|aside|away|both|built|chosen|drawn|everyone|everywhere|frozen|given|held|here|kept"
    "|known|lent|made|seen|shown|taken|there|together|written"
)
#: Nouns and verbs that end as participles do; then the names that users import from `collectives` and `spmd`.
ALLOWED = re.compile(
    "embed|embedding|feed|mapping|need|padding|seed|setting|sharding|speed|string|timing|searchsorted"
    "|checking|gathered|gathering|interleaved|reduced|rewritten|routed|scheduled|unreduced"
)


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_participle(name):
    word = name.strip("_")
    return bool(PARTICIPLE.fullmatch(word)) and not ALLOWED.fullmatch(word)


def test_functions_that_modules_share_are_verbs_or_nouns():
    imports = [node for _, nodes in trees().values() for node in nodes if isinstance(node, ast.ImportFrom)]
    shared = {(node.module, alias.name) for node in imports for alias in node.names}
    tops = [(module_of(path), node) for path, (tree, _) in trees().items() for node in tree.body]
    functions = {(module, node.name) for module, node in tops if isinstance(node, FUNCTIONS)}
    assert sorted(f"{module}.{name}" for module, name in shared & functions if is_participle(name)) == []


def test_no_function_has_the_name_of_an_imported_one():
    results = []
    for path, (tree, imports) in trees().items():
        imported = {alias.asname or alias.name for node in {*imports} & {*tree.body} for alias in node.names}
        methods = {f for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for f in node.body}
        functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS) and node not in methods]
        results += [f"{path.relative_to(ROOT)}:{f.lineno}: {f.name}" for f in functions if f.name in imported]
    assert results == []


def test_participles_are_found():
    assert [name for name in ("chosen", "resharded", "_joined", "apart") if not is_participle(name)] == []
    assert [
        name for name in ("choose", "sharding", "checked_tangent", "gather", "with_states") if is_participle(name)
    ] == []


def test_names_that_moved_are_there_and_warn():
    with pytest.warns(DeprecationWarning, match="is now spmd.examples.megatron_3d"):
        assert spmd.parallel.megatron_3d is megatron_3d
