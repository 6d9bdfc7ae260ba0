"""The communication report."""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, psum
from spmd import P

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")


def program(x):
    def body(x):
        y = all_gather(psum(x, "i"), "j", tiled=True)
        return psum(psum(y, "j"), "i") + psum(x.astype(np.float32), "i").sum()

    return spmd.shard_map(body, mesh=MESH, in_specs=P("i", "j"), out_specs=P(None, "j"))(x)


def test_counts_and_bytes():
    report = spmd.communication(program)(np.ones((4, 4)))
    assert report.counts == {"psum": 3, "all_gather": 1}
    assert report.bytes == 32 + 32 + 64 + 16
    assert str(report) == (
        "collective  axes  count  bytes per rank\n"
        "----------  ----  -----  --------------\n"
        "psum        i         2              48\n"
        "all_gather  j         1              32\n"
        "psum        j         1              64\n"
        "----------  ----  -----  --------------\n"
        "total                 4             144"
    )


def test_nothing_is_run():
    MESH.reset_calls()
    spmd.communication(md.grad(lambda x: program(x).sum()))(np.ones((4, 4)))
    assert MESH.calls == {}


def test_the_report_is_what_runs():
    MESH.reset_calls()
    x = np.ones((4, 4))
    program(x)
    report = spmd.communication(program)(x)
    assert (MESH.calls, sum(MESH.bytes.values())) == (report.counts, report.bytes)


def test_no_communication():
    assert str(spmd.communication(np.sin)(1.0)) == "no communication"
