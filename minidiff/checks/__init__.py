"""Numerical checks of derivatives: `minidiff.testing`, and `minidiff.numerical`, the differences it uses."""

from minidiff.checks import numerical, testing

__all__ = ["numerical", "testing"]
