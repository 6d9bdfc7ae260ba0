"""Answers to the exercises of notebooks/16_memory.ipynb: right ones, and wrong ones."""

STATIC = "bytes_of_parameters = {} * count\nbytes_of_gradients = {} * count\nbytes_of_state = {} * count"

BEST = """
def best_segment(n, a, w):
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    return {}
"""

SHARE = """
def share(psi, p, stage):
    return {}
"""

KEEPING = """
def keeping(i):
    return {}
"""

EXERCISES = [
    {
        "right": STATIC.format(4, 4, 8),
        "wrong": [
            STATIC.format(4, 4, 4),  # one average
            STATIC.format(8, 8, 16),  # float64
            STATIC.format(4, 0, 8),  # no gradients
        ],
    },
    {
        "right": "blocks_of_sin = 15",
        "wrong": ["blocks_of_sin = 8", "blocks_of_sin = 16", "blocks_of_sin = 24"],
    },
    {
        "right": "c = 16 * 4 * 4 * 4",
        "wrong": [
            "c = 3 * 16 * 4 * 4 * 4",  # scores, exponentials, weights
            "c = 16 * 4 * 4",  # of one layer
            "c = 16 * 4 * 4 * 8",  # float64
        ],
    },
    {
        "right": BEST.format("min(divisors, key=lambda k: n / k * a + k * w)"),
        "wrong": [
            BEST.format("int(n**0.5)"),  # does not divide, and leaves out a and w
            BEST.format("min(divisors, key=lambda k: abs(k - (n * w / a) ** 0.5))"),  # a and w the other way round
            BEST.format("1"),
        ],
    },
    {
        "right": "per_parameter = {1: 4 + 4 + 8 / 2, 2: 4 + 4 / 2 + 8 / 2, 3: (4 + 4 + 8) / 2}",
        "wrong": [
            "per_parameter = {1: 16, 2: 12, 3: 8}",
            "per_parameter = {1: 8, 2: 8, 3: 8}",
            "per_parameter = {1: 12, 2: 8, 3: 4}",
        ],
    },
    {
        "right": SHARE.format("psi * 2 / (p if stage > 2 else 1), psi * 2 / (p if stage > 1 else 1), "
                              "psi * 12 / (p if stage > 0 else 1)"),
        "wrong": [
            SHARE.format("2 * psi / p, 2 * psi / p, 12 * psi / p"),
            SHARE.format("2 * psi, 2 * psi / (p if stage > 1 else 1), 12 * psi / (p if stage > 0 else 1)"),
            SHARE.format("psi * 4 / (p if stage > 2 else 1), psi * 4 / (p if stage > 1 else 1), "
                         "psi * 8 / (p if stage > 0 else 1)"),
        ],
    },
    {
        "right": KEEPING.format("partial(md.checkpoint, policy=policies.dots_with_no_batch_dims_saveable)"),
        "wrong": [
            KEEPING.format('keeps["selective"]'),  # too much memory
            KEEPING.format('keeps["keep products"]'),
            KEEPING.format('keeps["full"]'),  # too many operations
            KEEPING.format('keeps["full" if i < 2 else "keep all"]'),
        ],
    },
]  # fmt: skip
