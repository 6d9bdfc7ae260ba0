"""Answers to the exercises of the notebook."""

RING = "ring_steps, ring_bytes, ring_microseconds = {}"

SEVEN = """
billions = {billions}
state_gib = {state}
flops_of_a_rank = {flops}
bubble = {bubble}
seconds = {seconds}
"""
_WEIGHTS = "32 * 12 * 4096**2 + 32000 * 4096"
_FORWARD = f"(2 * 128 * 2048 * ({_WEIGHTS}) + 4 * 32 * 128 * 2048**2 * 4096)"
_RIGHT = {
    "billions": f"({_WEIGHTS}) / 1e9",
    "state": "14 * (8 * 12 * 4096**2 + 32000 * 4096) / 4 / 2**30",
    "flops": f"4 * {_FORWARD} / 64",
    "bubble": "3 / (32 + 3)",
    "seconds": f"4 * {_FORWARD} / 64 / 312e12 / 0.85 / (1 - 3 / 35)",
}

LLAMA = "llama_billions = {}\nllama_state_gib = {}\nllama_bubble = {}"
_LAYER = "(2 * 16384**2 * (1 + 8 / 128) + 3 * 16384 * 53248)"
_ENDS = "2 * 128256 * 16384"

LEVELS = """
def all_reduce_in_levels(K, n, m, alpha1, beta1, alpha2, beta2):
    inside = 2 * (n - 1) * (alpha1 + K / n * beta1)
    return inside + 2 * (m - 1) * (alpha2 + {} * beta2)
"""

FASTER = "def faster(plan):\n    return plan._replace({})"

EXERCISES = [
    {
        "right": RING.format("14, 2 * 7 * 10**8 / 8, 14 * 4 + 1.75e8 / 300e9 * 1e6"),
        "wrong": [
            RING.format("7, 7 * 10**8 / 8, 7 * 4 + 8.75e7 / 300e9 * 1e6"),
            RING.format("14, 2 * 10**8, 14 * 4 + 2e8 / 300e9 * 1e6"),
            RING.format("14, 1.75e8, 1.75e8 / 300e9 * 1e6"),
        ],
    },
    {
        "right": "bytes_between_nodes = 10**8",
        "wrong": ["bytes_between_nodes = 8 * 10**8", "bytes_between_nodes = 8 * 10**8 / 64"],
    },
    {"right": "smallest_n = 460", "wrong": ["smallest_n = 153", "smallest_n = 440", "smallest_n = 512"]},
    {
        "right": "bytes_to_psum = 4 * 172608 + 4",
        "wrong": [
            "bytes_to_psum = 4 * 172608",
            # without the norms
            "bytes_to_psum = 4 * 172032 + 4",
            "bytes_to_psum = 8 * 172608 + 8",
            "bytes_to_psum = 4 * 172608 // 2 + 4",
        ],
    },
    {
        "right": SEVEN.format(**_RIGHT),
        "wrong": [
            # weights alone
            SEVEN.format(**{**_RIGHT, "state": "2 * 6.57e9 / 16 / 2**30"}),
            # no recomputation
            SEVEN.format(**{**_RIGHT, "flops": f"3 * {_FORWARD} / 64"}),
            # microbatches of all pipelines
            SEVEN.format(**{**_RIGHT, "bubble": "3 / (128 + 3)"}),
            # without the bubble
            SEVEN.format(**{**_RIGHT, "seconds": f"4 * {_FORWARD} / 64 / 312e12 / 0.85"}),
            # keys and values forgotten
            SEVEN.format(**{**_RIGHT, "billions": "(32 * 10 * 4096**2 + 32000 * 4096) / 1e9"}),
        ],
    },
    {
        "right": LLAMA.format(
            f"(126 * {_LAYER} + {_ENDS}) / 1e9", f"14 * (8 * {_LAYER} + {_ENDS}) / 8 / 2**30", "15 / (16 + 15)"
        ),
        "wrong": [
            # as many heads of keys as of queries
            LLAMA.format("(126 * (4 * 16384**2 + 3 * 16384 * 53248) + 2 * 128256 * 16384) / 1e9", "48.4", "15 / 31"),
            # all parameters by all ranks of a pipeline
            LLAMA.format("405.8", "14 * 405.8e9 / 128 / 2**30", "15 / 31"),
            LLAMA.format("405.8", "48.4", "15 / (2048 + 15)"),
        ],
    },
    {
        "right": LEVELS.format("K / n / m"),
        "wrong": [LEVELS.format("K / m"), LEVELS.format("K / n"), LEVELS.format("K")],
    },
    {
        "right": FASTER.format('recompute="selective", sequence=True'),
        "wrong": [
            FASTER.format('recompute="selective"'),
            FASTER.format("recompute=None"),
            FASTER.format('tensor=2, data=8, recompute="selective", sequence=True'),
            FASTER.format("batch=256"),
        ],
    },
]
