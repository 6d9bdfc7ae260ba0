EXERCISES = [
    {
        "right": """
def slope(f, x):
    h = 6e-6 * abs(x)
    return (f(x + h) - f(x - h)) / (2 * h)
""",
        "wrong": [
            "def slope(f, x): return (f(x + 6e-6) - f(x - 6e-6)) / 1.2e-5",
            "def slope(f, x): return (f(x + 1.5e-8 * x) - f(x)) / (1.5e-8 * x)",
            "def slope(f, x): return 3 * x**2",
            "def slope(f, x): return f(x)",
            "def slope(f, x): return x / 0.0",
        ],
    },
    {
        "right": """
def curvature(f, x, h=1.5e-4):
    return (f(x + h) - 2 * f(x) + f(x - h)) / h**2
""",
        "wrong": [
            "def curvature(f, x, h=6e-6): return (f(x + h) - 2 * f(x) + f(x - h)) / h**2",
            "def curvature(f, x, h=1e-2): return (f(x + h) - 2 * f(x) + f(x - h)) / h**2",
            "def curvature(f, x, h=1e-4): return (f(x + h) - f(x - h)) / (2 * h)",
            "def curvature(f, x): return -np.sin(x)",
        ],
    },
    {
        "right": """
def derivative_of_call(operation, e):
    return cos(e) * D2(e) if operation == "sin" else -1 * sin(e) * D2(e)
""",
        "wrong": [
            "def derivative_of_call(operation, e): return cos(e) if operation == 'sin' else -1 * sin(e)",
            "def derivative_of_call(operation, e): return cos(e) * D2(e) if operation == 'sin' else sin(e) * D2(e)",
            "def derivative_of_call(operation, e): return cos(e) * D(e) if operation == 'sin' else -1 * sin(e) * D(e)",
        ],
    },
    {
        "right": """
def complex_step(f, x, h=1e-100):
    return np.imag(f(x + 1j * h)) / h
""",
        "wrong": [
            "def complex_step(f, x, h=1e-100): return (f(x + 1j * h)) / h",
            "def complex_step(f, x, h=1e-100): return np.real(f(x + 1j * h)) / h",
            "def complex_step(f, x, h=1e-4): return np.imag(f(x + 1j * h)) / h",
            "def complex_step(f, x, h=1e-6): return (f(x + h) - f(x - h)) / (2 * h)",
        ],
    },
]
