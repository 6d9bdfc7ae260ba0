"""Answers to the exercises of the notebook."""

RING = """
def ring_all_gather(x, n):
    here, around = axis_index("i"), [(r, (r + 1) % n) for r in range(n)]
    chunks = md.numpy.at(md.numpy.zeros((n, x.size)))[here].set(x)
    for step in range(1, {steps}):
        x = ppermute(x, "i", around)
        chunks = chunks.at[{owner}].set(x)
    return chunks.reshape(-1)
"""

BREAK_EVEN = """
def break_even(n, alpha, beta):
    steps = np.log2(n)
    return {}
"""

BY_MACHINES = "def all_reduce_by_machines(x):\n"

FUSING = """
def gain_of_fusing(m, K, n, alpha, beta):
    def ring(nbytes):
        return 2 * (n - 1) * (alpha + beta * nbytes / n)

    return {}
"""

EXERCISES = [
    {
        "right": RING.format(steps="n", owner="(here - step) % n"),
        "wrong": [
            RING.format(steps="n", owner="(here + step) % n"),
            RING.format(steps="n - 1", owner="(here - step) % n"),
            "from collectives import all_gather\n\n"
            "def ring_all_gather(x, n):\n    return all_gather(x, 'i', tiled=True)",
            "def ring_all_gather(x, n):\n    return x",
        ],
    },
    {
        "right": BREAK_EVEN.format("(2 * (n - 1) - steps) * alpha / ((steps - 2 * (n - 1) / n) * beta)"),
        "wrong": [
            BREAK_EVEN.format("n * alpha / beta"),
            BREAK_EVEN.format("(2 * (n - 1) - steps) * alpha / (steps * beta)"),
            BREAK_EVEN.format("6.4e6"),
        ],
    },
    {
        "right": BY_MACHINES
        + "    part = psum(psum_scatter(x, 'local', tiled=True), 'machines')\n"
        + "    return all_gather_invariant(part, 'local', tiled=True)",
        "wrong": [
            BY_MACHINES + "    return psum(x, ('machines', 'local'))",
            BY_MACHINES + "    return psum(psum(x, 'local'), 'machines')",
            BY_MACHINES
            + "    part = psum(psum_scatter(x, 'machines', tiled=True), 'local')\n"
            + "    return all_gather_invariant(part, 'machines', tiled=True)",
        ],
    },
    {
        "right": FUSING.format("m * ring(K) / ring(m * K)"),
        "wrong": [
            FUSING.format("m"),
            FUSING.format("ring(K) / ring(m * K)"),
            FUSING.format("ring(m * K) / (m * ring(K))"),
        ],
    },
]
