"""A job that goes on when a rank dies: it starts again, from the last step that it saved.

    python -m spmd run -n 4 --restarts 3 -m spmd.examples.restarts run --kill 37

`--kill 37` kills a rank at step 37, once, as a machine that fails does. The job prints

    spmd run: rank 2 ended by signal 9 at step 37; starting again from step 30 on 4 ranks (restart 1 of 3)

or from step 20, if the files of step 30 were not complete yet; and then the losses of steps 10, 20, …, 60: those of a
run that nobody killed, to the last bit. Every tenth step saves all that the losses depend on: the parameters, the
averages of Adam, and the place in the data, whose order follows from a seed. Batches are the same on any number of
ranks. So with `--shrink` the job goes on, on 3 ranks, which add in another order: the losses are the same up to
rounding.
"""

import argparse
import os
import signal

import numpy as np

import minidiff as md
import spmd
from spmd import P, checkpoint, data
from spmd.parallel import data_parallel, init_params

parser = argparse.ArgumentParser("python -m spmd.examples.restarts", description=__doc__)
parser.formatter_class = argparse.RawDescriptionHelpFormatter
parser.add_argument("path", help="a directory for checkpoints, which all ranks share")
parser.add_argument("--kill", type=int, help="kill a rank at this step, the first time")


def train(mesh: spmd.Mesh, path: str, steps: int, kill: int | None = None) -> list[float]:
    """Return the losses of a run, which goes on from what is saved."""
    rng = np.random.default_rng(0)
    params, inputs, optimizer = init_params(rng, (6, 12, 2)), rng.normal(size=(480, 6)), md.optim.adam(0.02)
    batches = data.batches((inputs, np.tanh(inputs[:, :2])), mesh, P("batch"), batch=24, seed=0)
    gradient = md.value_and_grad(data_parallel(mesh))

    @md.jit
    def update(params, averages, batch):
        loss, gradients = gradient(params, batch)
        changes, averages = optimizer.update(gradients, averages, params)
        return loss, md.optim.apply_updates(params, changes), averages

    state, losses = {"params": params, "averages": optimizer.init(params), "batches": batches.state()}, []
    with checkpoint.Checkpoints(path, mesh, keep=2) as saved:
        if saved.latest() is not None:
            state, notes = saved.load(state)
            batches.restore(state["batches"])
            losses = notes["losses"]
        for step in saved.steps(steps):
            if step == kill and mesh.rank == mesh.size // 2 and os.environ.get("SPMD_RESTART") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            loss, state["params"], state["averages"] = update(state["params"], state["averages"], next(batches))
            losses.append(float(loss))
            if step % 10 == 0:
                saved.save(step, {**state, "batches": batches.state()}, notes={"losses": losses})
    return losses


if __name__ == "__main__":
    options = parser.parse_args()
    losses = train(spmd.make_mesh((-1,), ("batch",)), options.path, 60, options.kill)
    if spmd.process_index() == 0:
        print("losses:", *losses[9::10])
