"""Answers to the exercises of the notebook."""

HALO = """
def with_halo(block, n):
    up, down = {up}, {down}
    left = ppermute(block[{last}:], "i", up)
    right = ppermute(block[:1], "i", down)
    return md.numpy.concatenate([{order}])
"""
LINE = {"up": "[(r, r + 1) for r in range(n - 1)]", "down": "[(r + 1, r) for r in range(n - 1)]"}
RING = {"up": "[(r, (r + 1) % n) for r in range(n)]", "down": "[(r, (r - 1) % n) for r in range(n)]"}

SCATTER = "def psum_scatter_meaning(blocks):\n    return "

EXERCISES = [
    {
        "right": SCATTER + "np.split(sum(blocks), len(blocks))",
        "wrong": [
            SCATTER + "[sum(blocks)] * len(blocks)",
            SCATTER + "[np.split(block, len(blocks))[r] for r, block in enumerate(blocks)]",
            SCATTER + "[sum(blocks)[r] for r in range(len(blocks))]",
            SCATTER + "np.split(sum(blocks), len(blocks))[::-1]",
        ],
    },
    {
        "right": HALO.format(**LINE, last=-1, order="left, block, right"),
        "wrong": [
            HALO.format(**RING, last=-1, order="left, block, right"),
            HALO.format(**LINE, last=-1, order="right, block, left"),
            HALO.format(**LINE, last=0, order="left[-1:], block, right"),
            "def with_halo(block, n):\n    return md.numpy.pad(block, 1)",
        ],
    },
    {
        "right": "def transposed(block):\n    return all_to_all(block.T, 'i', 0, 1, tiled=True)",
        "wrong": [
            "def transposed(block):\n    return all_to_all(block, 'i', 1, 0, tiled=True)",
            "def transposed(block):\n    return block.T",
            "def transposed(block):\n    return all_to_all(block, 'i', 1, 0, tiled=True).reshape(-1, 4)",
            "def transposed(block):\n"
            "    return pscatter(all_gather_invariant(block, 'i', tiled=True).T, 'i', tiled=True)",
        ],
    },
    {
        "right": "way_back = ['psum', None, 'all_gather_invariant']",
        "wrong": [
            "way_back = ['psum', 'psum', 'all_gather_invariant']",
            "way_back = ['psum', None, 'psum']",
            "way_back = [None, None, None]",
            "way_back = ['pbroadcast', None, 'all_gather_invariant']",
        ],
    },
]
