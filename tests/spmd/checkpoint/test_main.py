"""`python -m spmd.checkpoint`: lists what is saved, and says what of it is damaged."""

import re

from spmd.checkpoint.__main__ import main


def test_the_list(run, capsys, golden):
    (run / "step-00000006").mkdir()
    assert main([str(run)]) == 0
    out = re.sub(r"  +", "  ", capsys.readouterr().out.replace(str(run), "RUN"))
    golden("saved_steps", re.sub(r"\d{4}-\d\d-\d\d.\d\d:\d\d(:\d\d)?", "TIME", out))
