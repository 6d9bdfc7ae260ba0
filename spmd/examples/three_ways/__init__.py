"""Differentiate programs in three ways, beside the one of this project: each is a module to read in a sitting.

    python -m spmd.examples.three_ways

================  =================================================================================
module            contents
================  =================================================================================
symbolic          formulas that are differentiated by rules, and how much longer they become
================  =================================================================================

Each prints its own examples, too: `python -m spmd.examples.three_ways.symbolic`. They need no ranks.
"""
