"""Step 7: shard_map, an operation like any other, whose parameter is a tape."""

from collections import namedtuple
from functools import partial
from itertools import compress

from .forward import jvp_rules
from .ranks import all_gather
from .reverse import backward_pass, linearize, transpose_rules
from .tape import evaluate, make_tape
from .tracer import Operation, Type, typeof
from .variance import pscatter, vary


class P(namedtuple("P", "axis", defaults=[None])):
    """P('i'): dimension 0 is split along the axis i. P(): every rank has the whole."""

    def __repr__(self):
        return f"P({self.axis!r})" if self.axis else "P()"


# for blocks that no rank needs of another: outside, too, such a value is a list of
# blocks
STAY = P("on its rank")


def split(x, spec, mesh):
    """From a value outside of a shard_map to the list of its blocks inside."""
    if spec == STAY:
        return x
    # HOLE 7.1 [2 points]
    # The list of the whole x, once for each rank in `mesh.ranks`, is what ranks have by
    # P(). By a spec that has the axis in it, each needs its own block of it. That is a
    # collective in `mesh.collectives`.
    whole = [x for rank in mesh.ranks]
    return mesh.collectives[pscatter](whole) if mesh.axis in spec else whole
    # END


def unsplit(blocks, spec, mesh):
    """From the list of blocks inside of a shard_map to the value outside."""
    if spec == STAY:
        return blocks
    # HOLE 7.2 [1 point]
    # By P(), all ranks have the same. By a spec that has the axis in it, the value is
    # all ranks' blocks, one after the other. (This process may have one rank only, so
    # ask for them, with a collective.)
    return mesh.collectives[all_gather](blocks)[0] if mesh.axis in spec else blocks[0]
    # END


def local_type(x, spec, mesh):
    """The type of an argument's blocks."""
    shape = typeof(x).shape
    # HOLE 7.3 [2 points]
    # Return a Type: with the size of a block in dimension 0, and varying along the
    # axis, if the spec has it.
    if mesh.axis not in spec:
        return Type(shape)
    return Type((shape[0] // mesh.size, *shape[1:]), frozenset({mesh.axis}))
    # END


def global_shape(x, spec, mesh):
    """The shape outside of a result of the body."""
    shape = typeof(x).shape
    if spec == STAY:
        return (mesh.size, *shape)
    return (shape[0] * mesh.size, *shape[1:]) if mesh.axis in spec else shape


def run(*args, tape, mesh, in_specs, out_specs):
    results = mesh.run(
        partial(evaluate, tape),
        *(split(x, spec, mesh) for x, spec in zip(args, in_specs)),
    )
    return [unsplit(x, spec, mesh) for x, spec in zip(results, out_specs)]


def shapes(*args, tape, mesh, in_specs, out_specs):
    return [global_shape(x, spec, mesh) for x, spec in zip(tape.outputs, out_specs)]


shard_map_p = Operation("shard_map", run, shapes, many=True)


def shard_map(body, mesh, in_specs, out_spec):
    """Run a body, which has one result, on every rank of a mesh: a function of whole
    arrays.
    """

    def mapped(*args):
        types = [local_type(x, spec, mesh) for x, spec in zip(args, in_specs)]
        tape = mesh.trace(
            lambda *blocks: as_promised(body(*blocks), out_spec, mesh), types
        )
        if tape.free():
            raise TypeError(
                f"the body uses {tape.free()} from the program around it: pass it as "
                "an argument"
            )
        return shard_map_p(
            *args, tape=tape, mesh=mesh, in_specs=tuple(in_specs), out_specs=(out_spec,)
        )[0]

    return mapped


def as_promised(x, spec, mesh):
    """The result of the body, as its spec says that it is."""
    # HOLE 7.4 [2 points]
    # A spec that has the axis makes a result varying: `vary(x, {axis})`. One that does
    # not promises that it is the same on all ranks: if its type (`typeof`: a constant
    # has one, too) says that it may vary, raise a TypeError that names its type, the
    # spec, and what to do: a psum along which axis.
    if mesh.axis in spec:
        return vary(x, {mesh.axis})
    if mesh.axis in typeof(x).varying:
        advice = f"name {mesh.axis!r} in the spec, or take the psum"
        raise TypeError(
            f"{typeof(x)} may differ from rank to rank, and {spec} promises that it "
            f"does not: {advice}"
        )
    return x
    # END


def jvp_rule(primals, tangents, tape, mesh, in_specs, out_specs):
    """Linearize the body: one shard_map computes results and residuals; another one,
    which is linear, the tangents.
    """
    active, linear = [t is not None for t in tangents], None

    def body(*blocks):
        nonlocal linear

        def of_active(*xs):
            xs = iter(xs)
            return evaluate(
                tape, *(next(xs) if flag else x for x, flag in zip(blocks, active))
            )

        # HOLE 7.5 [2 points]
        # Linearize `of_active` at the active ones of `blocks` (`compress(blocks,
        # active)`), and keep the tape in `linear`. The residuals are what this tape
        # uses and does not define: `linear.free()`. Return the results and the
        # residuals, in one list.
        results, linear = linearize(of_active, *compress(blocks, active))
        return [*results, *linear.free()]
        # END

    first, n = mesh.trace(body, tape.inputs), len(out_specs)
    residuals = first.outputs[n:]
    stay = tuple(STAY if x.type.varying else P() for x in residuals)
    outs = shard_map_p(
        *primals,
        tape=first,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=(*out_specs, *stay),
    )
    # HOLE 7.6 [2 points]
    # `outs` are n results, and then values of `residuals`. The second tape is `linear`
    # with other inputs, the residuals in front of its own:
    # `linear._replace(inputs=...)`. Apply `shard_map_p` to those values and the active
    # tangents: by which specs do they come in? Return the n results, and the list of
    # their tangents.
    second, specs = (
        linear._replace(inputs=[*residuals, *linear.inputs]),
        (*stay, *compress(in_specs, active)),
    )
    moving = compress(tangents, active)
    return outs[:n], shard_map_p(
        *outs[n:], *moving, tape=second, mesh=mesh, in_specs=specs, out_specs=out_specs
    )
    # END


def transpose_rule(cts, *operands, tape, mesh, in_specs, out_specs):
    """A shard_map of the transposed body: cotangents come in by `out_specs`, and go out
    by `in_specs`.
    """
    values = [x for x in operands if not isinstance(x, Type)]
    # they are in front of the linear operands: jvp_rule has put them there
    n = len(values)

    def body(*args):
        # What depends on `values` alone is not recorded here, but below: on the tape
        # that `mesh.trace` makes.
        linear = make_tape(partial(evaluate, tape, *args[:n]), *tape.inputs[n:])
        return backward_pass(linear, args[n:])

    # HOLE 7.7 [3 points]
    # Trace `body` on the mesh, with the types of the first n of the tape's inputs and
    # those of its outputs, and apply `shard_map_p` to `values` and `cts`. What are its
    # in_specs and out_specs? Return a list with one cotangent for each operand, None
    # for those that are not linear.
    transposed = mesh.trace(body, [*tape.inputs[:n], *tape.outputs])
    ins, outs = (*in_specs[:n], *out_specs), in_specs[n:]
    return [None] * n + shard_map_p(
        *values, *cts, tape=transposed, mesh=mesh, in_specs=ins, out_specs=outs
    )
    # END


jvp_rules[shard_map_p] = jvp_rule
transpose_rules[shard_map_p] = transpose_rule
