"""Numerical checks of derivatives: `minidiff.testing` and `minidiff.numerical`."""

from minidiff.checks import numerical, testing

__all__ = ["numerical", "testing"]
