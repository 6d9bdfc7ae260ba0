"""Names, docstrings, comments, messages and pages use the field's terms, not private words."""

import ast
import doctest
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: A private word, and the field's term for it.
TERMS = {
    r"\bsink(s|ing)?\b|\bsunk\b": "move past, delay",
    r"\b(lie|lies|lay|lying)\b": "is sharded; is",
    r"(?<![a-z])settle(s|d)?(?![a-z])": "reshard",
    r"\btak(e|es|en|ing) apart\b|\btook apart\b": "shard; split",
    r"\bown parts?\b": "local slice, local shard",
    r"\bdraft(s|ed)?\b": "traced body; partial evaluation",
    r"\bnarrow(s|ed)\b": "without unused results",
    r"\blockstep\b": "mismatch check",
    r"\bof (one|two) minds?\b": "agree; disagree",
    r"\bstands? against\b": "for; is matched with",
    r"\bwhat is no\b": "a non-array argument; what is not",
    r"\bhas_body\b": "higher-order",
    r"\bas (it|they) (lie|lies)\b": "as it is sharded",
    r"\bjoin(ed)? shard_?maps?\b": "fuse shard maps",
}
FOLDERS = ("minidiff", "collectives", "spmd", "docs", "notebooks", "tests")
PAGES = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md", ".ipynb")]
PAGES = [p for p in PAGES if "_build" not in p.parts]
PAGES.remove(Path(__file__))
PAGES += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]

#: Names that do not say what they hold.
EMPTY_NAMES = {"found", "made", "given", "what", "kept", "yes", "mine", "own", "told", "said"}
ANY_EMPTY_NAME = re.compile(rf"\b({'|'.join(EMPTY_NAMES)})\b")
#: A docstring names a thing, or says what a function does: it is not a clause that begins with one of these.
CLAUSES = ("What ", "Which ", "How ", "Of ", "As ")
PROGRAMS = [p for p in PAGES if p.suffix == ".py"]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def names_of(node):
    """Return the name that a node binds, as a list."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    return [node.name] if isinstance(node, DOCUMENTED[1:]) else []


def empty_names(tree):
    """Return the names that a tree binds and that do not say what they hold."""
    return [name for node in ast.walk(tree) for name in names_of(node) if name in EMPTY_NAMES]


def empty_names_of_examples(text):
    """Return the same of the examples of a docstring or a page, `>>> …`."""
    if not ANY_EMPTY_NAME.search(text) or ">>>" not in text:
        return []
    sources = [example.source for example in doctest.DocTestParser().get_examples(text)]
    return [name for source in sources if ANY_EMPTY_NAME.search(source) for name in empty_names(ast.parse(source))]


def test_names_say_what_they_hold_and_docstrings_name_a_thing_or_say_what_is_done():
    names, docstrings = [], []
    for path in PROGRAMS:
        for node in ast.walk(ast.parse(path.read_text())):
            place = path, getattr(node, "lineno", 1)
            names += [(*place, name) for name in names_of(node) if name in EMPTY_NAMES]
            if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node, clean=False)):
                names += [(*place, name) for name in empty_names_of_examples(docstring)]
                docstrings += [place] * docstring.startswith(CLAUSES)
    assert (names, docstrings) == ([], [])


def test_names_on_pages_say_what_they_hold():
    names = []
    for path in PAGES:
        if path.suffix == ".md":
            names += [f"{path.relative_to(ROOT)}: {name}" for name in empty_names_of_examples(path.read_text())]
        elif path.suffix == ".ipynb":
            cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
            sources = [re.sub(r"(?m)^( *)[%!].*", r"\1pass", "".join(cell["source"])) for cell in cells]
            empty = (name for source in sources for name in empty_names(ast.parse(source)))
            names += [f"{path.relative_to(ROOT)}: {name}" for name in empty]
    assert names == []


def test_the_fields_terms_are_used():
    # Each begins a word, which few characters do.
    any_term, results = re.compile(rf"(?<![a-z])(?:{'|'.join(TERMS)})", re.IGNORECASE), []
    for path in PAGES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) < 1000 and (private := any_term.search(line)):  # a longer one is a picture
                (term,) = {term for word, term in TERMS.items() if re.fullmatch(word, private[0], re.IGNORECASE)}
                results.append(f"{path.relative_to(ROOT)}:{number}: write {term!r}: {line.strip()[:100]}")
    assert results == []
