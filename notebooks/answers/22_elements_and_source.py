MAXIMUM = """\
def ad_max(x, y):
    nodes = [x if isinstance(x, Element) else Element(x) for x in (x, y)]
    a, b = (node.value for node in nodes)
    slopes = (0.5, 0.5) if a == b else (float(a > b), float(b > a))
    return Element(max(a, b), tuple(zip(nodes, slopes)))
"""

EXERCISES = [
    {
        "right": "visited_with_s, visited_without_s = 5, 7",
        "wrong": [
            "visited_with_s, visited_without_s = 5, 5",  # the library does not find equal elements
            "visited_with_s, visited_without_s = 3, 5",  # the inputs are visited, too
        ],
    },
    {
        "right": "def entries(n):\n    return n + 2",
        "wrong": [
            "def entries(n):\n    return n",
            "def entries(n):\n    return n + 1",  # y = 1.0 overwrites, too
        ],
    },
    {
        "right": "times_smaller = 16",
        "wrong": ["times_smaller = 2", "times_smaller = 1000"],
    },
    {
        "right": "bytes_of_fused_loop = 2 * 8 * n",
        "wrong": ["bytes_of_fused_loop = moved(tape)", "bytes_of_fused_loop = 8 * n"],
    },
    {
        "right": MAXIMUM,
        "wrong": [
            MAXIMUM.replace("(0.5, 0.5)", "(1.0, 0.0)"),
            MAXIMUM.replace("[x if isinstance(x, Element) else Element(x) for x in (x, y)]", "[x, y]"),
            "def ad_max(x, y):\n    return x if x.value > y.value else y",
        ],
    },
    {
        "right": 'hypot_rule = ("{d} * {a} / np.hypot({a}, {b})", "{d} * {b} / np.hypot({a}, {b})")',
        "wrong": [
            'hypot_rule = ("{d} * {a}", "{d} * {b}")',
            'hypot_rule = ("{a} / np.hypot({a}, {b})", "{b} / np.hypot({a}, {b})")',  # without the cotangent
            'hypot_rule = "{d} * {a} / np.hypot({a}, {b})"',
        ],
    },
    {
        "right": "t = np.log(2) / 2 * np.cos(np.pi * (np.arange(20) + 0.5) / 20)\n"
        "four_coefficients = np.polyfit(t, (np.expm1(t) - t) / t**2, 3)[::-1]",
        "wrong": [
            "four_coefficients = taylor[:4]",
            "four_coefficients = minimax",
        ],
    },
]
