"""Answers to the puzzles: right ones, and wrong ones that the judge must tell apart."""


def body(number, arguments, result):
    """The source of a puzzle's function that returns one expression."""
    return f"def puzzle_{number}({arguments}):\n    return {result}"


def answers(number, arguments, right, *wrong):
    return {"right": body(number, arguments, right), "wrong": [body(number, arguments, w) for w in wrong]}


AROUND = '"i", [(r, (r + 1) % 4) for r in range(4)]'
BACK = '"i", [(r, (r - 1) % 4) for r in range(4)]'

NEIGHBORS = f"""\
def puzzle_5(x):
    left, right = ppermute(x[-1:], {AROUND}), ppermute(x[:1], {BACK})
    y = np.concatenate([left, x, right])
    return y[:-2] + y[2:]
"""
SOFTMAX = """\
def puzzle_10(x):
    e = np.exp(x - pmax(np.max(x, 1), "i")[:, None])
    return e / psum(np.sum(e, 1), "i")[:, None]
"""
IN_LOGARITHMS = """\
def puzzle_10(x):  # a rank of each pair reduces one of the rows, as the halves of an all-reduce
    odd, near, far = axis_index("i") % 2, [(r, r ^ 1) for r in range(4)], [(r, r ^ 2) for r in range(4)]
    rows = md.nn.logsumexp(x, axis=1)
    mine = np.logaddexp(rows[odd], ppermute(rows[1 - odd], "i", near))
    mine = np.logaddexp(mine, ppermute(mine, "i", far))
    both = np.stack([mine, ppermute(mine, "i", near)])
    return np.exp(x - np.where(odd, both[::-1], both)[:, None])
"""
LARGEST = """\
def puzzle_11(x):
    top = np.max(x)
    return pmin(np.where(top == pmax(top, "i"), 4 * axis_index("i") + np.argmax(x), 16), "i")
"""
LOOK_UP = """\
def puzzle_12(table):
    local = np.array([5, 0, 4]) - 2 * axis_index("i")
    mine = (local >= 0) & (local < 2)
    return psum(np.where(mine[:, None], table[np.clip(local, 0, 1)], 0), "i")
"""
HELPED = """\
def puzzle_12(table):  # rows 0 and 4 are gathered from four ranks, row 5 is summed
    moved = ppermute(table[0, 1:], "i", [(0, 3), (2, 1)])
    one = np.where(axis_index("i") % 2, moved, table[0, :1])
    four = all_gather_invariant(one, "i", tiled=True)[np.array([0, 3, 2, 1])]
    row = psum(np.where(axis_index("i") == 2, table[1], 0.0), "i")
    return np.concatenate([row, four]).reshape(3, 2)
"""
RUNNING = """\
def puzzle_13(x):
    before = 0.0
    for r in range(3):
        sent = ppermute(before + np.sum(x), "i", [(r, r + 1)])
        before = np.where(axis_index("i") == r + 1, sent, before)
    return before + np.cumsum(x)
"""
DOUBLING = """\
def puzzle_13(x):
    total = np.sum(x) + ppermute(np.sum(x), "i", [(0, 1), (1, 2), (2, 3)])
    total = total + ppermute(total, "i", [(0, 2), (1, 3)])
    return np.cumsum(x) + total - np.sum(x)
"""
MICROBATCHES = """\
def puzzle_16(w, x):
    w = pbroadcast(w, "i")
    total = 0.0
    for example in x.reshape(2, 2):
        total = total + md.grad(lambda w: (example @ w - 1) ** 2)(w)
    return psum(total, "i") / 8
"""
ERROR = "np.mean((x.reshape(-1, 2) @ w - 1) ** 2)"
EARLY = """\
def puzzle_19():
    return [
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]
"""
FILLED = """\
def puzzle_20():
    return [
        "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4",
    ]
"""

