"""Answers to the exercises of notebooks/09_variance_types.ipynb: right ones, and wrong ones."""

_LOSS = """
def explicit_loss(params, inputs, targets):
    {varying}
    predictions = np.tanh(inputs @ w + b)
    return {reduce}(np.mean((predictions - targets) ** 2), "i")
"""

EXERCISES = [
    {
        "right": "all_reduces = (1, 0, 2)",
        "wrong": ["all_reduces = (1, 1, 2)", "all_reduces = (1, 0, 1)", "all_reduces = (2, 0, 2)", "all_reduces = 3"],
    },
    {
        "right": """
def forward_transposed(y, ct):
    return psum_scatter((y * ct)[::-1], "i", tiled=True)
""",
        "wrong": [
            # the order is not reversed
            """
def forward_transposed(y, ct):
    return psum_scatter(y * ct, "i", tiled=True)
""",
            # right numbers, twice the communication
            """
def forward_transposed(y, ct):
    return pscatter(psum((y * ct)[::-1], "i"), "i", tiled=True)
""",
            # each rank's own slice alone
            """
def forward_transposed(y, ct):
    return (y * ct)[::-1].reshape(8, -1)[axis_index("i")]
""",
            # the sum of all is wanted in parts only
            """
def forward_transposed(y, ct):
    return psum((y * ct)[::-1], "i")
""",
        ],
    },
    {
        "right": _LOSS.format(varying='w, b = pbroadcast(params, "i")', reduce="pmean"),
        "wrong": [
            _LOSS.format(varying="w, b = params", reduce="pmean"),
            _LOSS.format(varying='w, b = pbroadcast(params, "i")', reduce="psum"),
            # each use of w is varying, and b
            """
def explicit_loss(params, inputs, targets):
    w, b = params
    half = inputs @ pbroadcast(w, "i") / 2 + inputs @ pbroadcast(w, "i") / 2
    return pmean(np.mean((np.tanh(half + pbroadcast(b, "i")) - targets) ** 2), "i")
""",
        ],
    },
    {
        "right": """
def normalized(x):
    total = spmd.shard_map(lambda x: np.sum(x**2), mesh=mesh, in_specs=P("i"), out_specs=P(sum="i"))(x)
    return spmd.shard_map(lambda x, total: x / total, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))(x, total)
""",
        "wrong": [
            # a psum in the body
            """
def normalized(x):
    f = lambda x: x / psum(np.sum(x**2), "i")
    return spmd.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x)
""",
            # each rank by its own sum
            """
def normalized(x):
    return spmd.shard_map(lambda x: x / np.sum(x**2), mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x)
""",
            # no ranks at all
            """
def normalized(x):
    return x / np.sum(x**2)
""",
            # parts that are promised to be the same
            """
def normalized(x):
    return x / spmd.shard_map(lambda x: np.sum(x**2), mesh=mesh, in_specs=P("i"), out_specs=P())(x)
""",
        ],
    },
]
