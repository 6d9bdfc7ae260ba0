"""Answers to the exercises of the notebook."""

MERGE = """
def merge(a, b):
    (m, total, result), (n, other, more) = a, b
    largest = {largest}
    left, right = {scales}
    return largest, left * total + right * other, left * result + {right} * more
"""
SCALES = "np.exp(m - largest), np.exp(n - largest)"

RING_AND_HEADS = "ring_calls = {}\nring_bytes = {}\nby_heads_bytes = {}"
TICKS = 'ticks_on_4 = {{"in order": {}, "zig-zag": {}}}\nticks_on_8 = {{"in order": {}, "zig-zag": {}}}'
DISPATCH = "capacity_of_rank = {}\ndispatch_bytes = {}"
DECODER = "parameters_on_a_rank = {}\nbytes_on_4_ranks = {}\nbytes_on_2_ranks = {}"
HELD = 172_608 - 98_304 + 4 * 64 * 8 + 8 * 98_304 // 4

NEEDED = """
def needed(tokens, size, window):
    tile, chunk = np.ogrid[: tokens // size, : tokens // size]
    return {}
"""

LEAN = """
def lean_ring(q, k, v, axis="tokens"):
    ranks = axis_size(axis)
    attend = {attend}
    pair = np.stack([k, v])
    so_far = attend(empty_sums(q), q, *pair)
    for _ in range(ranks - 1):
        pair = ppermute(pair, axis, [(r, (r + 1) % ranks) for r in range(ranks)])
        so_far = attend(so_far, q, *pair)
    return finish(so_far, q.dtype)
"""

EXERCISES = [
    {
        "right": RING_AND_HEADS.format(3, "3 * 2 * 256 * 4 * 16 * 4", "(2 * 4 + 2 * 4) * 256 * 16 * 4"),
        "wrong": [
            RING_AND_HEADS.format(4, "4 * 2 * 256 * 4 * 16 * 4", "(2 * 4 + 2 * 4) * 256 * 16 * 4"),
            RING_AND_HEADS.format(3, "3 * 256 * 4 * 16 * 4", "(2 * 4 + 2 * 4) * 256 * 16 * 4"),  # keys alone
            RING_AND_HEADS.format(3, "3 * 2 * 256 * 4 * 16 * 4", "3 * 4 * 256 * 16 * 4"),  # no results
            RING_AND_HEADS.format(3, "3 * 2 * 256 * 4 * 16 * 4", "(2 * 4 + 2 * 4) * 1024 * 16 * 4"),  # all tokens
        ],
    },
    {
        "right": TICKS.format(15, 9, 31, 17),
        "wrong": [TICKS.format(16, 8, 32, 16), TICKS.format(9, 9, 17, 17), TICKS.format(15, 9, 30, 18)],
    },
    {
        "right": DISPATCH.format(80, "2 * 8 * 80 * 64 * 4"),
        "wrong": [
            DISPATCH.format(40, "2 * 8 * 40 * 64 * 4"),  # one choice
            DISPATCH.format(320, "2 * 8 * 320 * 64 * 4"),  # of all ranks
            DISPATCH.format(80, "8 * 80 * 64 * 4"),  # one way
        ],
    },
    {
        "right": DECODER.format(HELD, "4 * 2 * 8 * 256 * 64 * 8", "4 * 2 * 8 * 512 * 64 * 8"),
        "wrong": [
            DECODER.format("862_784 // 4", "4 * 2 * 8 * 256 * 64 * 8", "4 * 2 * 8 * 512 * 64 * 8"),
            DECODER.format(HELD, "4 * 2 * 2 * 256 * 64 * 8", "4 * 2 * 2 * 512 * 64 * 8"),  # without empty places
            DECODER.format(HELD, "4 * 2 * 8 * 256 * 64 * 8", "4 * 2 * 8 * 256 * 64 * 8"),
        ],
    },
    {
        "right": MERGE.format(largest="max(m, n)", scales=SCALES, right="right"),
        "wrong": [
            MERGE.format(largest="max(m, n)", scales="1, 1", right="right"),
            MERGE.format(largest="m", scales=SCALES, right="right"),
            MERGE.format(largest="max(m, n)", scales=SCALES, right="1"),
            MERGE.format(largest="max(m, n)", scales="np.exp(largest - m), np.exp(largest - n)", right="right"),
        ],
    },
    {
        "right": NEEDED.format("(chunk <= tile) & (tile * size - (chunk + 1) * size + 1 < window)"),
        "wrong": [
            NEEDED.format("chunk <= tile"),
            NEEDED.format("(chunk <= tile) & ((tile - chunk) * size < window)"),
            NEEDED.format("(chunk <= tile) & (tile * size - (chunk + 1) * size < window)"),
            NEEDED.format("chunk == tile"),
        ],
    },
    {
        "right": LEAN.format(attend="md.checkpoint(accumulate)"),
        "wrong": [
            LEAN.format(attend="accumulate"),
            "def lean_ring(q, k, v, axis='tokens'):\n    return md.checkpoint(lambda *qkv: ring(*qkv, axis))(q, k, v)",
            "def lean_ring(q, k, v, axis='tokens'):\n    return parallel.attention(q, k, v)",
        ],
    },
]
