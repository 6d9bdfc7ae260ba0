"""Answers to the exercises of notebooks/17_pipelines.ipynb: right ones, and wrong ones."""

IDLE = "def idle_share(p):\n    return {}"

STASH = "stash_of_8 = {}\nstash_of_2 = {}"

BY_HAND = """
def orders_of_1f1b(p, M):
    found = []
    for i in range(p):
        ahead = {}
        order = [F(m) for m in range(ahead)]
        for m in range(M):
            order.append(B(m))
            if m + ahead < M:
                order.append(F(m + ahead))
        found.append(order)
    return found
"""

#: Stage i does the gradients of weights i microbatches behind.
ORDERS = """
def orders():
    found = []
    for i in range(3):
        order = [F(m) for m in range(3 - i)]
        for m in range(6):
            order.append(B(m))
            if m >= {behind}:
                order.append(W(m - {behind}))
            if m + 3 - i < 6:
                order.append(F(m + 3 - i))
        found.append([*order, *(W(m) for m in range(6 - {behind}, 6))])
    return found
"""

EXERCISES = [
    {
        "right": IDLE.format("(p - 1) / p"),
        "wrong": [IDLE.format("1 / p"), IDLE.format("(p - 1) / (p + 1)"), IDLE.format("0.75")],
    },
    {
        "right": "on_four_stages = alone / 4 / (1 - 3 / 11)",
        "wrong": ["on_four_stages = alone / 4", "on_four_stages = alone", "on_four_stages = alone / 4 * 3 / 11"],
    },
    {
        "right": STASH.format([4, 3, 2, 1], [2, 2, 2, 1]),
        "wrong": [
            STASH.format([8, 8, 8, 8], [2, 2, 2, 2]),  # GPipe's
            STASH.format([1, 2, 3, 4], [1, 2, 2, 2]),
            STASH.format([4, 3, 2, 1], [4, 3, 2, 1]),  # more than there are
        ],
    },
    {
        "right": "chunks, layers = 4, 16",
        "wrong": ["chunks, layers = 3, 12", "chunks, layers = 4, 4", "chunks, layers = 27, 108"],
    },
    {
        "right": "used_by_20 = [15, 16, 17, 18, 19, 20]",
        "wrong": [
            "used_by_20 = [20, 19, 18, 17, 16, 15]",
            "used_by_20 = [15] * 6",  # vertical synchronization
            "used_by_20 = [17, 18, 19, 20]",  # of 4 stages
        ],
    },
    {
        "right": BY_HAND.replace("{}", "p - i"),
        "wrong": [
            BY_HAND.replace("{}", "M"),  # GPipe, the first microbatch first
            BY_HAND.replace("{}", "i + 1"),  # waits for ever
            BY_HAND.replace("{}", "min(M, p - i + 1)"),  # stashes one more
        ],
    },
    {
        "right": ORDERS.format(behind="i"),
        "wrong": [
            ORDERS.format(behind="0"),  # at once, as if the backward pass were whole
            ORDERS.format(behind="6"),  # all in the end
            "def orders():\n    return [[x for x in row if x] for row in spmd.pipeline.one_f_one_b(3, 6).table]",
            "def orders():\n    return [[B(0), F(0)]] * 3",
        ],
    },
]
