"""Rows of `minidiff/nn.py`."""

import numpy as np
from scipy import special as sp

import minidiff as md
from tests.table.rows import distinct, form, over, positive, product, real, row

nn = md.nn
MASK = np.array([[True, False, True], [True, True, True]])

ACTIVATIONS = [
    *(nn.relu, nn.gelu, nn.sigmoid, nn.softplus, nn.silu, nn.elu, nn.celu, nn.leaky_relu, nn.log_sigmoid, nn.mish),
    *(nn.relu6, nn.selu, nn.hard_sigmoid, nn.hard_silu, nn.hard_tanh, nn.soft_sign, nn.squareplus),
]
#: Arguments of `conv`: the shapes of x and the kernel, and options.
CONVOLUTIONS = [
    ((5, 2), (3, 2, 2), {}),
    ((2, 5, 4, 2), (2, 3, 2, 3), {"stride": (2, 1), "padding": ((1, 0), (0, 2))}),
    ((2, 6, 2), (3, 1, 4), {"stride": 2, "dilation": 2, "groups": 2}),
    ((3, 3, 4, 1), (2, 2, 2, 1, 2), {"padding": "valid", "stride": 2}),
]
ALONG_AXES = [nn.softmax, nn.log_softmax, nn.logsumexp]
#: By the function of SciPy that has their values.
OF_SCIPY = {sp.softmax: nn.softmax, sp.log_softmax: nn.log_softmax, sp.logsumexp: nn.logsumexp}
OF_ONE = {sp.expit: nn.sigmoid, sp.log_expit: nn.log_sigmoid, sp.erf: nn.erf, sp.erfc: nn.erfc}

ROWS = [
    *(row(f, x) for f in (*ACTIVATIONS, nn.erf, nn.erfc) for x in (2 * real(2, 3), 0.7, real(0, 2))),
    row(nn.gelu, 2 * real(4), approximate=False),
    *(row(f, real(3), positive(3)) for f in (nn.elu, nn.celu, nn.leaky_relu)),
    *(row(nn.glu, real(2, 4, 3), axis=a) for a in (0, 1, -2)),
    *(row(f, 3 * real(2, 3, 4), axis=a) for f in ALONG_AXES for a in (-1, 0, None, (0, 2))),
    *(row(of, 9 * real(2, 3), f=f, axis=a) for of, f in OF_SCIPY.items() for a in (None, 1)),
    *(row(of, 9 * real(3), f=f) for of, f in OF_ONE.items()),
    *(row(f, np.arange(3), f=lambda n, f=f: 1.0 * f(n)) for f in (*ACTIVATIONS, *ALONG_AXES)),
    row(nn.dot_product_attention, real(2, 3, 4, 2), real(2, 5, 2, 2), real(2, 5, 2, 2), real(4, 3, 5)),
    row(nn.dot_product_attention, real(3, 2, 2), real(3, 2, 2), real(3, 2, 2), is_causal=True, scale=0.3),
    row(nn.dot_product_attention, real(4, 1, 2), real(5, 1, 2), real(5, 1, 2), local_window_size=(2, 1)),
    *(row(nn.conv, real(*x), real(*kernel), **options) for x, kernel, options in CONVOLUTIONS),
    row(nn.conv_transpose, real(2, 3, 2, 2), real(2, 3, 2, 3), stride=(3, 1)),
    row(nn.conv_transpose, real(3, 2), real(3, 4, 2), stride=2, padding="valid", dilation=2, transpose_kernel=True),
    *product([nn.max_pool, nn.avg_pool], [distinct(2, 4, 6, 2)], over(window=((2, 3),), padding=("same", 0))),
    row(nn.max_pool, distinct(7, 2), window=(3,), stride=2),
    *(row(f, real(3, 4), real(4)) for f in (nn.layer_norm, nn.rms_norm)),
    row(nn.layer_norm, real(3, 4, 2), real(4, 2), real(4, 2), axis=(1, 2)),
    row(nn.standardize, real(2, 3), real(3), positive(3), f=lambda x, m, v: nn.standardize(x, 0, m, v)),
    row(nn.group_norm, real(2, 3, 4), real(4), real(4), f=lambda x, s, b: nn.group_norm(x, 2, s, b)),
    row(nn.batch_norm, real(3, 2, 4), real(4), real(4), f=lambda x, s, b: nn.batch_norm(x, s, b)[0]),
    row(nn.batch_norm, real(4, 2), f=lambda x: np.stack(nn.batch_norm(x, average=lambda m: m)[1])),
    *(row(f, real(2, 3), where=MASK) for f in (nn.softmax, nn.standardize, nn.rms_norm)),
    row(nn.layer_norm, real(2, 3), real(3), real(3), where=MASK),
    row(nn.group_norm, real(2, 3, 4), f=lambda x: nn.group_norm(x, 2, where=MASK[..., None])),
    row(nn.batch_norm, real(2, 3), real(3), f=lambda x, s: nn.batch_norm(x, s, where=MASK)[0]),
    row(nn.batch_norm, real(2, 3), f=lambda x: np.stack(nn.batch_norm(x, average=lambda m: m, where=MASK)[1])),
    row(nn.log_softmax, real(2, 3), f=lambda x: np.where(MASK, nn.log_softmax(x, where=MASK), 0)),
    row(nn.logsumexp, real(2, 3), axis=1, keepdims=True, where=MASK),
    row(nn.logsumexp, real(2, 3), positive(3), f=lambda x, b: nn.logsumexp(x, 1, b)),
    row(nn.logsumexp, real(2, 3), real(2, 3), f=lambda x, b: np.stack(nn.logsumexp(x, b=b, return_sign=True))),
    row(nn.logsumexp, real(2, 3), f=lambda x: np.stack(nn.logsumexp(x, (0, 1), keepdims=True, return_sign=True))),
    *(row(nn.one_hot, np.array([0, 2, 5]), f=lambda n, axis: nn.one_hot(n, 4, axis=axis), axis=a) for a in (-1, 0)),
    row(nn.dropout, real(3, 4), f=lambda x: nn.dropout(md.random.key(0), x, 0.4)),
    form("cross entropy", "labels", lambda x: -(nn.one_hot([0, 2], 3) * nn.log_softmax(x)).sum(), distinct(2, 3)),
]
