"""`python -m spmd.checkpoint`: lists what is saved, and says what of it is damaged."""

import re

from spmd.checkpoint.__main__ import main


def test_the_list(run, capsys, golden):
    (run / "step-00000006").mkdir()
    assert main([str(run)]) == 0
    out = re.sub(r"  +", "  ", capsys.readouterr().out.replace(str(run), "RUN"))
    golden("saved_steps", re.sub(r"\d{4}-\d\d-\d\d.\d\d:\d\d(:\d\d)?", "TIME", out))


def test_damage_is_said_and_is_an_error(run, tmp_path, capsys):
    file = run / "step-00000004" / "rank-00000.npz"
    file.write_bytes(file.read_bytes()[:-1])
    assert [main([str(run / f"step-0000000{step}")]) for step in (2, 4)] == [0, 1]
    assert "rank-00000.npz is damaged: it has " in capsys.readouterr().out
    (run / "step-00000002" / "index.json").write_text("{}")
    assert main([str(run)]) == 1 and "step 2: " in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 1 and "has no complete step" in capsys.readouterr().out
