"""The commands of the page on topics select tests, all of which run with the others."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMANDS = re.findall(r"\| `python -m (.*?)` \|", (ROOT / "docs/topics.md").read_text())


def test_commands_select_tests():
    others = [shlex.split(c) for c in COMMANDS if not c.startswith("pytest ")]
    assert all(importlib.util.find_spec(module) for module, *_ in others)
    rows = [shlex.split(c.removeprefix("pytest ")) for c in COMMANDS if c.startswith("pytest ")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *{path for path, *_ in rows}]
    actual = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout.splitlines()
    for path, *options in rows:
        tests = [line for line in actual if line.startswith(path)]
        names = options[1].split(" or ") if options else [""]
        assert all(any(name in line for line in tests) for name in names), (path, names)
    assert len(rows) > 25
