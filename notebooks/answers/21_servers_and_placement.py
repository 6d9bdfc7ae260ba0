"""Answers to the exercises of the notebook."""

SENT = "gb_sent_by_server, gb_sent_on_ring = {}"

WAITS = "updates_until_48, first_worker_waits = {}"

STABLE = "largest_step = {}\nstays_stable = {}"

ENDS = "ends_synchronously, ends_asynchronously = {}"

VALUES = "sent_forward, sent_backward = {}"

TIMES = "one_rank, two_ranks, many_ranks = {}"

ROOT = "bytes_over_root = {}\nstep_ms = {}"

SERVER = """
def train_asynchronously(w, targets, seconds, rate, until):
    computing = [(s, k, w) for k, s in enumerate(seconds)]
    heapq.heapify(computing)
    while computing[0][0] <= until:
        now, k, pulled = heapq.heappop(computing)
        {}
        heapq.heappush(computing, (now + seconds[k], k, w))
    return w
"""

EXERCISES = [
    {"right": SENT.format("63, 2 * 63 / 64"), "wrong": [SENT.format("64, 2 * 63 / 64"), SENT.format("63, 63")]},
    {
        "right": WAITS.format("12, 36"),
        "wrong": [WAITS.format("48, 0"), WAITS.format("12, 3"), WAITS.format("12, 48")],
    },
    {
        "right": STABLE.format("2 * math.sin(math.pi / 14)", "False"),
        "wrong": [
            STABLE.format("2 * math.sin(math.pi / 14)", "True"),
            STABLE.format("0.5", "False"),
            STABLE.format("2", "False"),
        ],
    },
    {"right": ENDS.format("2, 1.5"), "wrong": [ENDS.format("2, 2"), ENDS.format("2, 2.5"), ENDS.format("1.5, 1.5")]},
    {
        "right": VALUES.format("2, 2"),
        "wrong": [VALUES.format("2, 0"), VALUES.format("1, 1"), VALUES.format("3, 3")],
    },
    {
        "right": TIMES.format("4 * 0.53, 2 * 0.53, 2 * 0.53"),
        "wrong": [TIMES.format("2.1, 1.05, 0.52"), TIMES.format("2.1, 0.52, 0.52"), TIMES.format("2.1, 1.57, 1.05")],
    },
    {
        "right": ROOT.format("200_000_000", "200_000_000 / 32e9 * 1e3"),
        "wrong": [
            ROOT.format("400_000_000", "12.5"),
            ROOT.format("50_000_000", "1.56"),
            ROOT.format("200_000_000", "1.56"),
        ],
    },
    {
        "right": SERVER.format("w = w - rate * 2 * (pulled - targets[k]) / len(targets)"),
        "wrong": [
            # at the parameters of now: nothing is stale
            SERVER.format("w = w - rate * 2 * (w - targets[k]) / len(targets)"),
            # as far as all workers together
            SERVER.format("w = w - rate * 2 * (pulled - targets[k])"),
            SERVER.format("w = w + rate * 2 * (pulled - targets[k]) / len(targets)"),
        ],
    },
    {
        "right": "placement = [0] * 6 + [1] * 8",
        "wrong": [
            "placement = [0, 1] * 7",
            "placement = [0] * 14",
            "placement = [0] * 4 + [1] * 10",
            "placement = [0] * 6 + [1] * 7 + [0]",
        ],
    },
]
