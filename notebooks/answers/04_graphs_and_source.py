_SHARED = """
def shared(tape):
    stands_for, known, kept = {}, {}, []
    for eqn in tape.equations:
        inputs = [stands_for.get(a, a) if isinstance(a, Var) else a for a in eqn.inputs]
        key = KEY
        if key in known:
            stands_for[eqn.outputs[0]] = known[key]
        else:
            known[key] = eqn.outputs[0]
            kept.append(Equation(eqn.primitive, inputs, eqn.params, eqn.outputs))
    return Tape(tape.inputs, kept, [stands_for.get(a, a) if isinstance(a, Var) else a for a in tape.outputs])
"""
_NEUTRAL = """
def neutral(tape):
    stands_for, kept = {}, []
    for eqn in tape.equations:
        inputs = [stands_for.get(a, a) if isinstance(a, Var) else a for a in eqn.inputs]
        x, y = inputs[0], inputs[-1]
        match str(eqn.primitive), x if not isinstance(x, Var) else None, y if not isinstance(y, Var) else None:
            case CASES:
                stands_for[eqn.outputs[0]] = y
            case ("add" | "subtract", _, 0.0) | ("multiply", _, 1.0):
                stands_for[eqn.outputs[0]] = x
            case _:
                kept.append(Equation(eqn.primitive, inputs, eqn.params, eqn.outputs))
    return Tape(tape.inputs, kept, [stands_for.get(a, a) if isinstance(a, Var) else a for a in tape.outputs])
"""

EXERCISES = [
    {
        "right": _SHARED.replace("KEY", "eqn.primitive, tuple(map(id, inputs)), repr(eqn.params)"),
        "wrong": [
            _SHARED.replace("KEY", "eqn.primitive, tuple(map(id, inputs))"),
            _SHARED.replace("KEY", "eqn.primitive, tuple(map(id, eqn.inputs)), repr(eqn.params)"),
            _SHARED.replace("KEY", "tuple(map(id, inputs)), repr(eqn.params)"),
            "def shared(tape): return tape",
            "def shared(tape): return optimize(tape).equations",
        ],
    },
    {
        "right": _NEUTRAL.replace("CASES", '("add", 0.0, _) | ("multiply", 1.0, _)'),
        "wrong": [
            _NEUTRAL.replace("CASES", '("add" | "subtract", 0.0, _) | ("multiply", 1.0, _)'),
            _NEUTRAL.replace("CASES", '("add", 0.0, _) | ("multiply" | "divide", 1.0, _)'),
            _NEUTRAL.replace("CASES", '("add", 0.0, _)'),
            "def neutral(tape): return tape",
        ],
    },
    {
        "right": """
def root(x):
    positive = x > 0
    return np.where(positive, np.sqrt(np.where(positive, x, 1.0)), 0.0)
""",
        "wrong": [
            "def root(x): return np.where(x > 0, np.sqrt(x), 0.0)",
            "def root(x): return np.sqrt(np.maximum(x, 0.0))",
            "def root(x): return np.array([v**0.5 if v > 0 else 0.0 for v in x])",
            "def root(x): return np.sqrt(np.abs(x))",
        ],
    },
    {
        "right": "def products(n): return 3 * n - 1",
        "wrong": [
            "def products(n): return 3 * n",
            "def products(n): return 2 * n",
            "def products(n): return 2",
        ],
    },
]
