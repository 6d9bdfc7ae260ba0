"""Bodies inside one another; `types_of_steps.md` has branches that are recorded though another one is run."""

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
from collectives import psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.programs.control import ARGS, BODIES


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

        return md.value_and_grad(mapped(body, mesh(2, 2), (P(), P(("i", "j"))), P()), (0, 1))

    expected = gradient(1)(*ARGS)
    assert_trees_close(gradient(0)(*ARGS), expected)
    assert_trees_close(md.jit(gradient(0))(*ARGS), expected)
    assert_trees_close(md.make_tape(gradient(0))(*ARGS)(*ARGS), md.tree.leaves(expected))
