"""Branches and loops that each rank chooses for itself: a rank takes its branch, or as many steps as it needs.

One value decides: a predicate, an index, a condition. Along the mesh axes along which it varies, no body communicates,
since not all ranks run it; and values that a body uses, and its results, vary.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from minidiff.control_flow.bodies import BodyOperation
from minidiff.core.interpreter import Interpreter, current_scope, running
from minidiff.core.ranks import vary_along
from minidiff.core.states import VARYING
from minidiff.core.tape import Equation, Stage, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import VarianceError, show_axes


class DivergentOperation(BodyOperation):
    """An operation whose bodies only some ranks run, if its `selector` varies.

    `effect` says what ranks do then, and `way_out` what to write if bodies communicate.
    """

    selector: str
    effect: str
    way_out: str
    names: Mapping[str, str] = MappingProxyType({})  # of bodies in messages, if not those of the parameters

    def check_divergence(self, selector: ShapedArray, params: dict) -> None:
        """Raise an error unless the bodies may differ between ranks along the axes along which the selector varies."""
        self.check_communication(selector, params)
        for t in self.branches(params)[0].out_types:
            if selector.variance - t.states.varying_or_unreduced:
                axes = show_axes(selector.variance)
                raise TypeError(f"{self.name}: all results must vary along {axes}, as {self.selector} does")

    def check_communication(self, selector: ShapedArray, params: dict, name_of_selector: str = "") -> None:
        """Raise VarianceError if a body communicates along axes along which the selector varies."""
        if not selector.variance:
            return
        subject = name_of_selector or self.selector
        for name, tape in params.items():
            for eqn in communicating_equations(tape) if isinstance(tape, Tape) else ():
                over = selector.variance.intersection(eqn.params["axes"])
                if over:
                    body = self.names.get(name) or re.sub(r"_(\d+)$", r"[\1]", name)
                    at = f" ({eqn.source})" if eqn.source is not None else ""
                    way_out = self.way_out.format(eqn.primitive, axes=show_axes(over), selector=subject)
                    raise VarianceError(
                        f"{subject}, {selector}, varies along {', '.join(map(repr, sorted(over)))}: ranks "
                        f"{self.effect}. But {body} has a {eqn.primitive} over {show_axes(eqn.params['axes'])}{at}: "
                        f"ranks that run it would wait forever for the others. {way_out}"
                    )


def communicating_equations(tape: Tape) -> Iterator[Equation]:
    """Yield the equations that communicate between ranks, also in bodies of others."""
    for eqn in tape.equations:
        if eqn.primitive.sends(eqn.params):
            yield eqn
        for body in eqn.bodies:
            yield from communicating_equations(body)


class DivergentBody(Stage):
    """Record a body that only some ranks run: values that it closes over vary along the selector's axes.

    The pbroadcasts for this are outside the body, and so are their transposes, psums that all ranks call. The body
    has a scope of its own, so that transformations in it lift the values that they close over from here.
    """

    def __init__(self, below: Interpreter, primitive: DivergentOperation, name: str, selector: Value | ShapedArray):
        super().__init__(below)
        self.scope = copy.copy(below.scope)
        self.scope.transposed = 0
        self.varying = functools.partial(vary_as, primitive, selector, label=f"a value that {name} closes over")

    def _lift(self, x):
        with running(self.below):
            return self.varying(self.below.lift(x))

    def end(self):
        self.below.scope.transposed += self.scope.transposed
        super().end()


def vary_as(primitive: DivergentOperation, selector: Value | ShapedArray, x: Value, label: str) -> Value:
    """Insert a pbroadcast of `x` along the selector's axes; VarianceError in an explicit scope."""
    chosen_by = typeof(selector)
    missing = chosen_by.variance - typeof(x).states.varying_or_unreduced
    if missing and current_scope().checks and isinstance(x, Tracer):
        raise VarianceError(
            f"{primitive}: {primitive.selector} is a {chosen_by}, so ranks {primitive.effect}, in which "
            f"every value varies: write pbroadcast(x, {show_axes(missing)}) for {label}, {typeof(x)}"
        )
    return vary_along(x, missing)


def divergent_type(t: ShapedArray, selector: ShapedArray) -> ShapedArray:
    """Return the type t of a result, varying along the selector's axes."""
    return t.update(states=t.states.with_state(selector.variance - t.unreduced, VARYING), sharding=t.sharding)
