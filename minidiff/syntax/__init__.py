"""Python's own statements as operations: `autograph` rewrites the source of a function.

A function is rewritten in three steps, a module each: `jumps` turns `return`, `break` and `continue` into flags and
branches, `statements` turns each `if`, `while` and `for` into a call, after `names` has listed the variables that it
assigns and that are read later. The functions that are called, `operators`, run Python's statement if the condition is
known, and apply `cond`, `while_loop` or `scan` if it is traced. `functions` puts the rewritten source in a function's
place.

Source: D. Moldovan et al., "AutoGraph: Imperative-style coding with graph-based performance", 2019.
"""
