"""Causal self-attention with rotary positions.

Source: Su et al., "RoFormer: Enhanced transformer with rotary position embedding".
"""

from __future__ import annotations

from typing import Any

import minidiff.numpy as np
from minidiff.nn import dot_product_attention


def rotary(x: Any, positions: Any) -> Any:
    """Rotate pairs of features by angles that grow with the position: [..., tokens, heads, size] -> same.

    The product of a query and a key then depends on the difference of their positions [tokens] alone.
    """
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    a, b, cos, sin = x[..., :half], x[..., half:], *(f(angles).astype(x.dtype) for f in (np.cos, np.sin))
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def causal_attention(params: dict, x: Any) -> Any:
    """Each token attends to itself and those before it: [batch, tokens, features] -> same."""
    positions = np.arange(x.shape[-2])
    query, key, value = (np.einsum("btf,fhs->bths", x, params[name]) for name in ("query", "key", "value"))
    attended = dot_product_attention(rotary(query, positions), rotary(key, positions), value, is_causal=True)
    return np.einsum("bths,hsf->btf", attended, params["out"])
