"""Bodies inside one another, and branches that are recorded for their types though another one is run."""

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
from collectives import psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.programs.control import ARGS, BODIES

BLOCKS = np.arange(4.0)


def on_ranks(f, *in_specs, out_specs=P("i"), **options):
    return mapped(f, mesh(2, 2), in_specs or P("i"), out_specs, **options)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.sampled_from(sorted(BODIES)), min_size=2, max_size=4))
@example(["cond", "checkpoint", "scan"])  # what is known of a choice may be zeros, pbroadcast around it
def test_bodies_inside_one_another(names):
    """Innermost first: run, recorded, and compiled, as Python runs them."""
    assume("vmap" not in names or not {"cond", "switch"}.intersection(names[: names.index("vmap")]))
    assume(names.count("vmap") < 2)

    def gradient(which):
        def body(w, x):
            f = lambda x: np.sin(x) * w + psum(x * w, "i") / 4  # noqa: E731
            for name in names:
                f = BODIES[name][which](f)
            return psum((f(x) * x).sum(), ("i", "j"))

        return md.value_and_grad(on_ranks(body, P(), P(("i", "j")), out_specs=P()), (0, 1))

    expected = gradient(1)(*ARGS)
    assert_trees_close(gradient(0)(*ARGS), expected)
    assert_trees_close(md.jit(gradient(0))(*ARGS), expected)
    assert_trees_close(md.make_tape(gradient(0))(*ARGS)(*ARGS), md.tree.leaves(expected))


def test_a_branch_that_cannot_be_recorded_has_no_say():
    def body(x):
        total = psum(x.sum(), "i")
        return md.cond(total > 0, lambda t: np.ones(2), lambda t: x if float(t) < -1 else -x, total)

    f = on_ranks(body, out_specs=P())
    assert_trees_close(f(BLOCKS), np.ones(2))
    with pytest.raises(md.VarianceError):
        f(-BLOCKS)


def test_a_branch_that_raises_raises_where_it_is_run():
    def refuse(x):
        raise ArithmeticError

    f = on_ranks(lambda x: md.cond(psum(x.sum(), "i") > 0, lambda x: psum(x, "i"), refuse, x), out_specs=P())
    assert_trees_close(f(BLOCKS), np.array([2.0, 4.0]))
    for run, x in ((f, -BLOCKS), (md.make_tape(f), BLOCKS)):
        with pytest.raises(ArithmeticError):
            run(x)


def test_types_of_a_branch_that_are_written_wrongly_are_an_error_whichever_is_run():
    body = lambda x, y: md.cond(psum(x.sum(), "i") > 0, lambda: x, lambda: x * y)  # noqa: E731
    with pytest.raises(md.VarianceError):
        on_ranks(body, P("i"), P(), auto_pbroadcast=False)(BLOCKS, np.ones(2))
