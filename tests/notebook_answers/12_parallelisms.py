"""Answers to the exercises of the notebook."""

BYTES = "def bytes_of_gradient(sizes, itemsize):\n    return itemsize * sum({} for n, m in pairwise(sizes))"

LAYERS = """
from collectives import all_gather_invariant, psum

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
        "right": LAYERS.format('psum(md.nn.relu(x @ W1) @ W2, "feats")'),
        "wrong": [
            LAYERS.format("md.nn.relu(x @ W1) @ W2"),
            LAYERS.format('md.nn.relu(psum(x @ W1, "feats")) @ W2'),
            LAYERS.format('psum(md.nn.relu(x @ W1) @ W2, "feats") / 8'),
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
