"""Wrong answers to the holes of "Build it yourself", at least two for each: what students write at first."""

import re

WRONG = {
    "1.1": ["return op.run(args, **params)", "return op.run(*args)"],
    "1.2": [
        "interpreters.append(interpreter)\nyield",
        "interpreters.append(interpreter)\nyield\ninterpreters.pop()",
        "interpreters.append(interpreter)\ntry:\n    yield\nfinally:\n    interpreters.remove(interpreter)",
    ],
    "1.3": [
        "return current().process(self, args, params)",
        "return self.run(*args, **params)",
        "for cast in casts:\n    cast(self, args, params)\nreturn current().process(self, args, params)",
        """
args = casts[0](self, args, params)
return current().process(self, args, params)
""",
    ],
    "1.4": [
        "return x",
        """
if not isinstance(x, Tracer) or x.shape == shape:
    return x
return broadcast_to(x, shape=shape, axes=tuple(range(len(x.shape), len(shape))))
""",
        "return x if typeof(x).shape == shape else broadcast_to(x, shape=shape, axes=(0,))",
    ],
    "1.5": [
        """
Tracer.__add__ = lambda x, y: add(x, y)
Tracer.__mul__ = lambda x, y: multiply(x, y)
""",
        """
Tracer.__add__ = Tracer.__radd__ = lambda x, y: add(x, y)
Tracer.__mul__ = Tracer.__rmul__ = lambda x, y: multiply(x, y)
Tracer.__sub__ = Tracer.__rsub__ = lambda x, y: add(x, multiply(-1.0, y))
Tracer.__matmul__ = lambda x, y: matmul(x, y)
""",
        """
Tracer.__add__ = Tracer.__radd__ = lambda x, y: add(x, y)
Tracer.__mul__ = Tracer.__rmul__ = lambda x, y: multiply(x, y)
Tracer.__sub__ = lambda x, y: add(x, multiply(-1.0, y))
Tracer.__rsub__ = lambda x, y: add(y, multiply(-1.0, x))
Tracer.__matmul__ = lambda x, y: multiply(x, y)
""",
    ],
    "2.1": [
        """
outputs = [Tracer(self, t) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args), params, outputs))
return outputs if op.many else outputs[0]
""",
        """
if all(owner(x) is not self for x in args):
    return self.below.process(op, args, params)
outputs = [Tracer(self, t) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args), params, outputs))
return outputs
""",
        """
if any(owner(x) is not self for x in args):
    return self.below.process(op, args, params)
outputs = [Tracer(self, t) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args), params, outputs))
return outputs if op.many else outputs[0]
""",
        """
if not any(isinstance(x, Tracer) for x in args):
    return self.below.process(op, args, params)
outputs = [Tracer(self, t) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args), params, outputs))
return outputs if op.many else outputs[0]
""",
        """
if all(owner(x) is not self for x in args):
    return self.below.process(op, args, params)
outputs = [Tracer(self, t) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args), {}, outputs))
return outputs if op.many else outputs[0]
""",
        """
if all(owner(x) is not self for x in args):
    return self.below.process(op, args, params)
outputs = [Tracer(self, Type(t.shape)) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args), params, outputs))
return outputs if op.many else outputs[0]
""",
        """
if all(owner(x) is not self for x in args):
    return self.below.process(op, args, params)
outputs = [Tracer(self, t) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args), params, outputs))
return outputs[0]
""",
        """
if owner(args[0]) is not self:
    return self.below.process(op, args, params)
outputs = [Tracer(self, t) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args), params, outputs))
return outputs if op.many else outputs[0]
""",
        """
if all(owner(x) is not self for x in args):
    return self.below.process(op, args, params)
outputs = [Tracer(self, t) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args)[::-1], params, outputs))
return outputs if op.many else outputs[0]
""",
        """
if any(isinstance(x, Tracer) and owner(x) is not self for x in args):
    return self.below.process(op, args, params)
outputs = [Tracer(self, t) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args), params, outputs))
return outputs if op.many else outputs[0]
""",
    ],
    "2.2": [
        """
record = Record(current())
inputs = [Tracer(record, typeof(x)) for x in args]
return Tape(inputs, record.equations, as_list(f(*inputs)))
""",
        """
from .tracer import Evaluate
record = Record(Evaluate())
inputs = [Tracer(record, typeof(x)) for x in args]
with using(record):
    outputs = as_list(f(*inputs))
return Tape(inputs, record.equations, outputs)
""",
        """
record = Record(current())
inputs = [Tracer(record, Type(typeof(x).shape)) for x in args]
with using(record):
    outputs = as_list(f(*inputs))
return Tape(inputs, record.equations, outputs)
""",
        """
record = Record(current())
inputs = [Tracer(record, typeof(x)) for x in args]
with using(record):
    outputs = as_list(f(*inputs))
return Tape(inputs, record.equations, tuple(outputs))
""",
    ],
    "2.3": [
        """
for eqn in tape.equations:
    results = eqn.op.run(*map(read, eqn.inputs), **eqn.params)
    env.update(zip(eqn.outputs, results if eqn.op.many else [results]))
return [read(x) for x in tape.outputs]
""",
        """
for eqn in tape.equations:
    env[eqn.outputs[0]] = eqn.op(*map(read, eqn.inputs), **eqn.params)
return [env[x] for x in tape.outputs]
""",
        """
for eqn in tape.equations:
    results = eqn.op(*map(read, eqn.inputs), **eqn.params)
    env.update(zip(eqn.outputs, [results]))
return [read(x) for x in tape.outputs]
""",
        """
for eqn in tape.equations:
    results = eqn.op(*(env[x] for x in eqn.inputs), **eqn.params)
    env.update(zip(eqn.outputs, results if eqn.op.many else [results]))
return [read(x) for x in tape.outputs]
""",
        """
for eqn in tape.equations:
    results = eqn.op(*map(read, eqn.inputs))
    env.update(zip(eqn.outputs, results if eqn.op.many else [results]))
return [read(x) for x in tape.outputs]
""",
        """
for eqn in tape.equations:
    results = eqn.op(*map(read, eqn.inputs[::-1]), **eqn.params)
    env.update(zip(eqn.outputs, results if eqn.op.many else [results]))
return [read(x) for x in tape.outputs]
""",
    ],
    "3.1": [
        """
pairs = [x.content if isinstance(x, Tracer) else (x, None) for x in xs]
return [primal for primal, _ in pairs], [tangent for _, tangent in pairs]
""",
        """
pairs = [x.content if owner(x) is self else (x, 0.0) for x in xs]
return [primal for primal, _ in pairs], [tangent for _, tangent in pairs]
""",
    ],
    "3.2": [
        """
out, tangent = jvp_rules[op](primals, tangents, **params)
return list(map(self.join, out, tangent)) if op.many else self.join(out, tangent)
""",
        """
with using(self.below):
    out, tangent = jvp_rules[op](primals, tangents, **params)
return self.join(out, tangent)
""",
    ],
    "3.3": [
        "return op(*primals, **params), op(*primals, **params)",
        "return op(*primals, **params), tangents[0]",
        "return op(*primals), op(*tangents)",
    ],
    "3.4": [
        "return op(x, y), plus(op(dx, y), op(x, dy))",
        "return op(x, y), op(dx, dy)",
        "return op(x, y), plus(None if dx is None else op(dx, y), None if dy is None else op(dy, x))",
        """
left = 0.0 if dx is None else op(dx, y)
right = 0.0 if dy is None else op(x, dy)
return op(x, y), plus(left, right)
""",
        """
left = None if dx is None else op(dx, y)
right = None if dy is None else op(x, dy)
return op(y, x), plus(left, right)
""",
        """
left = None if dx is None else op(y, dx)
right = None if dy is None else op(x, dy)
return op(x, y), plus(left, right)
""",
    ],
    "3.5": [
        """
broadcast_to: partial(linear, broadcast_to),
transpose: partial(linear, transpose),
multiply: partial(product, multiply),
matmul: partial(product, matmul),
sin: partial(chain, sin, cos),
cos: partial(chain, cos, lambda x: -sin(x)),
""",
        """
broadcast_to: partial(linear, broadcast_to),
transpose: partial(linear, transpose),
multiply: partial(product, multiply),
matmul: partial(product, matmul),
sin: partial(chain, sin, cos),
cos: partial(chain, cos, sin),
""",
        """
multiply: partial(product, multiply),
sin: partial(chain, sin, cos),
cos: partial(chain, cos, lambda x: -1.0 * sin(x)),
""",
    ],
    "4.1": [
        """
record = Record(current())
tangents = [Tracer(record, Type(typeof(x).shape)) for x in primals]
with using(record):
    results, outputs = jvp(f, primals, tangents)
return results, Tape(tangents, record.equations, outputs)
""",
        """
record = Record(current())
tangents = [Tracer(record, typeof(x)) for x in primals]
results, outputs = jvp(f, primals, tangents)
return results, Tape(tangents, record.equations, outputs)
""",
        """
record = Record(current())
tangents = [Tracer(record, typeof(x)) for x in primals]
with using(record):
    results, outputs = jvp(f, primals, tangents)
return results, Tape(tangents, record.equations, results)
""",
        """
record = Record(current())
duals = [Tracer(record, typeof(x)) for x in primals]
with using(record):
    results, outputs = jvp(f, duals, duals)
return results, Tape(duals, record.equations, outputs)
""",
    ],
    "4.2": [
        "sum: lambda ct, x, axes: [ct],",
        "sum: lambda ct, x, axes: [broadcast_to(ct, shape=x.shape, axes=tuple(range(len(axes))))],",
    ],
    "4.3": [
        "broadcast_to: lambda ct, x, shape, axes: [ct],",
        "broadcast_to: lambda ct, x, shape, axes: [sum(ct, axes=tuple(range(len(shape))))],",
    ],
    "4.4": [
        "matmul: transpose_product(matmul, matmul),",
        "matmul: transpose_product(lambda ct, y: matmul(ct, transpose(y)), lambda ct, x: matmul(ct, transpose(x))),",
    ],
    "4.5": ["known[x] = ct", "if ct is not None:\n    known[x] = ct"],
    "4.6": [
        """
for eqn in tape.equations:
    cts = [known.pop(v, None) for v in eqn.outputs]
    if any(ct is not None for ct in cts):
        ct = list(map(zeros_if_none, cts, eqn.outputs)) if eqn.op.many else cts[0]
        operands = [x.type if isinstance(x, Tracer) and x not in free else x for x in eqn.inputs]
        collect(eqn.inputs, transpose_rules[eqn.op](ct, *operands, **eqn.params))
""",
        """
for eqn in reversed(tape.equations):
    cts = [known.pop(v, None) for v in eqn.outputs]
    if any(ct is not None for ct in cts):
        ct = list(map(zeros_if_none, cts, eqn.outputs)) if eqn.op.many else cts[0]
        operands = [x.type if isinstance(x, Tracer) else x for x in eqn.inputs]
        collect(eqn.inputs, transpose_rules[eqn.op](ct, *operands, **eqn.params))
""",
        """
for eqn in reversed(tape.equations):
    cts = [known.pop(v) for v in eqn.outputs]
    operands = [x.type if isinstance(x, Tracer) and x not in free else x for x in eqn.inputs]
    collect(eqn.inputs, transpose_rules[eqn.op](cts if eqn.op.many else cts[0], *operands, **eqn.params))
""",
    ],
    "4.7": [
        "(value,), tape = linearize(f, *args)\nreturn value, backward_pass(tape, [value])",
        "value, tape = linearize(f, *args)\nreturn value, backward_pass(tape, [1.0])",
    ],
    "5.1": ["return [np.sum(blocks)] * len(blocks)", "return np.sum(blocks, axis=0)"],
    "5.2": ["return [np.stack(blocks)] * len(blocks)", "return np.concatenate(blocks)"],
    "5.3": ["return np.split(blocks[0], len(blocks))", "return [np.sum(blocks, axis=0)] * len(blocks)"],
    "5.4": [
        """
if op in self.collectives:
    self.calls[op.name] += 1
    return self.join(self.collectives[op](*operands))
return self.join([op.run(*[blocks[r] for blocks in operands], **params) for r in range(self.size)])
""",
        "return self.join([op.run(*blocks, **params) for blocks in zip(*operands)])",
        """
if op in self.collectives:
    self.calls[op.name] += len(self.ranks)
    return self.join(self.collectives[op](*operands))
return self.join([op.run(*blocks, **params) for blocks in zip(*operands)])
""",
        """
if op in self.collectives:
    self.calls[op.name] += 1
    return self.join(self.collectives[op](*operands))
return [op.run(*blocks, **params) for blocks in zip(*operands)]
""",
    ],
    "6.1": [
        "collectives[pbroadcast] = lambda blocks: blocks",
        """
collectives[pbroadcast] = lambda blocks: [blocks] * len(blocks)
collectives[pscatter] = lambda blocks: np.split(blocks[0], len(blocks))
""",
        """
collectives[pbroadcast] = lambda blocks: blocks
collectives[pscatter] = lambda blocks: [np.split(x, len(blocks))[0] for x in blocks]
""",
        """
collectives[pbroadcast] = lambda blocks: [np.sum(blocks, axis=0)] * len(blocks)
collectives[pscatter] = lambda blocks: np.split(blocks[0], len(blocks))
""",
        """
collectives[pbroadcast] = lambda blocks: blocks
collectives[pscatter] = lambda blocks: np.array_split(blocks[0], len(blocks), axis=-1)
""",
    ],
    "6.2": [
        """
psum: (True, False, pbroadcast),
pbroadcast: (False, True, psum),
all_gather: (True, False, psum_scatter),
psum_scatter: (True, True, all_gather),
all_gather_invariant: (True, False, pscatter),
pscatter: (False, True, all_gather_invariant),
""",
        """
psum: (True, False, psum),
pbroadcast: (False, True, psum),
all_gather: (True, True, psum_scatter),
psum_scatter: (True, True, all_gather),
all_gather_invariant: (True, False, pscatter),
pscatter: (False, True, all_gather_invariant),
""",
        """
psum: (True, False, pbroadcast),
pbroadcast: (False, True, psum),
all_gather: (True, True, pscatter),
psum_scatter: (True, True, all_gather),
all_gather_invariant: (True, False, pscatter),
pscatter: (False, True, all_gather),
""",
        """
psum: (True, False, pbroadcast),
pbroadcast: (False, True, psum),
""",
    ],
    "6.3": [
        "return varying | {axis} if returns else varying - {axis}",
        """
if (axis in varying) != takes:
    raise TypeError(f"{op} along {axis!r} of a value of the other kind")
return frozenset({axis}) if returns else frozenset()
""",
        """
if not takes and axis in varying:
    raise TypeError(f"{op} along {axis!r}: not of this variance")
return varying | {axis} if returns else varying - {axis}
""",
        """
if bool(varying) != takes:
    raise TypeError(f"{op} along {axis!r}: not of this variance")
return varying | {axis} if returns else varying - {axis}
""",
        """
if (axis in varying) != takes:
    raise TypeError(f"{op} is not of this variance")
return varying | {axis} if returns else varying - {axis}
""",
        """
if (axis in varying) != takes:
    raise TypeError(f"{op} along {axis}")
return varying | set(axis) if returns else varying - set(axis)
""",
    ],
    "6.4": [
        """
for axis in sorted(axes - x.type.varying):
    x = pbroadcast(x, axis=axis)
return x
""",
        """
for axis in sorted(axes):
    x = pbroadcast(x, axis=axis)
return x
""",
        """
for axis in sorted(axes - x.type.varying):
    x = vars(pbroadcast).setdefault("varied", {}).setdefault(axis, pbroadcast(x, axis=axis))
return x
""",
        """
for axis in sorted(axes - x.type.varying):
    if axis not in x.varied:
        x.varied[axis] = pbroadcast(x, axis=axis)
return x
""",
        """
for axis in sorted(axes - x.type.varying):
    if axis not in x.varied:
        x.varied[axis] = pbroadcast(x, axis=axis)
    return x.varied[axis]
return x
""",
        """
if x.type.varying:
    return x
for axis in sorted(axes - x.type.varying):
    if axis not in x.varied:
        x.varied[axis] = pbroadcast(x, axis=axis)
    x = x.varied[axis]
return x
""",
    ],
    "7.1": [
        "return np.split(x, mesh.size)",
        """
whole = [x] * mesh.size
return mesh.collectives[pscatter](whole) if mesh.axis in spec else whole
""",
        """
import numpy as np
return np.split(x, mesh.size) if mesh.axis in spec else [x for rank in mesh.ranks]
""",
        """
whole = [x] * mesh.size
return mesh.collectives[pscatter](whole)[: len(mesh.ranks)] if mesh.axis in spec else whole
""",
    ],
    "7.2": [
        "import numpy as np\nreturn np.concatenate(blocks) if mesh.axis in spec else blocks[0]",
        "return mesh.collectives[all_gather](blocks) if mesh.axis in spec else blocks",
        """
import numpy as np
return np.stack(blocks) if mesh.axis in spec else blocks[0]
""",
        "return mesh.collectives[all_gather](blocks)[0] if mesh.axis in spec else blocks[mesh.ranks[0]]",
        """
from .ranks import collectives
return collectives[all_gather](blocks)[0] if mesh.axis in spec else blocks[0]
""",
    ],
    "7.3": [
        "return Type(shape, frozenset({mesh.axis}) if mesh.axis in spec else frozenset())",
        "return Type((shape[0] // mesh.size, *shape[1:]) if mesh.axis in spec else shape)",
        """
if mesh.axis not in spec:
    return Type(shape)
return Type((shape[0] // len(mesh.ranks), *shape[1:]), frozenset({mesh.axis}))
""",
        """
if mesh.axis not in spec:
    return Type(shape)
return Type((shape[0] // mesh.size, *shape[1:]), frozenset(mesh.axis))
""",
    ],
    "7.4": [
        """
if mesh.axis in spec:
    return vary(x, {mesh.axis})
if mesh.axis in x.type.varying:
    raise TypeError(f"{typeof(x)} and {spec}: take the psum along {mesh.axis}")
return x
""",
        "return x",
        "if mesh.axis not in spec and mesh.axis in typeof(x).varying:\n    raise TypeError(f\"'i', {spec}\")\nreturn x",
        """
if mesh.axis in typeof(x).varying and mesh.axis not in spec:
    raise TypeError(f"{typeof(x)} and {spec}")
return vary(x, {mesh.axis})
""",
        """
if mesh.axis in spec:
    return vary(x, {mesh.axis})
if mesh.axis in typeof(x).varying:
    raise ValueError(f"{typeof(x)} and {spec}: take the psum along {mesh.axis}")
return x
""",
        """
if mesh.axis in spec:
    return vary(x, {mesh.axis})
if mesh.axis in typeof(x).varying:
    raise TypeError(f"{typeof(x)} and {spec}: take the psum along {mesh.axis}")
""",
        """
if mesh.axis in spec:
    return vary(x, {mesh.axis})
if mesh.axis in typeof(x).varying:
    from .ranks import psum
    return psum(x, axis=mesh.axis)
return x
""",
        """
if mesh.axis in spec:
    vary(x, {mesh.axis})
    return x
if mesh.axis in typeof(x).varying:
    raise TypeError(f"{typeof(x)} and {spec}: take the psum along {mesh.axis}")
return x
""",
    ],
    "7.5": [
        "results, linear = linearize(of_active, *compress(blocks, active))\nreturn results",
        "results, linear = linearize(of_active, *compress(blocks, active))\nreturn [*results, *blocks]",
        "results, linear = linearize(of_active, *blocks)\nreturn [*results, *linear.free()]",
        """
results, linear = linearize(of_active, *blocks[: sum(active)])
return [*results, *linear.free()]
""",
    ],
    "7.6": [
        """
moving = compress(tangents, active)
specs = (*stay, *in_specs)
return outs[:n], shard_map_p(*outs[n:], *moving, tape=linear, mesh=mesh, in_specs=specs, out_specs=out_specs)
""",
        """
second, specs = linear._replace(inputs=[*residuals, *linear.inputs]), (*stay, *in_specs)
moving = compress(tangents, active)
return outs[:n], shard_map_p(*outs[n:], *moving, tape=second, mesh=mesh, in_specs=specs, out_specs=out_specs)
""",
        """
second, specs = linear._replace(inputs=[*linear.inputs, *residuals]), (*compress(in_specs, active), *stay)
moving = compress(tangents, active)
return outs[:n], shard_map_p(*outs[n:], *moving, tape=second, mesh=mesh, in_specs=specs, out_specs=out_specs)
""",
        """
second, specs = linear._replace(inputs=[*residuals, *linear.inputs]), (*[STAY] * len(stay), *compress(in_specs, active))
moving = compress(tangents, active)
return outs[:n], shard_map_p(*outs[n:], *moving, tape=second, mesh=mesh, in_specs=specs, out_specs=out_specs)
""",
        """
second, specs = linear._replace(inputs=[*residuals, *linear.inputs]), (*stay, *in_specs[: len(linear.inputs)])
moving = compress(tangents, active)
return outs[:n], shard_map_p(*outs[n:], *moving, tape=second, mesh=mesh, in_specs=specs, out_specs=out_specs)
""",
        """
second, specs = linear._replace(inputs=[*residuals, *linear.inputs]), (*stay, *compress(in_specs, active))
moving = compress(tangents, active)
return outs[:n], shard_map_p(*residuals, *moving, tape=second, mesh=mesh, in_specs=specs, out_specs=out_specs)
""",
    ],
    "7.7": [
        """
transposed = mesh.trace(body, [*tape.inputs[:n], *tape.outputs])
ins, outs = (*in_specs[:n], *out_specs), out_specs
return [None] * n + shard_map_p(*values, *cts, tape=transposed, mesh=mesh, in_specs=ins, out_specs=outs)
""",
        """
transposed = mesh.trace(body, [*tape.inputs[:n], *tape.outputs])
ins, outs = (*in_specs[:n], *out_specs), in_specs[n:]
return shard_map_p(*values, *cts, tape=transposed, mesh=mesh, in_specs=ins, out_specs=outs)
""",
    ],
    "8.1": [
        """
travels = pieces[rank]
for step in range(1, size):
    travels = shift(travels) + pieces[(rank - step) % size]
return travels
""",
        """
total = x
for step in range(1, size):
    x = shift(x)
    total = total + x
return np.split(total, size)[rank]
""",
    ],
    "8.2": [
        """
blocks = [x]
for step in range(1, size):
    blocks.append(shift(blocks[-1]))
return np.concatenate(blocks)
""",
        """
blocks = {rank: x}
for step in range(1, size):
    x = shift(x)
    blocks[(rank + step) % size] = x
return np.concatenate([blocks[r] for r in range(size)])
""",
    ],
    "8.3": [
        "return ring_all_gather(ring_psum_scatter(x, shift, rank, size), shift, rank, size)",
        """
parts = ring_all_gather(np.ravel(x), shift, rank, size)
return np.sum(np.split(parts, size), axis=0).reshape(np.shape(x))
""",
    ],
    "8.4": [
        "return self.comm.sendrecv(x, dest=self.comm.rank + 1, source=self.comm.rank - 1)",
        "return self.comm.sendrecv(x, dest=(self.comm.rank + 1) % self.size, source=(self.comm.rank + 1) % self.size)",
        "return self.comm.sendrecv(x, dest=(self.comm.rank - 1) % self.size, source=(self.comm.rank + 1) % self.size)",
        "return self.comm.sendrecv(x, dest=(self.comm.rank + 1) % 2, source=(self.comm.rank - 1) % 2)",
        """
rank = self.comm.rank
self.comm.sendrecv(x, dest=(rank + 1) % self.size, source=(rank - 1) % self.size)
""",
    ],
    "8.5": [
        "return lambda blocks: ring(blocks, self.shift, self.comm.rank, self.size)",
        "return lambda blocks: ring(blocks[0], self.shift, self.comm.rank, self.size)",
        "return lambda blocks: [ring(blocks[0], self.shift, self.size, self.comm.rank)]",
    ],
}

#: What the pages let students predict.
PREDICTIONS = {
    "operations_applied": 5,
    "equations": 7,
    "right_derivative": 1.0,
    "confused_derivative": 2.0,
    "linear_equations": 5,
    "bytes_of_psum": 256,
    "bytes_of_scatter": 64,
    "bytes_of_gather": 1024,
    "bytes_of_both": 256,
    "type_of_psum": "f64[3]",
    "type_of_w_times_x": "f64[3]{i}",
    "type_of_w_times_w": "f64[3]",
    "type_of_gather": "f64[12]{i}",
    "pbroadcasts": 2,
    "psums": 5,
    "sizes_of_psums": [1, 2, 16, 32, 128],
    "bytes_on_4_ranks": 2_010_720,
    "bytes_on_2_ranks": 1_340_480,
}


def predicted(source):
    """A cell of a page, with what it lets students predict filled in."""
    for name, value in PREDICTIONS.items():
        source = re.sub(rf"^{name} = \.\.\.$", f"{name} = {value!r}", source, flags=re.M)
    return source
