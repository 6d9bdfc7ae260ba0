EXERCISES = [
    {
        "right": "v3_bar, v2_bar, v1_bar, x2_bar, x1_bar = 1.0, 3.0, 1.0, 1.0, 4.0",
        "wrong": [
            "v3_bar, v2_bar, v1_bar, x2_bar, x1_bar = 1.0, 3.0, 1.0, 1.0, 3.0",
            "v3_bar, v2_bar, v1_bar, x2_bar, x1_bar = 1.0, 3.0, 1.0, 1.0, 1.0",
            "v3_bar, v2_bar, v1_bar, x2_bar, x1_bar = 3.0, 1.0, 3.0, 3.0, 6.0",
            "v3_bar, v2_bar, v1_bar, x2_bar, x1_bar = 1.0, 1.0, 3.0, 1.0, 4.0",
        ],
    },
    {
        "right": """
def divide(a, b):
    a, b = dual(a), dual(b)
    return Dual(a.value / b.value, (a.tangent * b.value - a.value * b.tangent) / b.value**2)
""",
        "wrong": [
            """
def divide(a, b):
    a, b = dual(a), dual(b)
    return Dual(a.value / b.value, a.tangent / b.tangent)
""",
            """
def divide(a, b):
    a, b = dual(a), dual(b)
    return Dual(a.value / b.value, (a.tangent * b.value + a.value * b.tangent) / b.value**2)
""",
            """
def divide(a, b):
    return Dual(a.value / b.value, (a.tangent * b.value - a.value * b.tangent) / b.value**2)
""",
            "def divide(a, b): return dual(a)",
        ],
    },
    {
        "right": """
def jacobian(f, x):
    n, m = len(x), len(f(x))
    if n < m:
        return np.stack([column(f, x, j) for j in range(n)], axis=1)
    return np.stack([row(f, x, i) for i in range(m)])
""",
        "wrong": [
            "def jacobian(f, x): return np.stack([column(f, x, j) for j in range(len(x))], axis=1)",
            "def jacobian(f, x): return np.stack([row(f, x, i) for i in range(len(f(x)))])",
            "def jacobian(f, x): return np.stack([column(f, x, j) for j in range(len(x))])",
            "def jacobian(f, x): return md.jacrev(f)(x)",
        ],
    },
    {
        "right": """
def curvature(f, x, v):
    return v @ md.jvp(md.grad(f), (x,), (v,))[1]
""",
        "wrong": [
            "def curvature(f, x, v): return v @ md.hessian(f)(x) @ v",
            "def curvature(f, x, v): return v @ md.grad(f)(x)",
            "def curvature(f, x, v): return md.jvp(md.grad(f), (x,), (v,))[1]",
        ],
    },
]
