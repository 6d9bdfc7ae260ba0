"""`scoreboard`, `published`, `fitted_constants`: rows of tables, decoders that count as papers do, fits."""

import re

import numpy as np
import pytest

import spmd
from spmd.examples import fitted_constants, scoreboard
from spmd.examples.megatron_3d import parameters
from spmd.examples.published import FORMATS, GPT, TrainingPlan, paper_flops, tape_of
from spmd.examples.scoreboard import held

SMALL = TrainingPlan(64, 4, 4, 256, 32, tensor=2, data=2, stages=2, batch=8, microbatch=2)


def test_rows_of_the_tables():
    tables = scoreboard.read_tables()
    assert {name: len(rows) for name, rows in tables.items()} == dict(zip(FORMATS, (51, 5, 2)))
    (first, *_), (paper, *_), (both, *_) = tables.values()
    assert first.cases[0].plan.devices == 64 and first.cases[0].seconds == 3.5665
    assert first.cases[0].plan.vocabulary == 50304  # 50,257, padded to a multiple of 128
    assert paper.cases[0].plan.data == 32 and 3 < paper.cases[0].seconds < 4
    assert [case.plan.sequence for case in both.cases] == [False, True] and len(both.shares) == 4


def test_flops_are_those_of_the_paper():
    """With all layers computed again: 96 B s l h^2 (1 + s / 6h + V / 16lh), over all devices."""
    plan = SMALL._replace(chunks=2, sequence=True)
    prediction = scoreboard.predict(plan)
    assert np.isclose(prediction.flops * plan.devices, paper_flops(plan), rtol=1e-6)
    model = scoreboard.predict(plan._replace(recompute=None))
    assert np.isclose(model.flops, model.model_flops)
    assert np.isclose(prediction.model_flops, model.model_flops)
    assert model.seconds < prediction.seconds
    assert prediction.kinds["optimizer"].seconds > 0


@pytest.mark.parametrize("recompute, sequence", [(None, False), ("selective", True), ("full", True)])
def test_bytes_are_those_of_the_paper(recompute, sequence):
    """Korthikanti et al., equations 2, 4 and 5, and 18 bytes a parameter; stage 0 stashes two microbatches."""
    plan = TrainingPlan(256, 8, 4, 256, 512, 2, 1, 2, 16, 4, recompute=recompute, sequence=sequence)
    s, b, h, a, t = plan.tokens, plan.microbatch, plan.hidden, plan.heads, plan.tensor
    whole = (10 / t if sequence else 10) + 24 / t
    of_layer = {None: whole + 5 * a * s / (h * t), "selective": whole, "full": 2 / t}[recompute]
    actual = held(plan)
    # Besides, the dropout of the embedding, tokens and a stage's input are kept, which is little of many layers.
    exact, beside = 2 * 2 * s * b * h * of_layer, 2 * s * b * (h + 64) * 6
    assert exact <= actual.activations <= exact + beside
    layers = 4 * (12 * h * h + 13 * h)
    assert np.isclose(actual.state, 18 * layers / (t * plan.stages), rtol=0.02)


def test_slopes_are_derivatives():
    price, at = fitted_constants.price_plan(SMALL), fitted_constants.parameters_of(fitted_constants.FITTED)
    rows = fitted_constants.linearize([[(price, 1.0)]], fitted_constants.FITTED)
    seconds = price(fitted_constants.FITTED)
    assert np.isclose(seconds, scoreboard.predict(SMALL).seconds) and np.isclose(seconds - 1, rows.errors[0])
    for k in range(5):
        step = 1e-4 * np.eye(5)[k]
        change = price(fitted_constants.constants_of(at * (1 + step))) - seconds
        assert np.isclose(change, rows.slopes[0] @ step, rtol=1e-2, atol=1e-9)


def shown(path, capsys, *rows):
    """Return the lines that the program prints for rows of a file."""
    path.write_text("\n".join(rows))
    scoreboard.main(["--rows", str(path)])
    return capsys.readouterr().out.splitlines()


