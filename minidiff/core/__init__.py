"""The heart: operations, tracers, interpreters and tapes, and the derivatives made of them.

A program is a sequence of *operations* (`Primitive`) on values. The current *interpreter* decides what applying
an operation does; a *tracer* is a value that takes operations to its interpreter; a *tape* is a program that was
recorded. Read the files in this order: `types`, `states`, `primitive`, `tracer`, `interpreter`, `tape`,
`forward`, `reverse`, `vmap`.

Here is `grad(grad(f))` by hand, for f(x) = x³ at 4, through these interpreters. One gradient is two steps, linearize
and transpose:

>>> import numpy as np
>>> from minidiff.core.reverse import backward_pass, linearize_flat
>>> def f(x):
...     return x * x * x
>>> def gradient(x):
...     values, tape = linearize_flat(lambda x: [f(x)], [x], [True])
...     return backward_pass(tape, [np.float64(1.0)])

At the bottom is `Evaluate`, which applies operations to numbers. `linearize_flat` puts `Linearize` above it, and
forward mode, `JVP`, above that. `f` gets a tracer of `JVP`: the number 4.0 and a tangent, the variable `a`. Each
`multiply` of `f` arrives at `JVP`. On the numbers it passes through `Linearize` down to `Evaluate`, and gives 16.0,
then 64.0. On the tangents its derivative is recorded by `Linearize`, with the numbers that the derivative reads:

>>> values, tape = linearize_flat(lambda x: [f(x)], [np.float64(4.0)], [True])
>>> print(tape)
lambda a:f64[]:
  b:f64[] = d_multiply(f64[], 4.0, 4.0, a, a)
  c:f64[] = d_multiply(f64[], 16.0, 4.0, b, a)
  return c

The backward pass begins with 1.0 for `c`. The second equation gives `b` 1.0 * 4.0, and `a` 16.0 * 1.0. The first gives
`a` 4.0 * 4.0 twice. The sum is f'(4) = 48:

>>> gradient(np.float64(4.0))
[np.float64(48.0)]

Now the gradient of `gradient`. The outer `linearize_flat` installs its own two interpreters, and calls `gradient` with
a tracer of the outer `JVP`. Inside, the inner `linearize_flat` puts two more on top. While `f` runs, the current
interpreter is the first of these:

>>> from minidiff.core.interpreter import current_interpreter
>>> def stack(interpreter):
...     return [] if interpreter is None else [type(interpreter).__name__, *stack(interpreter.below)]
>>> def f(x):
...     print(*stack(current_interpreter()))
...     return x * x * x
>>> values, tape = linearize_flat(gradient, [np.float64(4.0)], [True])
JVP Linearize JVP Linearize Evaluate

To the inner `JVP`, the outer tracer is a number like any other: it is the primal of a pair. So `multiply` on primals
passes through the inner `Linearize` and arrives at the *outer* `JVP`, which knows what to do: compute 16.0, and record
the derivative on the outer tape (`b`, then `c`). The inner tape holds outer tracers where there were numbers before.
Then the inner interpreters end, and the backward pass over the inner tape runs under the outer ones: its products and
sums are operations, which the outer `JVP` differentiates in turn. The value is f'(4), and the outer tape is the
derivative of all of it:

>>> values
[np.float64(48.0)]
>>> print(tape)
lambda a:f64[]:
  b:f64[] = d_multiply(f64[], 4.0, 4.0, a, a)
  c:f64[] = d_multiply(f64[], 16.0, 4.0, b, a)
  d:f64[] = d_multiply(f64[], 1.0, f64[], a)
  e:f64[] = d_multiply(f64[], f64[], 1.0, b)
  f:f64[] = d_multiply(f64[], 4.0, 4.0, d, a)
  g:f64[] = d_multiply(f64[], 4.0, 4.0, a, d)
  h:f64[] = add(e, f)
  i:f64[] = add(h, g)
  return i

`c` is the derivative of 64.0, which `gradient` does not return: nothing after it reads it. The others, transposed, give
f''(4) = 24:

>>> backward_pass(tape, [np.float64(1.0)])
[np.float64(24.0)]
"""
