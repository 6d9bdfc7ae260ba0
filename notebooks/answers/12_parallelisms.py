"""Answers to the exercises of the notebook."""

BYTES = "def bytes_of_gradient(sizes, itemsize):\n    return itemsize * sum({} for n, m in pairwise(sizes))"

LAYERS = """
from collectives import all_gather_invariant, pscatter

def two_layers(x, W1, W2):
    return {}
"""

FEWEST = "import math\n\ndef fewest_microbatches(p, most):\n    return {}"

ROWS = """
def rows_of_rank(b, f, n):
    start = n // 8 * ({})
    return start, start + n // 8
"""

EXERCISES = [
    {
        "right": BYTES.format("n * m + m"),
        "wrong": [
            BYTES.format("n * m"),
            BYTES.format("n * m + n"),
            BYTES.format("(n * m + m) // 8"),
            "def bytes_of_gradient(sizes, itemsize):\n    return 120",
        ],
    },
    {
        "right": LAYERS.format(
            'psum_scatter(md.nn.relu(all_gather(x, "feats", tiled=True) @ W1) @ W2, "feats", tiled=True)'
        ),
        "wrong": [
            # of its own rows alone
            LAYERS.format("md.nn.relu(x @ W1) @ W2"),
            # an all-reduce, of which each rank keeps its rows
            LAYERS.format(
                'pscatter(psum(md.nn.relu(all_gather(x, "feats", tiled=True) @ W1) @ W2, "feats"), "feats", tiled=True)'
            ),
            # the mean of the terms
            LAYERS.format(
                'psum_scatter(md.nn.relu(all_gather(x, "feats", tiled=True) @ W1) @ W2, "feats", tiled=True) / 8'
            ),
            # the weights gathered in place of the rows
            LAYERS.format(
                'md.nn.relu(x @ all_gather_invariant(W1, "feats", axis=1, tiled=True)) '
                '@ all_gather_invariant(W2, "feats", tiled=True)'
            ),
        ],
    },
    {
        "right": FEWEST.format("max(1, math.ceil(round((p - 1) * (1 - most) / most, 9)))"),
        "wrong": [
            FEWEST.format("math.ceil(p / most)"),
            FEWEST.format("math.ceil((p - 1) / most)"),
            FEWEST.format("max(1, math.floor((p - 1) * (1 - most) / most) - 1)"),
        ],
    },
    {
        "right": ROWS.format("4 * f + b"),
        "wrong": [ROWS.format("2 * b + f"), ROWS.format("2 * f + b"), ROWS.format("f + b")],
    },
]