#: Rows of a file, and what the lines say that are printed for them.
ROWS = {
    "params_billion,gpus,batch,microbatch,hidden,heads,layers,sequence,tensor,data,pipeline,step_ms": {
        "0.1,8,16,2,64,4,4,32,2,2,2,10": ["tensor 2, data 2, stages 2"],
        "0.1,8,16,1,64,4,4,32,2,2,2,20": [],
    },
    "model,layers,hidden,ffn_hidden,heads,kv_heads,head_dim,vocab,sequence,devices,tensor,pipeline,virtual_stages,"
    "context,data,fsdp,microbatch,batch,recompute,feed_forward,step_s": {
        "A,4,64,96,4,2,16,256,64,16,2,2,2,2,2,1,1,16,none,swiglu,0.1": [
            *("2 chunks, sequence parallel", "context 2", "overlapped products")
        ],
        "B,4,64,256,4,4,16,256,64,8,1,1,1,1,1,8,2,16,full,gelu,0.1": ["fully sharded"],
    },
}


@pytest.mark.parametrize("header", ROWS, ids=["A100", "H100"])
def test_further_rows(header, tmp_path, capsys):
    *lines, last = shown(tmp_path / "rows.csv", capsys, header, *ROWS[header])
    for line, parts in zip(lines, ROWS[header].values(), strict=True):
        assert [part for part in parts if part not in line] == []
        seconds, low, high = map(float, re.search(r": ([.\d]+) s, .* 80 % range ([.\d]+) to ([.\d]+)$", line).groups())
        assert low <= seconds <= high and ("overlapped products" in line) == ("overlapped products" in parts)
    assert last.startswith("mean absolute error ") and ", max " in last and last.endswith("%")


def test_rows_that_cannot_be_read_end_the_program(tmp_path, capsys):
    """In a line; all reasons are in `tests/messages/examples.md`."""
    with pytest.raises(SystemExit) as error:
        shown(tmp_path / "rows.csv", capsys, "a,b", "1,2")
    assert str(error.value).startswith("scoreboard: ") and "\n" not in str(error.value)


def test_no_array_is_made_for_a_large_decoder():
    plan = scoreboard.LLAMA_PLAN
    assert plan.devices == 16384 and 400e9 < parameters(scoreboard.LLAMA) < 410e9
    prediction = scoreboard.predict_large()
    assert 0.1 < prediction.mfu < prediction.hfu < 0.6


def test_the_plot():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    case = scoreboard.Case(SMALL, 2.0)
    prediction = scoreboard.predict(SMALL)
    ax = scoreboard.plot([(name, case, prediction) for name in FORMATS])
    assert ax.get_xlabel() == "measured seconds" and len(ax.get_lines()) == 1 + len(FORMATS)
    pyplot.close(ax.figure)


def test_attention_is_one_kernel_on_an_h100():
    """Its time is that of its products, at its share of the peak; without the share, scores are read and written."""
    plan = SMALL._replace(style=GPT, flash=True, program="NeMo", recompute=None)
    machine, options = fitted_constants.KERNELS["NeMo"].machine(), fitted_constants.placement(plan)
    one, several = (spmd.predict(tape_of(plan), each, **options) for each in (machine, machine.replace(attention=None)))
    attention = one.kinds["attention"]
    assert np.isclose(attention.seconds, attention.flops / (machine.peak("float16") * machine.attention), rtol=0.2)
    assert several.kinds["attention"].seconds > 2 * attention.seconds


def test_the_fit_finds_kernels():
    """Those that times were made with, from others."""
    plans = [SMALL._replace(style=GPT, flash=True, program="NeMo", hidden=h, heads=4, tokens=512) for h in (256, 512)]
    prices = [fitted_constants.price_plan(plan) for plan in plans]
    true = fitted_constants.Kernels(best=0.5, attention=0.25)
    rows = [(price, price(true)) for price in prices]
    actual = fitted_constants.fit([rows], fitted_constants.Kernels(best=0.55, attention=0.3), steps=4)
    assert max(abs(price(actual) / seconds - 1) for price, seconds in rows) < 1e-3
