"""Answers to the exercises of notebooks/06_shard_map.ipynb: right ones, and wrong ones."""

EXERCISES = [
    {
        "right": "block_shapes = (12, 4), (3, 16), (24, 8)",
        "wrong": [
            "block_shapes = (6, 8), (3, 16), (24, 8)",  # P("x", "y")
            "block_shapes = (12, 4), (6, 8), (24, 8)",
            "block_shapes = (12, 4), (3, 16), (12, 16)",
            "block_shapes = (12, 4)",
        ],
    },
    {
        "right": """
def standardize(block):
    mean = pmean(np.mean(block, axis=0), "i")
    variance = pmean(np.mean((block - mean) ** 2, axis=0), "i")
    return (block - mean) / np.sqrt(variance)
""",
        "wrong": [
            # by the block's own mean and deviation
            """
def standardize(block):
    return (block - np.mean(block, axis=0)) / np.std(block, axis=0)
""",
            # the mean of the blocks' deviations
            """
def standardize(block):
    return (block - pmean(np.mean(block, axis=0), "i")) / pmean(np.std(block, axis=0), "i")
""",
            # psum for pmean
            """
def standardize(block):
    mean = psum(np.mean(block, axis=0), "i")
    return (block - mean) / np.sqrt(psum(np.mean((block - mean) ** 2, axis=0), "i"))
""",
            # the variance in place of its root
            """
def standardize(block):
    mean = pmean(np.mean(block, axis=0), "i")
    return (block - mean) / pmean(np.mean((block - mean) ** 2, axis=0), "i")
""",
            # a whole that every rank returns
            """
def standardize(block):
    x = all_gather_invariant(block, "i", tiled=True)
    return (x - np.mean(x, axis=0)) / np.std(x, axis=0)
""",
        ],
    },
    {
        "right": """
def index_of_largest(block):
    index = np.argmax(block) + axis_index("i") * len(block)
    here = np.max(block) == pmax(np.max(block), "i")
    return pmin(np.where(here, index, len(block) * axis_size("i")), "i")
""",
        "wrong": [
            # the index within the block
            """
def index_of_largest(block):
    here = np.max(block) == pmax(np.max(block), "i")
    return pmin(np.where(here, np.argmax(block), len(block)), "i")
""",
            # the last of several
            """
def index_of_largest(block):
    index = np.argmax(block) + axis_index("i") * len(block)
    here = np.max(block) == pmax(np.max(block), "i")
    return pmax(np.where(here, index, -1), "i")
""",
            # not the same on all ranks
            """
def index_of_largest(block):
    return np.argmax(block) + axis_index("i") * len(block)
""",
            # of the last rank always
            """
def index_of_largest(block):
    return pmax(np.argmax(block) + axis_index("i") * len(block), "i")
""",
        ],
    },
    {
        "right": """
def clip(block, limit):
    norm = np.sqrt(psum(np.sum(block**2), "i"))
    return block * (limit / norm) if norm > limit else block
""",
        "wrong": [
            # rank by rank
            """
def clip(block, limit):
    norm = np.sqrt(np.sum(block**2))
    return np.where(norm > limit, block * (limit / norm), block)
""",
            # the sum of the ranks' norms
            """
def clip(block, limit):
    norm = psum(np.sqrt(np.sum(block**2)), "i")
    return block * np.minimum(1.0, limit / norm)
""",
            # all are scaled, small ones too
            """
def clip(block, limit):
    return block * limit / np.sqrt(psum(np.sum(block**2), "i"))
""",
            # as it was
            """
def clip(block, limit):
    return clip_wrong(block, limit)
""",
        ],
    },
]
