"""Step 4: reverse mode, which is to linearize, then transpose."""

from .forward import (
    add,
    broadcast_to,
    jvp,
    matmul,
    multiply,
    plus,
    sum,
    transpose,
    zeros_if_none,
)
from .tape import Record, Tape
from .tracer import Tracer, Type, current, typeof, using


def linearize(f, *primals):
    """The results of `f` at a point, and its derivative there: a tape that is linear in
    its inputs.
    """
    # HOLE 4.1 [3 points]
    # Make a recorder above the current interpreter. The tangents are tracers of it, of
    # the primals' types (all that `typeof` says).
    # Call `jvp` while the recorder is current. The outputs of the tape are the tangents
    # of the results.
    record = Record(current())
    tangents = [Tracer(record, typeof(x)) for x in primals]
    with using(record):
        results, outputs = jvp(f, primals, tangents)
    return results, Tape(tangents, record.equations, outputs)
    # END


def transpose_product(left, right):
    """The rule of an operation that is linear in one of two operands: each of the
    arguments is for one of them.
    """
    return lambda ct, x, y: (
        [left(ct, y), None] if isinstance(x, Type) else [None, right(ct, x)]
    )


# operation -> rule(cotangent of the result, *operands, **params): the list of
# cotangents of the operands. An operand that is linear has no value: its type takes its
# place. The others have the cotangent None.
transpose_rules = {
    add: lambda ct, x, y: [ct, ct],
    transpose: lambda ct, x: [transpose(ct)],
    multiply: transpose_product(multiply, multiply),
    # HOLE 4.2 [1 point]
    # sum: lambda ct, x, axes: ... Each entry of x went into the sum with factor 1.
    sum: lambda ct, x, axes: [broadcast_to(ct, shape=x.shape, axes=axes)],
    # END
    # HOLE 4.3 [1 point]
    # broadcast_to: lambda ct, x, shape, axes: ... An entry of x was used as often as it
    # was repeated.
    broadcast_to: lambda ct, x, shape, axes: [sum(ct, axes=axes)],
    # END
    # HOLE 4.4 [2 points]
    # matmul, by transpose_product. If z = x @ y has the shape [m, p], x has [m, k] and
    # y has [k, p].
    matmul: transpose_product(
        lambda ct, y: matmul(ct, transpose(y)), lambda ct, x: matmul(transpose(x), ct)
    ),
    # END
}


def backward_pass(tape, cotangents):
    """From cotangents of a linear tape's outputs to those of its inputs. None is a
    cotangent of zero.
    """
    free, known = tape.free(), {}

    def collect(xs, cts):
        for x, ct in zip(xs, cts):
            if isinstance(x, Tracer):
                # HOLE 4.5 [2 points]
                # `ct`, or None, is a further cotangent of x, which may have been used
                # before: `known` has the sum.
                known[x] = plus(known.get(x), ct)
                # END

    collect(tape.outputs, cotangents)
    # HOLE 4.6 [3 points]
    # For each equation, from the last to the first: take the cotangents of its outputs
    # out of `known`. If they are not all None, call the operation's transpose rule with
    # the cotangent (if `op.many`, with the list of them, zeros in place of None) and
    # the operands: the type of an input that is a tracer and not `free`, any other
    # input as it is. `collect` what the rule returns.
    for eqn in reversed(tape.equations):
        cts = [known.pop(v, None) for v in eqn.outputs]
        if any(ct is not None for ct in cts):
            ct = list(map(zeros_if_none, cts, eqn.outputs)) if eqn.op.many else cts[0]
            operands = [
                x.type if isinstance(x, Tracer) and x not in free else x
                for x in eqn.inputs
            ]
            collect(eqn.inputs, transpose_rules[eqn.op](ct, *operands, **eqn.params))
    # END
    return [zeros_if_none(known.get(v), v) for v in tape.inputs]


def value_and_grad(f, *args):
    """The value of f, a number, and the list of its gradients in all arguments."""
    # HOLE 4.7 [1 point]
    # Linearize, then transpose. The cotangent of the value is 1.
    (value,), tape = linearize(f, *args)
    return value, backward_pass(tape, [1.0])
    # END


def grad(f):
    return lambda *args: value_and_grad(f, *args)[1]
