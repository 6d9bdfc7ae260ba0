"""Step 4: reverse mode, which is to linearize, then transpose."""

import numpy as np

from .forward import JVP, add, broadcast_to, matmul, multiply, plus, sum, transpose
from .tape import Record, Tape, Var, as_list, evaluate, make_tape
from .tracer import Type, current, typeof, using


def linearize(f, *primals):
    """The results of `f` at a point, and its derivative there: a tape that is linear in its inputs."""
    # HOLE 4.1 [3 points]
    # Make a recorder above the current interpreter, and a JVP above the recorder. The tangents are new inputs
    # of the recorder, of the primals' types. Join them with the primals, run `f` under the JVP, and split its
    # results. The outputs of the tape are the tangents of the results.
    record = Record(current())
    forward = JVP(record)
    duals = [forward.join(x, record.new_input(typeof(x))) for x in primals]
    with using(forward):
        results = as_list(f(*duals))
    results, tangents = forward.split(results)
    return results, Tape(record.inputs, record.equations, tangents)
    # END


def is_linear(x):
    """Whether an operand in a transpose rule is linear: it has no value there, its type takes its place."""
    return isinstance(x, Type)


def transpose_product(left, right):
    """The rule of an operation that is linear in one of two operands: each of the arguments is for one of them."""

    def rule(ct, x, y):
        return [left(ct, y) if is_linear(x) else None, right(ct, x) if is_linear(y) else None]

    return rule


def transpose_sum(ct, x, axes):
    # HOLE 4.2 [1 point]
    # Return a list of one cotangent. Each entry of `x` went into the sum with factor 1.
    return [broadcast_to(ct, shape=x.shape, axes=axes)]
    # END


def transpose_broadcast_to(ct, x, shape, axes):
    # HOLE 4.3 [1 point]
    # Return a list of one cotangent. An entry of `x` was used as often as it was repeated.
    return [sum(ct, axes=axes)]
    # END


transpose_rules = {  # operation -> rule(cotangent of the result, *operands, **params): cotangents of the operands
    add: lambda ct, x, y: [ct, ct],
    sum: transpose_sum,
    broadcast_to: transpose_broadcast_to,
    transpose: lambda ct, x: [transpose(ct)],
    multiply: transpose_product(multiply, multiply),
    # HOLE 4.4 [2 points]
    # matmul, by transpose_product. If z = x @ y has the shape [m, p], x has [m, k] and y has [k, p].
    matmul: transpose_product(lambda ct, y: matmul(ct, transpose(y)), lambda ct, x: matmul(transpose(x), ct)),
    # END
}


def backward_pass(tape, cotangents):
    """From cotangents of a linear tape's outputs to those of its inputs. A cotangent of zero is None."""
    variables, known = tape.variables(), {}

    def collect(xs, cts):
        for x, ct in zip(xs, cts):
            if isinstance(x, Var) and x in variables:
                # HOLE 4.5 [2 points]
                # `ct`, or None, is a further cotangent of x, which may have been used before: `known` has the
                # sum.
                known[x] = plus(known.get(x), ct)
                # END

    collect(tape.outputs, cotangents)
    # HOLE 4.6 [3 points]
    # For each equation, from the last to the first: take the cotangents of its outputs out of `known`. If
    # they are not all None, call the operation's transpose rule with the cotangent (the list of them, if
    # `op.many`) and the operands: the type of an input that is one of `variables`, any other input as it is.
    # `collect` what it returns.
    for eqn in reversed(tape.equations):
        cts = [known.pop(v, None) for v in eqn.outputs]
        if any(ct is not None for ct in cts):
            operands = [x.type if isinstance(x, Var) and x in variables else x for x in eqn.inputs]
            rule = transpose_rules[eqn.op]
            collect(eqn.inputs, rule(cts if eqn.op.many else cts[0], *operands, **eqn.params))
    # END
    return [known.get(v) for v in tape.inputs]


def merge(flags, yes, no):
    """One list of two: the next of `yes` where the flag is true, else the next of `no`."""
    yes, no = iter(yes), iter(no)
    return [next(yes) if flag else next(no) for flag in flags]


def transpose_tape(tape, linear, values, cotangents):
    """The backward pass of a tape that is linear in some inputs. `values` are those of the others."""

    def of_linear(*xs):
        return evaluate(tape, *merge(linear, xs, values))

    # What does not depend on linear inputs is not recorded here, but computed by the interpreter below.
    rest = make_tape(of_linear)(*(v.type for v, yes in zip(tape.inputs, linear) if yes))
    return backward_pass(rest, cotangents)


def vjp(f, *primals):
    """The results of `f`, and a function from their cotangents to those of the primals."""
    results, tape = linearize(f, *primals)

    def pull_back(*cotangents):
        cts = backward_pass(tape, cotangents)
        return [np.zeros(typeof(x).shape) if ct is None else ct for x, ct in zip(primals, cts)]

    return results, pull_back


def value_and_grad(f):
    """A function that returns f's value, a number, and the list of its gradients in all arguments."""

    def value_and_gradients(*args):
        # HOLE 4.7 [1 point]
        # By `vjp`. The cotangent of the value is 1.
        (value,), pull_back = vjp(f, *args)
        return value, pull_back(np.ones(()))
        # END

    return value_and_gradients


def grad(f):
    return lambda *args: value_and_grad(f)(*args)[1]
