"""The heart: operations, tracers, interpreters and tapes, and the derivatives made of them.

A program is a sequence of *operations* (:class:`Primitive`) on values. The current *interpreter* decides what applying
an operation does; a *tracer* is a value that takes operations to its interpreter; a *tape* is a program that was
recorded. Read the files in this order: `types`, `states`, `operation`, `tracer`, `interpreter`, `tape`, `staging`,
`forward`, `reverse`, `transpose`, `vmap`.
"""
