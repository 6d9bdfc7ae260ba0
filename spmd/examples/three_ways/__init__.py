"""Differentiate programs in three ways, beside the one of this project: each is a module to read in a sitting.

    python -m spmd.examples.three_ways

================  =================================================================================
module            contents
================  =================================================================================
elements          a library of elements: calls in place of operators, and reverse mode
forward_elements  the same in forward mode: calls that take derivatives, and return them
source            source transformation: Python text in, Python text of the adjoint out
parser            its first half: programs as operations on names; `minidiff.syntax.jumps` makes flags of jumps
symbolic          formulas that are differentiated by rules, and how much longer they become
================  =================================================================================

`python -m spmd.examples.three_ways.forward_elements` and `.symbolic` print examples. None needs ranks.
"""
