"""Answers to the exercises of notebooks/13_mpi_ranks.ipynb: right ones, and wrong ones."""

_PI = """
def pi(mesh, n):
    def share():
        each = n // axis_size("i")
        k = axis_index("i") * each + np.arange(each)
        return {result}

    return spmd.shard_map(share, mesh=mesh, in_specs=(), out_specs={spec})()
"""

EXERCISES = [
    {
        "right": "coordinates = (1, 1)\nfirst_row, last_row = 4, 7",
        "wrong": [
            "coordinates = (0, 1)\nfirst_row, last_row = 0, 3",  # the first axis running fastest
            "coordinates = (1, 1)\nfirst_row, last_row = 6, 7",  # split along both axes
            "coordinates = (1, 1)\nfirst_row, last_row = 4, 8",
        ],
    },
    {
        "right": _PI.format(result='psum(np.sum(4 / (1 + ((k + 0.5) / n) ** 2)) / n, "i")', spec="P()"),
        "wrong": [
            # each rank's part
            _PI.format(result="np.sum(4 / (1 + ((k + 0.5) / n) ** 2)) / n", spec="P()"),
            # the mean of the parts
            _PI.format(result='pmean(np.sum(4 / (1 + ((k + 0.5) / n) ** 2)) / n, "i")', spec="P()"),
            # not the middles
            _PI.format(result='psum(np.sum(4 / (1 + (k / n) ** 2)) / n, "i")', spec="P()"),
            # a vector of parts
            _PI.format(result="(np.sum(4 / (1 + ((k + 0.5) / n) ** 2)) / n)[None]", spec='P("i")'),
            # every rank computes everything
            """
def pi(mesh, n):
    def everything():
        return np.sum(4 / (1 + ((np.arange(n) + 0.5 + 0 * axis_index("i")) / n) ** 2)) / n

    return spmd.shard_map(lambda: pmean(everything(), "i"), mesh=mesh, in_specs=(), out_specs=P())()
""",
        ],
    },
    {
        "right": """
def report(mesh, y):
    whole = y.gather()
    return float(whole.sum()) if mesh.rank == 0 else None
""",
        "wrong": [
            # it hangs
            """
def report(mesh, y):
    if mesh.rank == 0:
        return float(y.gather().sum())
""",
            # all of them return it
            """
def report(mesh, y):
    return float(y.gather().sum())
""",
            # the sum of rank 0's block
            """
def report(mesh, y):
    return float(np.sum(y.local)) if mesh.rank == 0 else None
""",
        ],
    },
]
