"""Linear programs: derivatives of random ones."""

from __future__ import annotations

from collections.abc import Callable

import minidiff as md
import minidiff.numpy as np
from tests.checks.meshes import mesh
from tests.programs.rank import random_program


def program(seed: int) -> tuple[Callable, list]:
    """The derivative of the losses of a random program of ranks, a linear function of all its inputs; and inputs."""
    kind = ("further", "control", "redundant")[seed % 3]
    random = random_program(seed, **{kind: True})
    over = mesh(*random.shape.values(), names=tuple(random.shape))
    args = [np.stack([x, np.cos(x)]) for x in random.example(seed)]
    return md.linearize(random.on_ranks(over, batched=True), *args)[1], args
