"""Wrong answers to the holes of "Build it yourself", at least two for each: what students write at first."""

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
    ],
    "1.4": [
        "return args",
        """
shape = np.broadcast_shapes(*(typeof(x).shape for x in args))
last = [tuple(range(len(typeof(x).shape), len(shape))) for x in args]
return [broadcast_to(x, shape=shape, axes=a) if isinstance(x, Tracer) and a else x for x, a in zip(args, last)]
""",
        """
shape = np.broadcast_shapes(*(typeof(x).shape for x in args))
return [broadcast_to(x, shape=shape, axes=(0,)) if typeof(x).shape != shape else x for x in args]
""",
    ],
    "1.5": [
        """
Tracer.__add__ = lambda x, y: add(x, y)
Tracer.__mul__ = lambda x, y: multiply(x, y)
""",
        """
Tracer.__add__ = Tracer.__radd__ = lambda x, y: add(x, y)
Tracer.__mul__ = Tracer.__rmul__ = lambda x, y: multiply(x, y)
Tracer.__neg__ = lambda x: multiply(-1.0, x)
Tracer.__sub__ = Tracer.__rsub__ = lambda x, y: add(x, multiply(-1.0, y))
Tracer.__matmul__ = lambda x, y: matmul(x, y)
""",
    ],
    "2.1": [
        """
outputs = [Var(self, t) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args), params, outputs))
return outputs if op.many else outputs[0]
""",
        """
if not any(map(self.owns, args)):
    return self.below.process(op, args, params)
outputs = [Var(self, t) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args), params, outputs))
return outputs
""",
        """
if not all(map(self.owns, args)):
    return self.below.process(op, args, params)
outputs = [Var(self, t) for t in result_types(op, [typeof(x) for x in args], params)]
self.equations.append(Equation(op, list(args), params, outputs))
return outputs if op.many else outputs[0]
""",
    ],
    "2.2": [
        """
record = Record(current())
outputs = f(*[record.new_input(typeof(x)) for x in args])
return Tape(record.inputs, record.equations, as_list(outputs))
""",
        """
from .tracer import Evaluate
record = Record(Evaluate())
inputs = [record.new_input(typeof(x)) for x in args]
with using(record):
    outputs = f(*inputs)
return Tape(record.inputs, record.equations, as_list(outputs))
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
    ],
    "3.1": [
        """
own = [isinstance(x, Dual) for x in xs]
primals = [x.primal if yes else x for x, yes in zip(xs, own)]
return primals, [x.tangent if yes else None for x, yes in zip(xs, own)]
""",
        """
own = [isinstance(x, Dual) and x.interpreter is self for x in xs]
return [x.primal if yes else x for x, yes in zip(xs, own)], [x.tangent if yes else 0.0 for x, yes in zip(xs, own)]
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
    ],
    "3.5": [
        """
multiply: product(multiply),
matmul: product(matmul),
sum: linear(sum),
broadcast_to: linear(broadcast_to),
transpose: linear(transpose),
sin: chain(sin, cos),
cos: chain(cos, sin),
""",
        """
multiply: product(multiply),
sin: chain(sin, cos),
cos: chain(cos, lambda x: -1.0 * sin(x)),
""",
    ],
    "4.1": [
        """
record = Record(current())
forward = JVP(current())
duals = [forward.join(x, record.new_input(typeof(x))) for x in primals]
with using(forward):
    results = as_list(f(*duals))
results, tangents = forward.split(results)
return results, Tape(record.inputs, record.equations, tangents)
""",
        """
record = Record(current())
forward = JVP(record)
duals = [forward.join(x, record.new_input(typeof(x))) for x in primals]
with using(forward):
    results = as_list(f(*duals))
results, tangents = forward.split(results)
return results, Tape(record.inputs, record.equations, results)
""",
    ],
    "4.2": ["return [ct]", "return [broadcast_to(ct, shape=x.shape, axes=tuple(range(len(axes))))]"],
    "4.3": ["return [ct]", "return [sum(ct, axes=tuple(range(len(shape))))]"],
    "4.4": [
        "matmul: transpose_product(matmul, matmul),",
        "matmul: transpose_product(lambda ct, y: matmul(ct, y.T), lambda ct, x: matmul(ct, x.T)),",
    ],
    "4.5": ["known[x] = ct", "if ct is not None:\n    known[x] = ct"],
    "4.6": [
        """
for eqn in tape.equations:
    cts = [known.pop(v, None) for v in eqn.outputs]
    if any(ct is not None for ct in cts):
        operands = [x.type if isinstance(x, Var) and x in variables else x for x in eqn.inputs]
        collect(eqn.inputs, transpose_rules[eqn.op](cts if eqn.op.many else cts[0], *operands, **eqn.params))
""",
        """
for eqn in reversed(tape.equations):
    cts = [known.pop(v, None) for v in eqn.outputs]
    if any(ct is not None for ct in cts):
        operands = [x.type if isinstance(x, Var) else x for x in eqn.inputs]
        collect(eqn.inputs, transpose_rules[eqn.op](cts if eqn.op.many else cts[0], *operands, **eqn.params))
""",
        """
for eqn in reversed(tape.equations):
    cts = [known.pop(v) for v in eqn.outputs]
    operands = [x.type if isinstance(x, Var) and x in variables else x for x in eqn.inputs]
    collect(eqn.inputs, transpose_rules[eqn.op](cts if eqn.op.many else cts[0], *operands, **eqn.params))
""",
    ],
    "4.7": [
        "(value,), pull_back = vjp(f, *args)\nreturn value, pull_back(value)",
        "value, pull_back = vjp(f, *args)\nreturn value, pull_back(np.ones(()))",
    ],
    "5.1": ["return [np.sum(blocks)] * len(blocks)", "return np.sum(blocks, axis=0)"],
    "5.2": ["return [np.stack(blocks)] * size", "return np.concatenate(blocks)"],
    "5.3": ["return np.split(blocks[0], size)", "return [np.sum(blocks, axis=0)] * size"],
    "5.4": [
        """
env[eqn.outputs[0]] = [eqn.op.run(*blocks, **eqn.params) for blocks in zip(*operands)]
""",
        """
if eqn.op in mesh.collectives:
    result = mesh.collectives[eqn.op](*operands, **eqn.params)
    mesh.calls[eqn.op.name] += len(mesh.ranks)
else:
    result = [eqn.op.run(*blocks, **eqn.params) for blocks in zip(*operands)]
env[eqn.outputs[0]] = result
""",
    ],
    "6.1": [
        "pbroadcast_p: lambda blocks, axis: blocks,",
        """
pbroadcast_p: lambda blocks, axis: [blocks] * len(blocks),
pscatter_p: lambda blocks, axis, size: np.split(blocks[0], size),
""",
        """
pbroadcast_p: lambda blocks, axis: blocks,
pscatter_p: lambda blocks, axis, size: [np.split(x, size)[0] for x in blocks],
""",
    ],
    "6.2": [
        """
psum_p: (True, False),
pbroadcast_p: (False, True),
all_gather_p: (True, False),
psum_scatter_p: (True, True),
all_gather_invariant_p: (True, False),
pscatter_p: (False, True),
""",
        """
psum_p: (True, True),
pbroadcast_p: (False, True),
all_gather_p: (True, True),
psum_scatter_p: (True, True),
all_gather_invariant_p: (True, False),
pscatter_p: (False, True),
""",
    ],
    "6.3": [
        "return varying | {axis} if returns else varying - {axis}",
        """
if (axis in varying) != takes:
    raise TypeError(f"{op} along {axis!r} of a value of the other kind")
return frozenset({axis}) if returns else frozenset()
""",
    ],
    "6.4": [
        """
for axis in sorted(axes - typeof(x).varying):
    x = pbroadcast(x, axis)
return x
""",
        """
for axis in sorted(axes):
    x = pbroadcast(x, axis)
return x
""",
        """
for axis in sorted(axes - typeof(x).varying):
    x = casts_of(pbroadcast_p).setdefault(axis, pbroadcast(x, axis))
return x
""",
    ],
    "6.5": [
        """
psum_p: lambda ct, x, **params: [psum_p(ct, **params)],
pbroadcast_p: lambda ct, x, **params: [psum_p(ct, **params)],
all_gather_p: lambda ct, x, **params: [psum_scatter_p(ct, **params)],
psum_scatter_p: lambda ct, x, **params: [all_gather_p(ct, **params)],
all_gather_invariant_p: lambda ct, x, **params: [pscatter_p(ct, **params)],
pscatter_p: lambda ct, x, **params: [all_gather_invariant_p(ct, **params)],
""",
        """
psum_p: lambda ct, x, **params: [pbroadcast_p(ct, **params)],
pbroadcast_p: lambda ct, x, **params: [ct],
all_gather_p: lambda ct, x, **params: [psum_scatter_p(ct, **params)],
psum_scatter_p: lambda ct, x, **params: [all_gather_p(ct, **params)],
all_gather_invariant_p: lambda ct, x, **params: [pscatter_p(ct, **params)],
pscatter_p: lambda ct, x, **params: [all_gather_invariant_p(ct, **params)],
""",
        """
psum_p: lambda ct, x, **params: [pbroadcast_p(ct, **params)],
pbroadcast_p: lambda ct, x, **params: [psum_p(ct, **params)],
""",
    ],
    "7.1": [
        "return np.split(x, mesh.size)",
        "return np.split(x, mesh.size, axis=spec.index(mesh.axis)) if mesh.axis in spec else [x] * mesh.size",
    ],
    "7.2": [
        "return np.concatenate(blocks) if mesh.axis in spec else blocks[0]",
        "return np.concatenate(blocks, axis=spec.index(mesh.axis)) if mesh.axis in spec else blocks[0]",
    ],
    "7.3": [
        "return Type(tuple(shape), frozenset({mesh.axis}) if mesh.axis in spec else frozenset())",
        """
if mesh.axis in spec:
    shape[spec.index(mesh.axis)] //= mesh.size
return Type(tuple(shape))
""",
    ],
    "7.4": [
        "return x",
        "if mesh.axis not in spec and mesh.axis in typeof(x).varying:\n    raise TypeError('i, P()')\nreturn x",
        """
if mesh.axis in typeof(x).varying and mesh.axis not in spec:
    raise TypeError(f"{typeof(x)} and {spec}")
return vary(x, frozenset({mesh.axis})) if isinstance(x, Tracer) else x
""",
    ],
    "7.5": [
        """
results, linear = linearize(of_active, *(x for x, yes in zip(blocks, active) if yes))
used = [x for eqn in linear.equations for x in eqn.inputs if isinstance(x, Var)]
residuals = [x for x in used if x not in linear.variables()]
pieces["linear"] = Tape([*residuals, *linear.inputs], linear.equations, linear.outputs)
pieces["residuals"] = residuals
return results
""",
        """
results, linear = linearize(of_active, *(x for x, yes in zip(blocks, active) if yes))
residuals = list(blocks)
pieces["linear"] = Tape([*residuals, *linear.inputs], linear.equations, linear.outputs)
pieces["residuals"] = residuals
return [*results, *residuals]
""",
        """
results, linear = linearize(of_active, *(x for x, yes in zip(blocks, active) if yes))
used = [x for eqn in linear.equations for x in eqn.inputs if isinstance(x, Var)]
residuals = list(dict.fromkeys(used))
pieces["linear"] = Tape([*residuals, *linear.inputs], linear.equations, linear.outputs)
pieces["residuals"] = residuals
return [*results, *residuals]
""",
    ],
    "7.6": [
        "return transpose_tape(tape, linear, args[: len(values)], args[len(values) :])",
        """
found = transpose_tape(tape, linear, args[len(cts) :], args[: len(cts)])
return [np.zeros(t.shape) if ct is None else ct for ct, t in zip(found, wanted)]
""",
    ],
    "7.7": [
        """
transposed = make_tape(body)(*types, *map(typeof, tape.outputs))
outs = tuple(spec for spec, yes in zip(in_specs, linear) if yes)
found = shard_map_p(*values, *cts, tape=transposed, mesh=mesh, in_specs=(*outs, *out_specs), out_specs=outs)
return merge(linear, found, [None] * len(linear))
""",
        """
transposed = make_tape(body)(*types, *map(typeof, tape.outputs))
ins = (*(spec for spec, yes in zip(in_specs, linear) if not yes), *out_specs)
outs = tuple(spec for spec, yes in zip(in_specs, linear) if yes)
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
    ],
    "8.5": [
        "return lambda blocks, **params: ring(blocks, self.shift, self.comm.rank, self.size)",
        "return lambda blocks, **params: ring(blocks[0], self.shift, self.comm.rank, self.size)",
        "return lambda blocks, **params: [ring(blocks[0], self.shift, self.size, self.comm.rank)]",
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
