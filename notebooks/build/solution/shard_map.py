"""Step 7: shard_map, an operation like any other, whose parameter is a tape."""

import numpy as np

from .forward import jvp_rules
from .ranks import Mesh, run_on_ranks
from .reverse import is_linear, linearize, merge, transpose_rules, transpose_tape
from .tape import Tape, Var, as_list, evaluate, make_tape
from .tracer import Operation, Tracer, Type, typeof
from .variance import vary


class P(tuple):
    """P('i'): dimension 0 is split along the axis i. P(None, 'i'): dimension 1 is. P(): every rank has the whole."""

    def __new__(cls, *names):
        return super().__new__(cls, names)

    def __repr__(self):
        return f"P({', '.join(map(repr, self))})"


STAY = "on its rank"  # a spec for blocks that stay where they are: no rank needs those of another


class Blocks:
    """The blocks of a value that stays on the ranks, for the outside."""

    def __init__(self, blocks, size):
        self.blocks, self.type = blocks, Type((size, *np.shape(blocks[0])))


def split(x, spec, mesh):
    """From a value outside of a shard_map to the list of its blocks inside."""
    if spec == STAY:
        return x.blocks
    # HOLE 7.1 [2 points]
    # Return one block for each rank in `mesh.ranks`. `spec.index(mesh.axis)` is the dimension along which x
    # is split, if `mesh.axis in spec`. (`np.split` raises an error if its size is not divisible.)
    if mesh.axis not in spec:
        return [x for rank in mesh.ranks]
    blocks = np.split(x, mesh.size, axis=spec.index(mesh.axis))
    return [blocks[rank] for rank in mesh.ranks]
    # END


def unsplit(blocks, spec, mesh):
    """From the list of blocks inside of a shard_map to the value outside."""
    if spec == STAY:
        return Blocks(blocks, mesh.size)
    # HOLE 7.2 [1 point]
    # Without the axis in its spec, a value is the same on all ranks. `mesh.everyones(blocks)` is the list of
    # all ranks'.
    if mesh.axis not in spec:
        return blocks[0]
    return np.concatenate(mesh.everyones(blocks), axis=spec.index(mesh.axis))
    # END


Mesh.everyones = lambda mesh, blocks: blocks  # in this process are all ranks; page 8 changes that


def local_type(x, spec, mesh):
    """The type of an argument's blocks."""
    shape = list(typeof(x).shape)
    # HOLE 7.3 [2 points]
    # Return a Type: with the size of a block, and varying along the axis, if the spec names it. Specs are those
    # that users write: `STAY` is not among them.
    if mesh.axis not in spec:
        return Type(tuple(shape))
    shape[spec.index(mesh.axis)] //= mesh.size
    return Type(tuple(shape), frozenset({mesh.axis}))
    # END


def global_shape(shape, spec, mesh):
    """The shape outside of a value whose blocks have this shape."""
    if spec == STAY:
        return (mesh.size, *shape)
    return tuple(size * mesh.size if spec[k : k + 1] == (mesh.axis,) else size for k, size in enumerate(shape))


def run(*args, tape, mesh, in_specs, out_specs):
    blocks = [split(x, spec, mesh) for x, spec in zip(args, in_specs)]
    return [unsplit(x, spec, mesh) for x, spec in zip(run_on_ranks(tape, mesh, blocks), out_specs)]


def shapes(*args, tape, mesh, in_specs, out_specs):
    return [global_shape(typeof(x).shape, spec, mesh) for x, spec in zip(tape.outputs, out_specs)]


shard_map_p = Operation("shard_map", run, shapes, many=True)


def shard_map(body, mesh, in_specs, out_specs):
    """Run a body on every rank of a mesh: a function of whole arrays. `out_specs` is a P, or a list for a list."""

    specs = (out_specs,) if isinstance(out_specs, P) else tuple(out_specs)

    def mapped(*args):
        def checked(*blocks):
            return [as_promised(x, spec, mesh) for x, spec in zip(as_list(body(*blocks)), specs)]

        tape = mesh.trace(checked, [local_type(x, spec, mesh) for x, spec in zip(args, in_specs)])
        used = {x for eqn in tape.equations for x in eqn.inputs if isinstance(x, Tracer)}
        if used - tape.variables():
            raise TypeError(
                "the body uses a traced value of the program around it: pass it as an argument, with a spec"
            )
        results = shard_map_p(*args, tape=tape, mesh=mesh, in_specs=tuple(in_specs), out_specs=specs)
        return results[0] if isinstance(out_specs, P) else results

    return mapped


