"""Answers to the exercises of the notebook."""

DOWNWARDS = """
def product_downwards(left, right, n):
    here, width = axis_index("i"), right.shape[0]
    out = 0.0
    for step in range(n):
        owner = {owner}
        out = out + md.dynamic_slice_in_dim(left, owner * width, width, 1) @ right
        if step < {last}:
            right = ppermute(right, "i", [(r, {to}) for r in range(n)])
    return out
"""

PLANE = """
from collectives import psum, psum_scatter

def product_on_a_plane(left, right):
    return {}
"""

CUBE = """
from collectives import all_gather, psum, psum_scatter

def product_in_a_cube(left, right):
    left, right = all_gather(left, "{}", axis=1, tiled=True), all_gather(right, "{}", axis=0, tiled=True)
    return {}
"""

RECEIVED = """
def bytes_received(s, p):
    q, r = round(p ** (1 / 3)), round(p ** (1 / 2))
    return {}
"""

EXERCISES = [
    {
        "right": DOWNWARDS.format(owner="(here + step) % n", last="n - 1", to="(r - 1) % n"),
        "wrong": [
            DOWNWARDS.format(owner="(here - step) % n", last="n - 1", to="(r - 1) % n"),
            DOWNWARDS.format(owner="(here - step) % n", last="n - 1", to="(r + 1) % n"),
            DOWNWARDS.format(owner="(here + step) % n", last="n", to="(r - 1) % n"),
            "def product_downwards(left, right, n):\n    return matmul.matmul_all_gather(left, right, 'i')",
        ],
    },
    {
        "right": PLANE.format('psum_scatter(left @ right, "y", scatter_dimension=1, tiled=True)'),
        "wrong": [
            PLANE.format('psum(left @ right, "y")'),
            PLANE.format('psum_scatter(left @ right, "y", scatter_dimension=0, tiled=True)'),
            PLANE.format('psum_scatter(left @ right, "x", scatter_dimension=1, tiled=True)'),
            PLANE.format("left @ right"),
        ],
    },
    {
        "right": "def overlapped_time(n, c, m):\n    return c + (n - 1) * max(c, m)",
        "wrong": [
            "def overlapped_time(n, c, m):\n    return n * max(c, m)",
            "def overlapped_time(n, c, m):\n    return n * c + (n - 1) * m",
            "def overlapped_time(n, c, m):\n    return max(n * c, (n - 1) * m)",
        ],
    },
    {
        "right": "def way_back_of_scatter(m, k, p, n):\n    return 'all_gather', 8 * m // n * p",
        "wrong": [
            "def way_back_of_scatter(m, k, p, n):\n    return 'psum_scatter', 8 * m // n * p",
            "def way_back_of_scatter(m, k, p, n):\n    return 'all_gather', 8 * m * p",
            "def way_back_of_scatter(m, k, p, n):\n    return 'all_gather', 8 * k // n * p",
        ],
    },
    {
        "right": CUBE.format("y", "x", 'psum_scatter(left @ right, "z", scatter_dimension=1, tiled=True)'),
        "wrong": [
            CUBE.format("y", "x", 'psum(left @ right, "z")'),
            CUBE.format("y", "x", 'psum_scatter(left @ right, "z", scatter_dimension=0, tiled=True)'),
            CUBE.format("z", "x", 'psum_scatter(left @ right, "y", scatter_dimension=1, tiled=True)'),
            CUBE.format("y", "x", 'psum_scatter(left @ right, "z", scatter_dimension=1, tiled=True) / 2'),
        ],
    },
    {
        "right": RECEIVED.format("8 * 3 * (q - 1) * s * s / p, 8 * 2 * (r - 1) * s * s / p"),
        "wrong": [
            RECEIVED.format("8 * 3 * q * s * s / p, 8 * 2 * r * s * s / p"),
            RECEIVED.format("8 * 2 * (q - 1) * s * s / p, 8 * 2 * (r - 1) * s * s / p"),
            RECEIVED.format("8 * 3 * (q - 1) * s * s / p, 8 * 2 * (r - 1) * s * s / r"),
        ],
    },
]
