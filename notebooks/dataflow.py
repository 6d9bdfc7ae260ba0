"""Static control flow as a graph of nodes: operations, and Switch and Merge between them, as in TensorFlow's graphs.

A node fires when a value has arrived at each of its inputs, and sends its result on. Two nodes steer values: `Switch`
takes a value and a condition, and sends the value to one of two outputs; `Merge` passes on whatever arrives first. A
branch that is not taken gets no values, so nothing in it fires. A loop is a Merge of the first value and that of the
last step, a Switch by the loop's condition, and the body in between; what the body reads goes around with the rest.
All values begin the next step together (`NextIteration`), and leave together (`Exit`), so that none meets one of
another step. A `scan` is such a loop, in which a number goes around, too: by it a step reads its element of each array
(`Element`). What a step returns is appended to a list, which goes around and is stacked at the end; in the backward
pass of a `scan`, which is one in reverse, these are the values that the forward pass leaves for it.

Nodes whose inputs are there do not wait for each other: with `workers`, `run` fires them in threads. NumPy lets go of
Python's lock while it computes large arrays.

Sources: Dennis, "First version of a data flow procedure language", 1974; Yu et al., "Dynamic control flow in
large-scale machine learning", 2018, whose nodes these are. (There values have the numbers of their steps, and need not
wait.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy

from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var

Port = tuple["Node", int]  # an output of a node


@dataclass(eq=False)
class Node:
    """A node: its label, how it computes a list of results, and the ports that its inputs come from."""

    label: str
    compute: Callable[..., list]
    inputs: list[Port] = field(default_factory=list)


class Dataflow:
    """The graph of a tape, whose `cond`, `while_loop` and `scan` become Switch and Merge nodes.

    >>> import numpy, minidiff as md
    >>> graph = Dataflow(md.make_tape(lambda x: md.cond(x > 0, numpy.sin, numpy.negative, x))(1.0))
    >>> [node.label for node in graph.nodes]
    ['x0', 'greater', 'Switch', 'sin', 'negative', 'Merge', 'result']
    >>> graph.run(-2.0)
    [np.float64(2.0)]
    """

    def __init__(self, tape: Tape):
        self.nodes: list[Node] = []
        self.inputs = [self._node(f"x{k}", None, []) for k in range(len(tape.inputs))]
        outs = self._add(tape, self.inputs, self.inputs[0])
        self.results = [self._node("result", lambda x: [x], [port])[0] for port in outs]

    def _node(self, label: str, compute: Any, inputs: Sequence[Port]) -> Port:
        self.nodes.append(Node(label, compute, list(inputs)))
        return self.nodes[-1], 0

    def _add(self, tape: Tape, ports: Sequence[Port], trigger: Port) -> list[Port]:
        """Add a tape's equations, and return the ports of its results; what needs no value waits for the trigger."""
        known = dict(zip(tape.inputs, ports))

        def port_of(atom: Any) -> Port:
            return known[atom] if isinstance(atom, Var) else self._node(f"{atom}", lambda _, x=atom: [x], [trigger])

        for eqn in tape.equations:
            if eqn.primitive.name == "cond":
                result = self._cond(eqn, [port_of(a) for a in eqn.inputs])
            elif eqn.primitive.name == "while_loop":
                result = self._loop(eqn, [port_of(a) for a in eqn.inputs])
            elif eqn.primitive.name == "scan":
                result = self._scan(eqn, [port_of(a) for a in eqn.inputs], trigger)
            else:
                result = self._operation(eqn, known, trigger)
            known.update(zip(eqn.outputs, result))
        return [port_of(a) for a in tape.outputs]

    def _operation(self, eqn: Equation, known: dict[Var, Port], trigger: Port) -> list[Port]:
        names = [a for a in eqn.inputs if isinstance(a, Var)]

        def compute(*values: Any) -> list:
            arguments = iter(values)
            out = eqn.primitive.bind(*[next(arguments) if isinstance(a, Var) else a for a in eqn.inputs], **eqn.params)
            return out if eqn.primitive.multiple_results else [out]

        node, _ = self._node(eqn.primitive.name, compute, [known[a] for a in names] or [trigger])
        return [(node, k) for k in range(len(eqn.outputs))]

    def _switch(self, value: Port, condition: Port) -> tuple[Port, Port]:
        node, _ = self._node("Switch", lambda x, c: [x, None] if c else [None, x], [value, condition])
        return (node, 0), (node, 1)

    def _merge(self, *ports: Port) -> Port:
        return self._node("Merge", lambda x: [x], ports)

    def _cond(self, eqn: Equation, ports: list[Port]) -> list[Port]:
        condition, *operands = ports
        switched = [self._switch(x, condition) for x in operands or [condition]]
        taken = [self._add(b, [x[k] for x in switched], switched[0][k]) for k, b in enumerate(eqn.bodies)]
        return [self._merge(*pair) for pair in zip(*taken)]

    def _loop(self, eqn: Equation, ports: list[Port]) -> list[Port]:
        a, b = eqn.params["cond_consts"], eqn.params["cond_consts"] + eqn.params["body_consts"]

        def goes_on(ports: Sequence[Port]) -> Port:
            return self._add(eqn.params["cond"], [*ports[:a], *ports[b:]], ports[0])[0]

        def step(ports: Sequence[Port]) -> list[Port]:
            return [*ports[:b], *self._add(eqn.params["body"], ports[a:], ports[0])]

        return self._cycle(ports, goes_on, step)[b:]

    def _scan(self, eqn: Equation, ports: list[Port], trigger: Port) -> list[Port]:
        """Add a loop that counts its steps, reads an element of each array, and appends to the list of each result."""
        length, a, b = eqn.params["length"], eqn.params["consts"], eqn.params["consts"] + eqn.params["carry"]
        order = -1 if eqn.params["reverse"] else 1

        def goes_on(ports: Sequence[Port]) -> Port:
            return self._node("less", lambda k: [k < length], ports[:1])

        def step(ports: Sequence[Port]) -> list[Port]:
            number, *values = ports
            xs, lists = values[b : len(eqn.inputs)], values[len(eqn.inputs) :]
            elements = [self._node("Element", lambda x, k: [x[::order][k]], [x, number]) for x in xs]
            outs = self._add(eqn.params["body"], [*values[:b], *elements], number)
            carry, ys = outs[: b - a], outs[b - a :]
            longer = [self._node("Append", lambda some, y: [[*some, y]], pair) for pair in zip(lists, ys)]
            return [self._node("add", lambda k: [k + 1], [number]), *values[:a], *carry, *xs, *longer]

        zero, *lists = [
            self._node(f"{x}", lambda _, x=x: [x], [trigger]) for x in [0, *[[]] * len(eqn.outputs[b - a :])]
        ]
        after = self._cycle([zero, *ports, *lists], goes_on, step)[1:]
        types = [v.type for v in eqn.outputs[b - a :]]
        stacks = [
            self._node("Stack", lambda ys, t=t: [numpy.array(ys[::order], t.dtype).reshape(t.shape)], [port])
            for port, t in zip(after[len(ports) :], types)
        ]
        return [*after[a:b], *stacks]

    def _cycle(self, ports: Sequence[Port], goes_on: Callable, step: Callable) -> list[Port]:
        """Send values around while a condition holds; return the ports at which they leave."""
        merged = [self._merge(port) for port in ports]
        condition = goes_on(merged)
        inside, after = zip(*[self._switch(port, condition) for port in merged])
        following, _ = self._node("NextIteration", lambda *xs: list(xs), step(inside))
        for k, (merge, _) in enumerate(merged):
            merge.inputs.append((following, k))
        leaving, _ = self._node("Exit", lambda *xs: list(xs), after)
        return [(leaving, k) for k in range(len(ports))]

    # ------------------------------------------------ how it runs, and how it looks

    def run(self, *values: Any, workers: int = 0) -> list:
        """Send values to the inputs, fire nodes while some are ready, and return what has arrived at the results.

        With `workers`, that many threads fire nodes; otherwise one is fired after the other.
        """
        waiting: dict[tuple[Node, int], deque] = {
            (node, k): deque() for node in self.nodes for k in range(len(node.inputs))
        }
        readers: dict[Port, list] = {}
        for node in self.nodes:
            for k, port in enumerate(node.inputs):
                readers.setdefault(port, []).append((node, k))
        fired: dict[Node, Any] = {}
        ready: deque = deque()

        def send(node: Node, outs: Sequence[Any]) -> None:
            if node in self.results:
                fired[node] = outs[0]
            for port, x in enumerate(outs):
                for reader, k in readers.get((node, port), ()) if x is not None else ():
                    waiting[reader, k].append(x)
                    queues = [waiting[reader, i] for i in range(len(reader.inputs))]
                    if reader.label == "Merge":
                        ready.append((reader, [waiting[reader, k].popleft()]))
                    elif all(queues):
                        ready.append((reader, [queue.popleft() for queue in queues]))

        for (node, _), x in zip(self.inputs, values):
            send(node, [x])
        if not workers:
            while ready:
                node, arguments = ready.popleft()
                send(node, node.compute(*arguments))
        else:
            with ThreadPoolExecutor(workers) as pool:
                firing: dict[Future, Node] = {}
                while ready or firing:
                    firing.update((pool.submit(node.compute, *arguments), node) for node, arguments in ready)
                    ready.clear()
                    for done in wait(firing, return_when=FIRST_COMPLETED).done:
                        send(firing.pop(done), done.result())
        return [fired[node] for node in self.results]

    def dot(self) -> str:
        """The graph in Graphviz's language: Switch and Merge are diamonds and triangles, and edges back are dashed."""
        shapes = {"Switch": "diamond", "Merge": "invtriangle"}
        number = {node: k for k, node in enumerate(self.nodes)}
        lines = [f'n{k} [label="{node.label}", shape={shapes.get(node.label, "box")}];' for node, k in number.items()]
        for node, k in number.items():
            for source, port in node.inputs:
                side = f', label="  {"TF"[port]}  "' if source.label == "Switch" else ""
                if number[source] > k:  # drawn downwards like the others: fewer lines cross
                    lines.append(f"n{k} -> n{number[source]} [dir=back, style=dashed{side}];")
                else:
                    lines.append(f"n{number[source]} -> n{k} [{side[2:]}];")
        look = "node [fontname=Helvetica, fontsize=11]; edge [fontname=Helvetica, fontsize=10];"
        return "digraph {\n  " + "\n  ".join([look, *lines]) + "\n}\n"
