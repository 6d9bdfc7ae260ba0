"""Values in flight: waited for once, where they were started, and not read before."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from collectives import ppermute_start, psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.of_collectives import collectives_on
from tests.checks.samples import each


def in_flight(body):
    return mapped(lambda x: body(x, ppermute_start(x, "i", [(0, 1), (1, 0)])), mesh(2), P("i"), P("i"))


UNREAD = {
    "added": lambda x, arriving: x + arriving,
    "added to a number": lambda x, arriving: arriving + 1,
    "an operand": lambda x, arriving: np.sum(arriving),
    "NumPy's operand": lambda x, arriving: numpy.sin(arriving),
    "converted": lambda x, arriving: numpy.asarray(arriving),
    "sent": lambda x, arriving: psum(arriving, "i"),
    "indexed": lambda x, arriving: arriving[0],
    "returned": lambda x, arriving: arriving,
}


@each("run", [lambda f: f, md.jit, md.grad])
@each("name", UNREAD)
def test_a_value_in_flight_cannot_be_read(name, run):
    with pytest.raises(TypeError, match=r"InFlight|\.wait\(\)"):
        run(in_flight(UNREAD[name]))(np.arange(4.0))


def test_each_value_is_waited_for_once_where_it_was_started():
    tape = md.make_tape(in_flight(lambda x, arriving: np.sin(x) * arriving.wait() + arriving.wait()))(np.arange(4.0))
    names = [eqn.primitive.name for eqn in tape.equations[0].params["body"].equations]
    assert names == ["ppermute_start", "sin", "ppermute_wait", "multiply", "add"]

    def in_loop(x, arriving):
        return md.scan(lambda carry, _: (carry + arriving.wait(), None), x, None, length=3)[0]

    with pytest.raises(RuntimeError):
        md.jit(in_flight(in_loop))(np.arange(4.0))


def test_the_backward_pass_has_its_messages_in_flight_too():
    f = in_flight(lambda x, arriving: np.sum(np.sin(x) * arriving.wait())[None])
    names = [e.primitive.name for e in collectives_on(md.make_tape(md.grad(lambda x: np.sum(f(x))))(np.arange(4.0)))]
    assert [name for name in names if name.startswith("ppermute")] == ["ppermute_start", "ppermute_wait"] * 2
