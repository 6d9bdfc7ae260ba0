"""Answers to the exercises of the notebook."""

DROPOUT = "after_the_psum = {}\nhidden_features = {}\nweights_of_all = {}"
BYTES = "bytes_of_multi_steps = {}\nbytes_in_the_body = {}"
SUMS = """
results_of_sums = {{
    "float16: 2048 + 1": {},
    "float16: 60000 + 10000": {},
    "float16: 1e-8": {},
    "bfloat16: 256 + 1": {},
    "bfloat16: 1e-8 > 0": {},
}}
"""
KILLED = "resumes_from = {}\nsteps_computed = {}"

ADJUSTED = """
def adjusted(scale, good, finite, period):
    if not finite:
        return {halved}, {after}
    good += 1
    return (scale * 2, {start}) if good {reached} period else (scale, good)
"""
RULE = {"halved": "max(scale / 2, 1)", "after": "0", "start": "0", "reached": ">="}

EXERCISES = [
    {
        "right": DROPOUT.format('("data",)', '("data", "feats")', "()"),
        "wrong": [
            DROPOUT.format('("data", "feats")', '("data", "feats")', "()"),
            DROPOUT.format('("data",)', '("data",)', "()"),
            DROPOUT.format('("data",)', '("data", "feats")', '("data",)'),
            DROPOUT.format("()", '("data", "feats")', "()"),
        ],
    },
    {
        "right": BYTES.format("4 * 33_280 * 8", "33_280 * 8"),
        "wrong": [
            BYTES.format("33_280 * 8", "33_280 * 8"),
            BYTES.format("4 * 33_280 * 8", "4 * 33_280 * 8"),
            BYTES.format("4 * 33_280 * 4", "33_280 * 4"),  # of float32
        ],
    },
    {
        "right": SUMS.format(2048, "np.inf", 0, 256, True),
        "wrong": [
            SUMS.format(2049, "np.inf", 0, 256, True),
            SUMS.format(2048, 65504, 0, 256, True),
            SUMS.format(2048, "np.inf", 1e-8, 256, True),
            SUMS.format(2048, "np.inf", 0, 257, True),
            SUMS.format(2048, "np.inf", 0, 256, False),
        ],
    },
    {
        "right": KILLED.format(6, 12),
        "wrong": [KILLED.format(7, 11), KILLED.format(8, 10), KILLED.format(6, 10)],
    },
    {
        "right": ADJUSTED.format(**RULE),
        "wrong": [
            ADJUSTED.format(**{**RULE, "halved": "scale / 2"}),
            ADJUSTED.format(**{**RULE, "after": "good"}),
            ADJUSTED.format(**{**RULE, "start": "good"}),
            ADJUSTED.format(**{**RULE, "reached": ">"}),
        ],
    },
    {
        "right": "bucket_bytes = 4 * 33_280 + 8",  # of the loss
        "wrong": [
            "bucket_bytes = 1000",
            "bucket_bytes = 70_000",
            "bucket_bytes = 200_000",  # two, of unequal size
            "bucket_bytes = 10**6",
        ],
    },
]
