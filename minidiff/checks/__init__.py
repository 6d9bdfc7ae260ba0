"""Checks of derivatives against numbers (`minidiff.testing`, `minidiff.numerical`), and of the types on tapes."""
