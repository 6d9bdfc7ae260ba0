"""Console sessions of a page: commands, the lines that they print, and their exit codes if not 0, as [1].

Runs of spaces are one. `…` in a line stands for any text, and alone for any lines; but those of `spmd run` are all
there. A program above a session is `program.py` in its folder.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from spmd.mesh import launch
from tests import PATIENCE
from tests.checks.launch import ROOT

MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
COMMANDS = {"python": sys.executable, "mpiexec": MPIEXEC}


def read_sessions(page):
    """Return the program and the commands of each session of a page, by its name."""
    rows = {}
    for section in Path(page).read_text().split("\n### ")[1:]:
        blocks = [re.search(rf"```{kind}\n(.*?)```", section, re.S) for kind in ("python", "console")]
        rows[section.splitlines()[0]] = [block[1] if block else "" for block in blocks]
    assert rows and all(commands for _, commands in rows.values())
    return rows


def run_command(words, folder, variables=()):
    """Run a command that no launcher started, unless the variables say that one did."""
    outside = {k: v for k, v in os.environ.items() if k not in {*launch.LAUNCHERS, *launch.LAUNCHERS.values()}}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**outside, "PYTHONPATH": path, **dict(variables)}
    command = [COMMANDS.get(word, word) for word in map(str, words)]
    options = {"capture_output": True, "text": True, "timeout": PATIENCE, "cwd": folder}
    return subprocess.run(command, env=environment, **options)


def check_session(session, folder):
    """Run the commands of a session, one after the other, and compare what they print with the page."""
    program, commands = session
    (folder / "program.py").write_text(program)
    for text in re.split(r"^\$ ", commands, flags=re.M)[1:]:
        command, *lines = text.splitlines()
        variables = re.findall(r"(?:^|(?<= ))([A-Z_]+)=(\S*) ", command)
        words = shlex.split(command)[len(variables) :]
        done = run_command(words, folder, variables)
        code = int(lines.pop()[1:-1]) if lines and re.fullmatch(r"\[\d+\]", lines[-1]) else 0
        shown = (done.stdout + done.stderr).splitlines()
        expected = [line for line in lines if line != "…"]
        others = []
        for line in expected:
            pattern = re.sub(" +", " +", re.escape(line).replace("\\ ", " ").replace("…", ".*"))
            while shown and not re.fullmatch(pattern, shown[0]):
                others.append(shown.pop(0))
            assert shown, f"{line}\n\n{done.stdout}{done.stderr}"
            del shown[0]
        others += shown
        assert done.returncode == code, (command, done.returncode, done.stderr)
        unnamed = others if len(expected) == len(lines) else [x for x in others if x.startswith("spmd run: ")]
        assert not unnamed, unnamed
