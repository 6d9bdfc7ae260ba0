"""Validation and conversion of arguments: trees, keywords, promotion of Python numbers."""
