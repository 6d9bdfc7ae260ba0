"""Names, docstrings, comments, messages and pages use the field's terms, not private words."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

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


@pytest.mark.parametrize("private", TERMS)
def test_the_fields_terms_are_used(private):
    results = []
    for path in PAGES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) < 1000 and re.search(private, line, re.IGNORECASE):  # a longer one is a picture
                results.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not results, f"write {TERMS[private]!r}:\n" + "\n".join(results)
