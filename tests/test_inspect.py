"""The communication report."""

import pytest

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


def in_body(f):
    return spmd.shard_map(f, mesh=MESH, in_specs=P("i", "j"), out_specs=P())


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_scan_counts_its_body_for_each_step(steps):
    @in_body
    def f(x):
        inner = lambda s, _: (s + psum(x, ("i", "j")).sum(), None)  # noqa: E731
        return md.scan(lambda s, _: (md.scan(inner, s, length=2)[0], None), 0.0, length=steps)[0]

    MESH.reset_calls()
    f(np.ones((4, 4)))
    report = spmd.communication(f)(np.ones((4, 4)))
    assert report.counts == MESH.calls == ({"psum": 2 * steps} if steps else {})
    assert report.bytes == 2 * steps * 32 and not report.notes


def test_a_gradient_through_a_scan():
    @in_body
    def f(x):
        return md.scan(lambda s, row: (s + psum(np.sin(s * row), ("i", "j")).sum(), None), 1.0, x)[0]

    x = np.ones((6, 4))
    tape = md.make_tape(md.grad(f))(x)
    MESH.reset_calls()
    tape(x)
    assert spmd.communication(md.grad(f))(x).counts == MESH.calls == {"psum": 2 * 3}


def test_of_branches_the_one_that_communicates_most_counts():
    def f(more, less):
        return in_body(
            lambda x: md.switch(
                psum(x.sum(), ("i", "j")).astype(int),
                [lambda: 0.0, lambda: more(x), lambda: less(x)],
            )
        )

    one = lambda x: psum(x.sum(), ("i", "j"))  # noqa: E731
    three = lambda x: psum(psum(x, "i"), "j").sum()  # noqa: E731
    for branches in ((three, one), (one, three)):
        report = spmd.communication(f(*branches))(np.ones((4, 4)))
        assert report.counts == {"psum": 1 + 2} and report.bytes == 8 + 2 * 32
        assert str(report).endswith(
            "\n(which branch is run is not known beforehand: the one that communicates most is counted)"
        )


def test_branches_that_communicate_alike_need_no_note():
    @in_body
    def f(x):
        total = psum(x.sum(), ("i", "j"))
        return md.cond(total > 0, lambda: psum(x, ("i", "j")).sum(), lambda: psum(-x, ("i", "j")).sum())

    report = spmd.communication(f)(np.ones((4, 4)))
    assert report.counts == {"psum": 2} and not report.notes


def test_how_often_a_while_loop_communicates_is_not_known():
    @in_body
    def f(x):
        return md.while_loop(lambda s: s < 100.0, lambda s: s + psum(x.sum(), ("i", "j")), 0.0)

    report = spmd.communication(f)(np.ones((4, 4)))
    assert report.counts == {"psum": 1}
    assert str(report).endswith(
        "\n(how many steps a while_loop takes is not known beforehand: what it communicates is counted for one)"
    )
    quiet = spmd.communication(lambda x: md.while_loop(lambda s: s < 9.0, lambda s: s + x, x))(1.0)
    assert str(quiet) == "no communication"