def as_promised(x, spec, mesh):
    """A result of the body, as its spec in `out_specs` says that it is."""
    # HOLE 7.4 [2 points]
    # A spec that names the axis makes a result varying (`vary(x, {axis})`; a result that is not a Tracer is a
    # constant, and stays). One that does not promises that it is the same on all ranks: if its type says that
    # it may vary, raise a TypeError that names its type, the spec, and what to do.
    if mesh.axis in spec:
        return vary(x, frozenset({mesh.axis})) if isinstance(x, Tracer) else x
    if mesh.axis in typeof(x).varying:
        raise TypeError(
            f"a result of type {typeof(x)} may differ from rank to rank, but its spec {spec} promises that it does "
            f"not: name {mesh.axis!r} in out_specs, or take the psum"
        )
    return x
    # END


def residual_spec(x):
    return STAY if typeof(x).varying else P()


def jvp_rule(primals, tangents, tape, mesh, in_specs, out_specs):
    """Linearize the body: one shard_map computes results and residuals; another one, which is linear, the tangents."""
    active = [t is not None for t in tangents]
    pieces = {}

    def primal_body(*blocks):
        def of_active(*xs):
            return evaluate(tape, *merge(active, xs, [x for x, yes in zip(blocks, active) if not yes]))

        # HOLE 7.5 [3 points]
        # Linearize `of_active` at the active blocks. The residuals are the variables that equations of the
        # linear tape use, and that are not among its `variables()`: a list, each once. The tape of the second
        # shard_map has them as further inputs, in front. Put that into pieces["linear"], the residuals into
        # pieces["residuals"], and return the results and the residuals, in one list.
        results, linear = linearize(of_active, *(x for x, yes in zip(blocks, active) if yes))
        used = [x for eqn in linear.equations for x in eqn.inputs if isinstance(x, Var)]
        residuals = list(dict.fromkeys(x for x in used if x not in linear.variables()))
        pieces["linear"] = Tape([*residuals, *linear.inputs], linear.equations, linear.outputs)
        pieces["residuals"] = residuals
        return [*results, *residuals]
        # END

    first = make_tape(primal_body)(*(v.type for v in tape.inputs))
    linear, residuals = pieces["linear"], pieces["residuals"]
    between = tuple(map(residual_spec, residuals))
    outs = shard_map_p(*primals, tape=first, mesh=mesh, in_specs=in_specs, out_specs=(*out_specs, *between))
    outs, kept = outs[: len(out_specs)], outs[len(out_specs) :]

    moves = [t is not None for t in linear.outputs]  # a result may not depend on what is active
    second = Tape(linear.inputs, linear.equations, [t for t in linear.outputs if t is not None])
    specs = (*between, *(spec for spec, yes in zip(in_specs, active) if yes))
    out = tuple(spec for spec, yes in zip(out_specs, moves) if yes)
    moving = [t for t in tangents if t is not None]
    out_tangents = shard_map_p(*kept, *moving, tape=second, mesh=mesh, in_specs=specs, out_specs=out)
    return outs, merge(moves, out_tangents, [None] * len(moves))


def transpose_rule(cts, *operands, tape, mesh, in_specs, out_specs):
    """A shard_map of the transposed body: cotangents come in by `out_specs`, and go out by `in_specs`."""
    linear = [is_linear(x) for x in operands]
    values = [x for x in operands if not is_linear(x)]
    whole = shapes(tape=tape, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    cts = [np.zeros(shape) if ct is None else ct for ct, shape in zip(cts, whole)]
    types = [v.type for v, yes in zip(tape.inputs, linear) if not yes]
    wanted = [v.type for v, yes in zip(tape.inputs, linear) if yes]

    def body(*args):
        # HOLE 7.6 [2 points]
        # `args` are the blocks of `values`, and then those of `cts`. Return the list of cotangents that
        # `transpose_tape` computes from them, with zeros of the shape in `wanted` in place of None.
        found = transpose_tape(tape, linear, args[: len(values)], args[len(values) :])
        return [np.zeros(t.shape) if ct is None else ct for ct, t in zip(found, wanted)]
        # END

    # HOLE 7.7 [3 points]
    # Make the tape of `body`, of the `types` and those of the tape's outputs, and apply `shard_map_p` to
    # `values` and `cts`. What are its in_specs and out_specs? Return a list with one cotangent for each
    # operand, None if not linear.
    transposed = make_tape(body)(*types, *map(typeof, tape.outputs))
    ins = (*(spec for spec, yes in zip(in_specs, linear) if not yes), *out_specs)
    outs = tuple(spec for spec, yes in zip(in_specs, linear) if yes)
    found = shard_map_p(*values, *cts, tape=transposed, mesh=mesh, in_specs=ins, out_specs=outs)
    return merge(linear, found, [None] * len(linear))
    # END


jvp_rules[shard_map_p] = jvp_rule
transpose_rules[shard_map_p] = transpose_rule
