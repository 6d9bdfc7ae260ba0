_LEAN = """
def lean(h, w, n):
    for start in range(0, n, 12):
        h = CHECKPOINTED(lambda h, w: steps(h, w, min(12, n - start)))(h, w)
    return h
"""

EXERCISES = [
    {
        "right": """
def horner(coefficients, x):
    return md.scan(lambda y, c: (y * x + c, None), 0.0, coefficients)[0]
""",
        "wrong": [
            """
def horner(coefficients, x):
    y = 0.0
    for c in coefficients:
        y = y * x + c
    return y
""",
            "def horner(coefficients, x): return md.scan(lambda y, c: (y * x + c, None), 0.0, coefficients[::-1])[0]",
            "def horner(coefficients, x): return md.scan(lambda y, c: ((y + c) * x, None), 0.0, coefficients)[0]",
        ],
    },
    {
        "right": """
def geometric(x):
    def step(state):
        total, term = state
        return total + term * x, term * x

    return md.while_loop(lambda state: state[1] >= 1e-12, step, (1.0, 1.0))[0]
""",
        "wrong": [
            """
def geometric(x):
    total = term = 1.0
    while term >= 1e-12:
        term = term * x
        total = total + term
    return total
""",
            "def geometric(x): return md.fori_loop(0, 40, lambda i, s: 1.0 + x * s, 1.0)",
            "def geometric(x): return 1 / (1 - md.stop_gradient(x))",
        ],
    },
    {
        "right": """
@md.custom_jvp
def kepler(m):
    return solve(m)

@kepler.defjvp
def kepler_jvp(primals, tangents):
    u = kepler(primals[0])
    return u, tangents[0] / (1 - 0.5 * np.cos(u))
""",
        "wrong": [
            "def kepler(m): return solve(m)",
            """
@md.custom_jvp
def kepler(m):
    return solve(m)

@kepler.defjvp
def kepler_jvp(primals, tangents):
    u = kepler(primals[0])
    return u, tangents[0] * (1 - 0.5 * np.cos(u))
""",
            """
@md.custom_jvp
def kepler(m):
    return solve(m)

@kepler.defjvp
def kepler_jvp(primals, tangents):
    return kepler(primals[0]), tangents[0] / (1 - 0.5 * np.cos(primals[0]))
""",
            "def kepler(m): return solve(md.stop_gradient(m))",
        ],
    },
    {
        "right": _LEAN.replace("CHECKPOINTED", "md.checkpoint"),
        "wrong": [
            _LEAN.replace("CHECKPOINTED", ""),
            _LEAN.replace("CHECKPOINTED", "md.checkpoint").replace("min(12, n - start)", "12"),
            "def lean(h, w, n): return steps(h, w, n)",
            "def lean(h, w, n): return md.checkpoint(lambda h, w: steps(h, w, n))(h, w)",
        ],
    },
]
