"""A block of an array that is assigned to, and the gradient through it."""

import minidiff as md
import minidiff.numpy as np


def assigned(a):
    b = np.zeros((4, 4))
    b[:2, :2] = a
    return b.sum()


def updated(a):
    b = np.at(np.zeros((4, 4)))[:2, :2].set(a)
    return b.sum()


print(md.grad(updated)(np.ones((2, 2))))
md.grad(assigned)(np.ones((2, 2)))
