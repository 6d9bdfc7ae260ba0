"""Answers to the exercises of notebooks/15_transformer.ipynb: right ones, and wrong ones."""

_TYPES = 'type_of_hidden = "{}"\ntype_of_term = "{}"\ntype_of_result = "{}"'

_ALONG = "forward_psum = {}\nbackward_psum = {}"

_AXES = "along_data = {}\nalong_feats = {}"

_CACHE = "cache_on_a_rank = {}\nfor_one_token = {}\nfor_a_prefill = {}"

_ENTROPY = """
def split_cross_entropy(logits, labels, axis):
    m = {largest}
    z = logits - m[:, None]
    total = psum(np.sum(np.exp(z), axis=-1), axis)
    local = labels - {first}
    here = (local >= 0) & (local < z.shape[-1])
    chosen = np.take_along_axis(z, np.where(here, local, 0)[:, None], axis=-1)[:, 0]
    return np.log(total) - {chosen}
"""

_LAYER = """
def layer(x, attention, perceptron):
    h = md.nn.rms_norm(x, np.ones(16))
    return {}
"""

_TOKENS = "def tokens_in_cache(memory, layers, kv_heads, size, ranks, itemsize):\n    return {}"

_LARGEST = "pmax(md.stop_gradient(np.max(logits, axis=-1)), axis)"
_FIRST = "axis_index(axis) * logits.shape[-1]"
_CHOSEN = "psum(np.where(here, chosen, 0.0), axis)"

EXERCISES = [
    {
        "right": _TYPES.format("f64[16,32]{feats}", "f64[16,64]{feats}", "f64[16,64]"),
        "wrong": [
            _TYPES.format("f64[16,128]{feats}", "f64[16,64]{feats}", "f64[16,64]"),  # all hidden features
            _TYPES.format("f64[16,32]{feats}", "f64[16,64]", "f64[16,64]"),  # a term is not the same on all ranks
            _TYPES.format("f64[16,32]{feats}", "f64[16,64]{feats}", "f64[16,64]{feats}"),
        ],
    },
    {
        "right": _ALONG.format("8 * (9 * 1024 * 64 + 2 * 1024)", "8 * 9 * 1024 * 64"),
        "wrong": [
            _ALONG.format("8 * 9 * 1024 * 64", "8 * 9 * 1024 * 64"),  # without the cross entropy
            _ALONG.format("8 * (8 * 1024 * 64 + 2 * 1024)", "8 * 9 * 1024 * 64"),  # without the embedding
            _ALONG.format("8 * (9 * 1024 * 64 + 2 * 1024)", "8 * 8 * 1024 * 64"),  # without the head
        ],
    },
    {
        "right": _AXES.format("8 * ((numbers - 576) // 2 + 576)", "8 * 9 * 512 * 64"),
        "wrong": [
            _AXES.format("8 * numbers", "8 * 9 * 512 * 64"),
            _AXES.format("8 * ((numbers - 576) // 2 + 576)", "8 * 9 * 1024 * 64"),
            _AXES.format("8 * numbers // 2", "8 * 9 * 512 * 64"),  # without the scales
        ],
    },
    {
        "right": _CACHE.format("2 * 4 * 64 * 16 * 8", "9 * 64 * 8", "32 * 9 * 64 * 8"),
        "wrong": [
            _CACHE.format("4 * 64 * 16 * 8", "9 * 64 * 8", "32 * 9 * 64 * 8"),  # keys alone
            _CACHE.format("2 * 4 * 64 * 64 * 8", "9 * 64 * 8", "32 * 9 * 64 * 8"),  # all heads
            _CACHE.format("2 * 4 * 64 * 16 * 8", "8 * 64 * 8", "32 * 8 * 64 * 8"),  # without the embedding
            _CACHE.format("2 * 4 * 64 * 16 * 8", "9 * 64 * 8", "9 * 64 * 8"),
        ],
    },
    {
        "right": _ENTROPY.format(largest=_LARGEST, first=_FIRST, chosen=_CHOSEN),
        "wrong": [
            # labels as if each rank had the first tokens
            _ENTROPY.format(largest=_LARGEST, first="0", chosen=_CHOSEN),
            # it overflows
            _ENTROPY.format(largest="np.zeros(len(logits))", first=_FIRST, chosen=_CHOSEN),
            # it gathers the logits
            """
def split_cross_entropy(logits, labels, axis):
    return parallel.label_cross_entropy(all_gather_invariant(logits, axis, axis=1, tiled=True), labels)
""",
            # the value of the chosen logit without its derivative
            _ENTROPY.format(largest=_LARGEST, first=_FIRST, chosen=f"md.stop_gradient({_CHOSEN})"),
        ],
    },
    {
        "right": _LAYER.format('x + psum(attention(h) + perceptron(h), "feats")'),
        "wrong": [
            # two sums
            _LAYER.format('x + psum(attention(h), "feats") + psum(perceptron(h), "feats")'),
            # the stream is added four times
            _LAYER.format('psum(x + attention(h) + perceptron(h), "feats")'),
            # Megatron's layer
            """
def layer(x, attention, perceptron):
    x = x + psum(attention(md.nn.rms_norm(x, np.ones(16))), "feats")
    return x + psum(perceptron(md.nn.rms_norm(x, np.ones(16))), "feats")
""",
        ],
    },
    {
        "right": _TOKENS.format("memory // (2 * layers * kv_heads // ranks * size * itemsize)"),
        "wrong": [
            _TOKENS.format("memory // (layers * kv_heads // ranks * size * itemsize)"),  # keys alone
            _TOKENS.format("memory // (2 * layers * kv_heads * size * itemsize)"),  # all heads on every rank
            _TOKENS.format("memory // (2 * layers * kv_heads // ranks * size * 8)"),
        ],
    },
]
