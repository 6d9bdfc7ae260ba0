"""Updates of parameters, by their gradients and what is remembered of earlier ones."""

import minidiff.numpy as np


def sgd(p, g):
    return p - 0.1 * g


def momentum(p, g, m):
    m = 0.9 * m + g
    return p - 0.1 * m, m


def adam(p, g, m, v):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
    return p - 0.1 * m / (np.sqrt(v) + 1e-8), m, v
