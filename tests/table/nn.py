"""Rows of `minidiff/nn.py`."""

import numpy as np

import minidiff as md
from tests.table.rows import distinct, form, positive, real, row

nn = md.nn
MASK = np.array([[True, False, True], [True, True, True]])

DISCRETE: set = set()

LINEAR: dict = {}

ACTIVATIONS = [
    *(nn.relu, nn.gelu, nn.sigmoid, nn.softplus, nn.silu, nn.elu, nn.celu, nn.leaky_relu, nn.log_sigmoid, nn.mish),
]
ALONG_AXES = [nn.softmax, nn.log_softmax, nn.logsumexp]

ROWS = [
    *(row(f, x) for f in (*ACTIVATIONS, nn.erf, nn.erfc) for x in (2 * real(2, 3), 0.7, real(0, 2))),
    row(nn.gelu, 2 * real(4), approximate=False),
    *(row(f, real(3), positive(3)) for f in (nn.elu, nn.celu, nn.leaky_relu)),
    *(row(nn.glu, real(2, 4, 3), axis=a) for a in (0, 1, -2)),
    *(row(f, 3 * real(2, 3, 4), axis=a) for f in ALONG_AXES for a in (-1, 0, None, (0, 2))),
    *(row(f, np.arange(3), f=lambda n, f=f: 1.0 * f(n)) for f in (*ACTIVATIONS, *ALONG_AXES)),
    row(nn.dot_product_attention, real(2, 3, 4, 2), real(2, 5, 2, 2), real(2, 5, 2, 2), real(4, 3, 5)),
    row(nn.dot_product_attention, real(3, 2, 2), real(3, 2, 2), real(3, 2, 2), is_causal=True, scale=0.3),
    row(nn.softmax, real(2, 3), where=MASK),
    row(nn.log_softmax, real(2, 3), f=lambda x: np.where(MASK, nn.log_softmax(x, where=MASK), 0)),
    row(nn.logsumexp, real(2, 3), axis=1, keepdims=True, where=MASK),
    row(nn.logsumexp, real(2, 3), positive(3), f=lambda x, b: nn.logsumexp(x, 1, b)),
    row(nn.logsumexp, real(2, 3), real(2, 3), f=lambda x, b: np.stack(nn.logsumexp(x, b=b, return_sign=True))),
    row(nn.logsumexp, real(2, 3), f=lambda x: np.stack(nn.logsumexp(x, (0, 1), keepdims=True, return_sign=True))),
    *(row(nn.one_hot, np.array([0, 2, 5]), f=lambda n, axis: nn.one_hot(n, 4, axis=axis), axis=a) for a in (-1, 0)),
    row(nn.dropout, real(3, 4), f=lambda x: nn.dropout(md.random.key(0), x, 0.4)),
    form("cross entropy", "labels", lambda x: -(nn.one_hot([0, 2], 3) * nn.log_softmax(x)).sum(), distinct(2, 3)),
]
