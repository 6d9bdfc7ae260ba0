_EXP = """

def exp(x):
    x = number(x)
    return record("exp", math.exp(x.value), (x,), lambda bar: (bar * exp(x),))
"""
_BOUNDS = """
def bounds(tape, *intervals):
    known = dict(zip(tape.inputs, intervals))
    for eqn in tape.equations:
        found = [known[a] if isinstance(a, Var) else (float(a), float(a)) for a in eqn.inputs]
        (a, b), (c, d) = found[0], found[-1]
        known[eqn.outputs[0]] = {
            "add": (a + c, b + d),
            "subtract": (SUBTRACT),
            "multiply": (MULTIPLY),
            "negative": (-b, -a),
        }[str(eqn.primitive)]
    return known[tape.outputs[0]]
"""
_ALL = "min(a * c, a * d, b * c, b * d), max(a * c, a * d, b * c, b * d)"
_KEPT = """
def stored_names(tape):
    found = SET
    for eqn in tape.equations:
        names = [a for a in eqn.inputs if isinstance(a, Var)]
        if str(eqn.primitive) in ("sin", "cos", "log") or (str(eqn.primitive) == "multiply" CONDITION):
            found += names
    return len(COUNTED)
"""

EXERCISES = [
    {
        "right": """
def divide(x, y):
    return number(x) * reciprocal(number(y))
"""
        + _EXP,
        "wrong": [
            """
def divide(x, y):
    x, y = number(x), number(y)
    q = x.value / y.value
    return record("divide", q, (x, y), lambda bar: (bar * reciprocal(y), bar * (-q / y.value)))
"""
            + _EXP,
            """
def divide(x, y):
    x, y = number(x), number(y)
    return record("divide", x.value / y.value, (x, y), lambda bar: (bar * reciprocal(y), bar * x * reciprocal(y * y)))
"""
            + _EXP,
            """
def divide(x, y):
    return x * reciprocal(y)
"""
            + _EXP.replace("exp(x),)", "x,)"),
            "def divide(x, y): return number(x) * reciprocal(number(y))\ndef exp(x): return Number(math.exp(x.value))",
        ],
    },
    {
        "right": _BOUNDS.replace("SUBTRACT", "a - d, b - c").replace("MULTIPLY", _ALL),
        "wrong": [
            _BOUNDS.replace("SUBTRACT", "a - c, b - d").replace("MULTIPLY", _ALL),
            _BOUNDS.replace("SUBTRACT", "a - d, b - c").replace("MULTIPLY", "a * c, b * d"),
            _BOUNDS.replace("SUBTRACT", "a - d, b - c").replace("MULTIPLY", "min(a * c, b * d), max(a * c, b * d)"),
            "def bounds(tape, *intervals): return (-100.0, 100.0)",
        ],
    },
    {
        "right": """
def smooth_t(y):
    return np.pad(y, (0, 2)) + 2 * np.pad(y, (1, 1)) + np.pad(y, (2, 0))
""",
        "wrong": [
            "smooth_t = smooth",
            "def smooth_t(y): return smooth(np.pad(y, (1, 1)))",
            "def smooth_t(y): return np.pad(y, (0, 2)) + np.pad(y, (1, 1)) + np.pad(y, (2, 0))",
            "def smooth_t(y): return np.pad(4 * y, (1, 1))",
            "def smooth_t(y): return np.zeros(len(y) + 2)",
        ],
    },
    {
        "right": _KEPT.replace("SET", "[]")
        .replace("CONDITION", "and len(names) == 2")
        .replace("COUNTED", "set(found)"),
        "wrong": [
            _KEPT.replace("SET", "[]").replace("CONDITION", "and len(names) == 2").replace("COUNTED", "found"),
            _KEPT.replace("SET", "[]").replace("CONDITION", "").replace("COUNTED", "set(found)"),
            "def stored_names(tape): return len(tape.equations)",
            "def stored_names(tape): return 2",
        ],
    },
]