EXERCISES = [
    answers(
        1, "x", 'psum(x, "i")', "x", 'np.sum(all_gather_invariant(x, "i"), 0)',
        'psum(x.astype("float32"), "i").astype("float64")',
    ),
    answers(2, "x", 'psum(np.sum(x), "i")', 'np.sum(psum(x, "i"))', 'pmean(np.sum(x), "i")'),
    answers(3, "x", f"ppermute(x, {AROUND})", f"ppermute(x, {BACK})", 'all_gather(x, "i")[axis_index("i") - 1]'),
    answers(4, "x", 'ppermute(x[::-1], "i", [(0, 3), (1, 2), (2, 1), (3, 0)])', "x[::-1]", f"ppermute(x, {AROUND})"),
    {
        "right": NEIGHBORS,
        "wrong": [
            body(5, "x", "np.roll(x, 1) + np.roll(x, -1)"),
            NEIGHBORS.replace("x[-1:], ", "x, ").replace("[left,", "[left[-1:],"),
        ],
    },
    answers(6, "x", 'x - pmean(np.mean(x), "i")', "x - np.mean(x)", 'x - np.mean(all_gather(x, "i"))'),
    answers(
        7,
        "x",
        'all_to_all(x, "i", 1, 0, tiled=True).T',
        "x.T",
        'all_gather(x, "i", tiled=True)[:, axis_index("i")][None]',
    ),
    answers(
        8, "a, b", 'psum_scatter(a @ b, "i", tiled=True)', 'psum(a @ b, "i")', 'psum(a @ b, "i")[axis_index("i")][None]'
    ),
    answers(9, "c, x", 'psum(c @ x, "i")', 'c @ psum(x, "i")', "c @ x"),
    {
        "right": IN_LOGARITHMS,
        "wrong": [
            SOFTMAX,
            body(10, "x", "md.nn.softmax(x, axis=1)"),
            SOFTMAX.replace('x - pmax(np.max(x, 1), "i")[:, None]', "x"),
        ],
    },
    {
        "right": LARGEST,
        "wrong": [
            LARGEST.replace("4 * axis_index", "axis_index"),
            body(11, "x", 'np.argmax(all_gather_invariant(x, "i", tiled=True))'),
        ],
    },
    {
        "right": HELPED,
        "wrong": [
            LOOK_UP,
            LOOK_UP.replace("np.where(mine[:, None], table[np.clip(local, 0, 1)], 0)", "table[np.clip(local, 0, 1)]"),
            body(12, "table", 'all_gather_invariant(table, "i", tiled=True)[np.array([5, 0, 4])]'),
        ],
    },
    {"right": RUNNING, "wrong": [DOUBLING, body(13, "x", "np.cumsum(x)")]},
    answers(
        14, "x",
        'ppermute(x, ("i", "j"), [(0, 0), (1, 2), (2, 1), (3, 3)])',
        'ppermute(x, ("i", "j"), [(1, 2), (2, 1)])',
        "x",
    ),
    answers(15, "w, x", f'pmean({ERROR}, "i")', f'psum({ERROR}, "i")', f'np.mean(all_gather_invariant({ERROR}, "i"))'),
    {
        "right": MICROBATCHES,
        "wrong": [
            MICROBATCHES.replace('    w = pbroadcast(w, "i")\n', ""),
            MICROBATCHES.replace('psum(total, "i") / 8', 'psum(total, "i")'),
        ],
    },
    answers(
        17, "w, x",
        'pmean(np.mean((x @ all_gather(w, "i", tiled=True) - 1) ** 2), "i")',
        'pmean(np.mean((x @ all_gather_invariant(w, "i", tiled=True) - 1) ** 2), "i")',
        'pmean(np.mean((x[:, :2] @ w - 1) ** 2), "i")',
    ),
    answers(
        18, "x, v, w",
        'np.sum(psum(md.nn.relu(x @ v) @ w, "i") ** 2)',
        'psum(np.sum((md.nn.relu(x @ v) @ w) ** 2), "i")',
        'np.sum((md.nn.relu(all_gather_invariant(x @ v, "i", axis=1, tiled=True)) '
        '@ all_gather_invariant(w, "i", tiled=True)) ** 2)',
    ),
    {
        "right": EARLY,
        "wrong": [
            body(19, "", '["F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"] * 3'),
            body(19, "", '["F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"] * 3'),
            body(19, "", '["F0 F1 X2"] * 3'),
            body(19, "", '["F0 B1 F1 B0 F2 B2 F3 B3 F4 B4"] * 3'),
        ],
    },
    {
        "right": FILLED,
        "wrong": [
            EARLY.replace("19", "20"),
            FILLED.replace("F2 B0 W0 F3", "F2 F3 B0 W0"),
            body(20, "", '["F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 F4 B4 W4"] * 3'),
        ],
    },
]  # fmt: skip
