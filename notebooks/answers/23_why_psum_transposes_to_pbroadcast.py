"""Answers to the exercises of notebooks/23_why_psum_transposes_to_pbroadcast.ipynb: right ones, and wrong ones."""

TRANSPOSED = "def transposed(w, ct):\n    return {}"
TEST = "def is_transpose(a, b, x, c):\n    return {}"

EXERCISES = [
    {
        "right": "all_reduces = [0, 1, 1]",
        "wrong": ["all_reduces = [1, 1, 2]", "all_reduces = [0, 0, 0]", "all_reduces = [0, 1, 2]"],
    },
    {
        "right": TRANSPOSED.format('w * pbroadcast(ct, "i")'),
        "wrong": [
            TRANSPOSED.format('w * psum(pbroadcast(ct, "i") / 4, "i")'),
            TRANSPOSED.format('w * psum(pbroadcast(ct, "i"), "i")'),
            TRANSPOSED.format('pbroadcast(ct, "i")'),
        ],
    },
    {
        "right": TEST.format("np.isclose(np.vdot(np.asarray(a(x)), c), np.vdot(x, np.asarray(b(c))))"),
        "wrong": [
            TEST.format("np.allclose(np.asarray(b(a(x))), x)"),
            TEST.format("np.vdot(np.asarray(a(x)), c) != 0"),
        ],
    },
]
