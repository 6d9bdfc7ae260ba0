"""Results and communication of the programs of `spmd.examples.where_to_sum`, on any backend."""

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd.examples import where_to_sum
from spmd.examples.where_to_sum import squared_error
from tests.checks.documented import check_traffic
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close

GATHER = {"all_gather_invariant": 1}

#: Program -> version -> the calls of one run: those that the docstring's table lists.
CALLS = {
    "accumulated_gradient": {"with unreduced values": {"psum": 1}, "without": {"psum": 3}},
    "two_products": {"with unreduced values": {"psum": 1}, "without": {"psum": 2}},
    "zero2_step": {"with unreduced values": {"psum_scatter": 1, **GATHER}, "without": {"psum": 1, **GATHER}},
    "gradient_at": {f"reduced at {place}": {"psum": 2} for place in ("w", "scale", "kernel")},
}


def zero2(w, velocity, batch):
    velocity = 0.9 * velocity + md.grad(squared_error)(w, batch)
    return w - 0.01 * velocity, velocity


def loss_of_kernel(w, x):
    return np.sum(np.tanh(x @ np.outer(np.exp(w), np.exp(w))))


#: Program -> the same of whole arrays.
WHOLE = {
    "accumulated_gradient": md.grad(lambda w, batches: sum(squared_error(w, batch) for batch in zip(*batches))),
    "two_products": lambda x, w, a, b: x @ w + x @ a @ b,
    "zero2_step": zero2,
    "gradient_at": md.grad(loss_of_kernel),
}


@shows("reference", "modes", "counts")
def check_program(mesh, name: str) -> None:
    """Compare each version with the function of whole arrays, and the mesh's calls with the report and the table."""
    versions, args = where_to_sum.examples(mesh)[name]
    assert versions.keys() == CALLS[name].keys()
    for version, program in versions.items():
        results = check_traffic(program, mesh, None, *args)
        assert spmd.communication(program)(*args).counts == CALLS[name][version], (name, version)
        assert_trees_close(spmd.gather(results), WHOLE[name](*args), rtol=1e-10)
        md.make_tape(program)(*args).check()
