"""Causal self-attention with rotary positions.

Source: Su et al., "RoFormer: Enhanced transformer with rotary position embedding".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import minidiff.numpy as np
from minidiff.nn import dot_product_attention

#: The attention of the first tokens.
causal = partial(dot_product_attention, is_causal=True)


def rotary(x: Any, positions: Any) -> Any:
    """Rotate pairs of features by angles that grow with the position: [..., tokens, heads, size] -> same.

    The product of a query and a key then depends only on the difference of their positions. These are [tokens], or
    [batch, tokens].
    """
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * 10000.0 ** (-np.arange(half) / half)
    a, b, cos, sin = x[..., :half], x[..., half:], *(f(angles).astype(x.dtype) for f in (np.cos, np.sin))
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def causal_attention(params: dict, x: Any, positions: Any = None, attend: Callable = causal) -> Any:
    """Each token attends to itself and those before it: [batch, tokens, features] -> same.

    Tokens that are not the first of a text need `positions` [tokens], and an `attend(query, key, value)` for these.
    """
    positions = np.arange(x.shape[-2]) if positions is None else positions
    query, key, value = (np.einsum("btf,fhs->bths", x, params[name]) for name in ("query", "key", "value"))
    attended = attend(rotary(query, positions), rotary(key, positions), value)
    return np.einsum("bths,hsf->btf", attended, params["out"])
