"""Answers to the exercises of notebooks/24_sparse_and_high.ipynb: right ones, and wrong ones."""

BYTES = "bytes_of_records = {}"
SCHEDULES = "reversed_by_6_slots, taken_with_1_slot = {}, {}"
GREEDY = """
def greedy(pattern):
    colors = []
    for j in range(pattern.shape[1]):
        conflicts = (pattern & pattern[:, [j]]).any(0)
        used = {USED}
        colors.append(next(c for c in range(len(used) + 1) if c not in used))
    return colors
"""
LOG = """
def log_series(x):
    y = [np.log(x[0])]
    for k in range(1, len(x)):
        terms = sum(FACTOR * y[j] * x[k - j] for j in range(1, k))
        y.append((x[k] - terms / k) / x[0])
    return y
"""
AGM = """
def agm(a, b):
    step = lambda s: ((s[0] + s[1]) / 2, np.sqrt(s[0] * s[1]))
    return LOOP[0]
"""
WHILE = "md.while_loop(lambda s: abs(s[0] - s[1]) >= 1e-12, step, (a, b), max_steps={})"

EXERCISES = [
    {
        "right": "products_by_reach = {1: 3, 2: 5, 5: 11}",
        "wrong": ["products_by_reach = {1: 3, 2: 4, 5: 10}", "products_by_reach = {1: 3, 2: 5, 5: 1000}"],
    },
    {
        "right": "arrow_by_columns, arrow_by_rows, arrow_by_both = 1000, 1000, 3",
        "wrong": [
            "arrow_by_columns, arrow_by_rows, arrow_by_both = 1000, 1000, 2",
            "arrow_by_columns, arrow_by_rows, arrow_by_both = 2, 1000, 3",
            "arrow_by_columns, arrow_by_rows, arrow_by_both = 1000, 2, 3",
        ],
    },
    {
        "right": BYTES.format("2 * 1000 * 8"),
        "wrong": [BYTES.format("1000 * 8"), BYTES.format("2 * 1000 * 4"), BYTES.format("2 * 8")],
    },
    {
        "right": SCHEDULES.format(84, 45),
        "wrong": [SCHEDULES.format(28, 45), SCHEDULES.format(84, 55), SCHEDULES.format(84, 10)],
    },
    {
        "right": GREEDY.replace("{USED}", "{c for c, shared in zip(colors, conflicts) if shared}"),
        "wrong": [
            "def greedy(pattern): return list(range(pattern.shape[1]))",
            "def greedy(pattern): return [j % 3 for j in range(pattern.shape[1])]",
            GREEDY.replace("{USED}", "set(colors[-4:])"),
            GREEDY.replace("{USED}", "{c for c, shared in zip(colors, pattern[:, j]) if shared}"),
        ],
    },
    {
        "right": LOG.replace("FACTOR", "j"),
        "wrong": [
            LOG.replace("FACTOR", "1"),
            LOG.replace("FACTOR", "(k - j)"),
            "def log_series(x): return [np.log(x[0]), *x[1:]]",
        ],
    },
    {
        "right": AGM.replace("LOOP", WHILE.format(20)),
        "wrong": [
            AGM.replace("LOOP", WHILE.format("None")),
            AGM.replace("LOOP", WHILE.format(2)),
            AGM.replace("LOOP", "md.fori_loop(0, 10, lambda _, s: step(s), (a, b))"),
            "def agm(a, b): return (a + b) / 2",
        ],
    },
]
