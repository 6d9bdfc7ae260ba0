"""Answers to the exercises of notebooks/10_where_to_sum.ipynb: right ones, and wrong ones."""

_DESCENT = """
def descend(w, blocks):
    before = w
    {cast}
    total = sum(md.grad(squares)(w, block) for block in blocks)
    return before - 0.01 * {sum}
"""

_FEWER = """
def few_bytes(a, b, block):
    {before}
    return psum(np.sum((block @ {product}) ** 2), "i")
"""

EXERCISES = [
    {
        "right": 'braces = ["i", "R:i", "i", "U:i", "error", "U:i", "error", ""]',
        "wrong": [
            'braces = ["i", "", "i", "U:i", "error", "U:i", "error", ""]',
            'braces = ["i", "R:i", "i", "i", "error", "U:i", "error", ""]',
            'braces = ["i", "R:i", "i", "U:i", "U:i", "U:i", "error", ""]',
            'braces = ["i", "R:i", "i", "U:i", "error", "U:i", "U:i", ""]',
            'braces = ["i", "R:i"]',
        ],
    },
    {
        "right": _DESCENT.format(cast='w = reduced(w, "i")', sum="psum(total, 'i')"),
        "wrong": [
            # summed in each step
            _DESCENT.format(cast="", sum="total"),
            # the mean of the ranks' gradients
            _DESCENT.format(cast='w = reduced(w, "i")', sum="psum(total, 'i') / 8"),
            # one sum, of values that merely vary
            _DESCENT.format(cast='w = pbroadcast(w, "i")', sum="psum(total, 'i')"),
            # parts are not a gradient yet
            _DESCENT.format(cast='w = reduced(w, "i")', sum="total"),
        ],
    },
    {
        "right": _FEWER.format(before="product = reduced(a @ b, 'i')", product="product"),
        "wrong": [
            # the factors are larger than their product
            _FEWER.format(before="a, b = reduced((a, b), 'i')", product="(a @ b)"),
            # the right place, but no type says so
            _FEWER.format(before="product = a @ b", product="product"),
            # one factor
            _FEWER.format(before="a = reduced(a, 'i')", product="(a @ b)"),
        ],
    },
]
