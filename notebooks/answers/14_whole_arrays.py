"""Answers to the exercises of notebooks/14_whole_arrays.ipynb: right ones, and wrong ones."""

_BLOCKS = "columns_over_x = {}\nrows_over_both = {}\nrows_over_y = {}"

_MOVES = "rows_to_columns = {}\nrows_to_whole = {}\nwhole_to_rows = {}\nterms_to_rows = {}\nterms_to_whole = {}"

_PRODUCTS = """
a_by_rows_b_whole = "{}"
a_whole_b_by_columns = "{}"
both_along_the_inner = "{}"
a_by_rows_b_by_rows = "{}"
a_by_rows_b_by_columns = "{}"
"""

_BACKWARD = "data_parallel_backward = {}\nmegatron_backward = {}"

_SUMS = "all_reduces = {}\nbytes_of_each = {}"

_BETWEEN = """
def bytes_between(have, want, nbytes, ranks):
    if have == want or have == "whole":
        return 0
    once = nbytes * (ranks - 1) // ranks
    if have == "terms":
        return {terms}
    return once if want == "whole" else {across}
"""

EXERCISES = [
    {
        "right": _BLOCKS.format(131072, 65536, 262144),
        "wrong": [
            _BLOCKS.format(262144, 131072, 524288),  # of float64
            _BLOCKS.format(65536, 65536, 65536),  # as if every axis split it
            _BLOCKS.format(131072, 65536, 131072),
        ],
    },
    {
        "right": _MOVES.format(6144, 24576, 0, 24576, 49152),
        "wrong": [
            _MOVES.format(24576, 24576, 0, 24576, 49152),  # rows gathered, then cut
            _MOVES.format(6144, 32768, 0, 24576, 49152),  # a rank's block counted as received
            _MOVES.format(6144, 24576, 0, 49152, 49152),  # an all-reduce, then cut
            _MOVES.format(6144, 24576, 8192, 24576, 49152),  # as if whole arrays were sent from one rank
        ],
    },
    {
        "right": _PRODUCTS.format("nothing", "nothing", "psum", "all_gather", "all_gather"),
        "wrong": [
            _PRODUCTS.format("nothing", "nothing", "psum", "psum", "all_gather"),
            _PRODUCTS.format("nothing", "nothing", "psum", "all_gather", "nothing"),
            _PRODUCTS.format("all_gather", "nothing", "psum", "all_gather", "all_gather"),
        ],
    },
    {
        "right": _BACKWARD.format(98304, 0),
        "wrong": [
            _BACKWARD.format(98304, 8192),  # as if the gradient in the batch were needed
            _BACKWARD.format(24576, 0),  # a quarter of the weights
            _BACKWARD.format(0, 98304),
        ],
    },
    {
        "right": _SUMS.format(2, 32768),
        "wrong": [_SUMS.format(6, 32768), _SUMS.format(2, 8192), _SUMS.format(1, 32768)],
    },
    {
        "right": _BETWEEN.format(terms="2 * once if want == 'whole' else once", across="once // ranks"),
        "wrong": [
            _BETWEEN.format(terms="once", across="once // ranks"),
            _BETWEEN.format(terms="2 * once if want == 'whole' else once", across="once"),
            "def bytes_between(have, want, nbytes, ranks):\n    return 0 if have in (want, 'whole') else nbytes",
        ],
    },
    {
        "right": 'through = [P(None, ("x", "y"))]',
        "wrong": ["through = []", "through = [P()]", 'through = [P("x", "y")]', 'through = [("y", "x")]'],
    },
    {
        "right": 'of_gate, of_up, of_down = P(None, "feats"), P(None, "feats"), P("feats")',
        "wrong": [
            # a row-parallel product first
            'of_gate, of_up, of_down = P("feats"), P("feats"), P(None, "feats")',
            # the gate does not fit the other half
            'of_gate, of_up, of_down = P("feats"), P(None, "feats"), P("feats")',
            # not split
            'of_gate, of_up, of_down = P(), P(None, "feats"), P("feats")',
            'of_gate, of_up, of_down = P(None, "feats"), P(None, "feats"), P(None, "feats")',
        ],
    },
]
