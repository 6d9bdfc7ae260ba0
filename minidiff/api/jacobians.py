"""Jacobians, Hessians and Hessian-vector products, each in one vectorized pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.api.derivatives import Chosen, grad, jvp, linearize_leaves
from minidiff.api.vmap import vmap
from minidiff.core.forward import instantiate
from minidiff.core.ranks import cast_like
from minidiff.core.reverse import run_backward_pass
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import name_of
from minidiff.inputs.arguments import AT_PAIRS, check_function, check_sequences, warn_if_summed
from minidiff.inputs.keywords import make_decorator
from minidiff.values.dtypes import is_differentiable
from minidiff.values.lists import scatter, select

Argnums = int | Sequence[int]


@make_decorator
def jacfwd(f: Callable, argnums: Argnums = 0, has_aux: bool = False, holomorphic: bool = False) -> Callable:
    """Return a function that computes the Jacobian of `f` by forward mode, column by column: for tall Jacobians.

    It is cheaper than `jacrev` if the results have more elements than the arguments.

    Args:
        f: a function of trees of arrays.
        argnums: the arguments to differentiate in, by position: an int, or a tuple of ints.
        has_aux: `f` returns a pair `(value, aux)`.
        holomorphic: `f` is a holomorphic function of complex arguments.

    Returns:
        A function that returns the Jacobian, with `has_aux` `(jacobian, aux)`. The Jacobian has the structure of the
        result of `f`. In place of each leaf of shape `(*out,)`, it has a tree like the argument, with leaves of shape
        `(*out, *in)`; for a tuple of `argnums` a tuple of trees.

    Raises:
        TypeError: by that function, for integer arguments or results, and for complex arguments without `holomorphic`.

    >>> import numpy as np
    >>> jacfwd(lambda x: x ** 2)(np.array([1.0, 2.0]))
    array([[2., 0.],
           [0., 4.]])
    """
    check_function("jacfwd", f)
    chosen = Chosen("jacfwd", f, argnums, has_aux)

    def jacobian(*args: Any, **kwargs: Any) -> Any:
        at = JacobianProducts(chosen, args, kwargs, "c" if holomorphic else "f", "fc")
        columns = vmap(at.push_forward, out_axes=-1, axis_size=_count(at.in_types))(*basis_of(at.in_types))
        return at.result([_split_axis(column, at.in_types, -1) for column in columns])

    return jacobian


@make_decorator
def jacrev(f: Callable, argnums: Argnums = 0, has_aux: bool = False, holomorphic: bool = False) -> Callable:
    """Return a function that computes the Jacobian of `f` by reverse mode, row by row: for wide Jacobians.

    It is cheaper than `jacfwd` if the arguments have more elements than the results.

    Args:
        f: a function of trees of arrays.
        argnums: the arguments to differentiate in, by position: an int, or a tuple of ints.
        has_aux: `f` returns a pair `(value, aux)`.
        holomorphic: `f` is a holomorphic function with complex results.

    Returns:
        A function that returns the same as that of `jacfwd`.

    Raises:
        TypeError: by that function, for integer arguments or results, and for complex results without `holomorphic`.

    >>> import numpy as np
    >>> jacrev(lambda x: (x ** 2).sum())(np.array([1.0, 2.0]))
    array([2., 4.])
    """
    check_function("jacrev", f)
    chosen = Chosen("jacrev", f, argnums, has_aux)

    def jacobian(*args: Any, **kwargs: Any) -> Any:
        at = JacobianProducts(chosen, args, kwargs, *("c", "c") if holomorphic else ("fc", "f"))
        rows = vmap(at.pull_back, axis_size=_count(at.out_types))(*basis_of([t.cotangent for t in at.out_types]))
        return at.result(list(zip(*[_split_axis(row, at.out_types, 0) for row in rows])))

    return jacobian


jacobian = jacrev  # the name in autograd, PyTorch and TensorFlow


@make_decorator
def hessian(f: Callable, argnums: Argnums = 0, has_aux: bool = False, holomorphic: bool = False) -> Callable:
    """Return a function that computes the Hessian of `f` by forward mode over reverse mode: `jacfwd(jacrev(f))`.

    Args:
        f: a function of trees of arrays.
        argnums: the arguments to differentiate in, by position: an int, or a tuple of ints.
        has_aux: `f` returns a pair `(value, aux)`.
        holomorphic: `f` is a holomorphic function of complex arguments.

    Returns:
        A function that returns the Hessian: leaves of shape `(*out, *in, *in)`, in trees nested as in the result of
        `jacfwd`.

    >>> import numpy as np
    >>> hessian(lambda x: x[0] ** 2 * x[1])(np.array([1.0, 2.0]))
    array([[4., 2.],
           [2., 0.]])
    """
    check_function("hessian", f)
    first = jacrev(f, argnums, has_aux, holomorphic)
    first.__name__ = name_of(f)
    return jacfwd(first, argnums, has_aux, holomorphic)


def hvp(f: Callable, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Return the Hessian of a scalar function times a vector, by forward over reverse mode.

    It costs a few evaluations of `f`.

    Args:
        f: a function of trees of arrays that returns a real scalar.
        primals: a sequence with one tree for each argument.
        tangents: the vector, a sequence of trees like the primals.

    Returns:
        A tree like the argument if there is only one, else a tuple of such trees.

    Raises:
        TypeError: if primals and tangents do not match, or the result is not a real scalar.

    >>> import numpy as np
    >>> hvp(lambda x: (x ** 3).sum(), (np.array([1.0, 2.0]),), (np.array([1.0, 1.0]),))
    array([ 6., 12.])
    """
    check_function("hvp", f, call=AT_PAIRS)
    check_sequences("hvp", primals, tangents)
    argnums = 0 if len(primals) == 1 else tuple(range(len(primals)))
    return jvp(grad(f, argnums), primals, tangents)[1]


# ---------------------------------------------------------------- implementation


class JacobianProducts:
    """`f` linearized in some arguments, as functions of flat tangents or cotangents.

    Arguments and results have dtypes of these kinds: real, complex, or both.
    """

    def __init__(self, chosen: Chosen, args: tuple, kwargs: dict, in_kinds: str, out_kinds: str):
        values, flat = chosen.flatten(args, kwargs)
        self.chosen, self.flat = chosen, flat
        self.active = chosen.active(values, flat.structure)
        self.in_names = select(chosen.describe(flat.structure), self.active)
        self.in_types = list(map(typeof, select(values, self.active)))
        check_kinds(chosen.caller, self.in_names, self.in_types, "fc")
        origin = chosen.caller, chosen.name
        outs, self.aux, self.tape = linearize_leaves(origin, flat, values, self.active)
        self.out_types = list(map(typeof, outs))
        out_names = [f"the result{path} of {chosen.name}" for path in tree.paths(flat.out_structure)]
        check_kinds(chosen.caller, self.in_names, self.in_types, in_kinds)
        check_kinds(chosen.caller, out_names, self.out_types, out_kinds)

    def push_forward(self, *tangents: Value) -> list[Value]:
        return [instantiate(t, like) for t, like in zip(self.tape(*tangents), self.out_types)]

    def pull_back(self, *cts: Value) -> list[Value]:
        pulled = run_backward_pass(self.tape, cts, is_whole=True)
        used = {name: t for name, t, ct in zip(self.in_names, self.in_types, pulled) if ct is not None}
        warn_if_summed("jacrev", self.chosen.name, self.out_types, used)
        return [instantiate(ct, like.cotangent) for ct, like in zip(pulled, self.in_types)]

    def result(self, parts: Sequence[Sequence[Value]]) -> Any:
        """Build the Jacobian's tree from its blocks, `parts[output leaf][input leaf]`."""
        rows = [self.chosen.unflatten(self.flat.structure, scatter(row, self.active)) for row in parts]
        jacobian = tree.unflatten(self.flat.out_structure, rows)
        return (jacobian, *self.aux) if self.aux else jacobian


def _count(types: Sequence[ShapedArray]) -> int:
    return sum(t.size for t in types)


def basis_of(types: Sequence[ShapedArray]) -> Iterator[Value]:
    """The standard basis of a list of arrays along a new axis: a slice per array.

    Each slice has the states of its array along mesh axes, since under vmap it is traced, and no longer a constant.
    """
    total, start = _count(types), 0
    for t in types:
        basis = t.update(shape=(total, *t.shape), sharding=t.sharding and t.sharding.of_stack())
        yield cast_like(numpy.eye(total, t.size, -start, t.dtype).reshape(basis.shape), basis)
        start += t.size


def _split_axis(x: Value, types: Sequence[ShapedArray], axis: int) -> list[Value]:
    """Split the first or last axis, which has the size of the basis, into the arrays' axes."""
    ends = list(itertools.accumulate((t.size for t in types), initial=0))
    if axis == 0:
        return [x[i:j].reshape((*t.shape, *x.shape[1:])) for t, i, j in zip(types, ends, ends[1:])]
    return [x[..., i:j].reshape((*x.shape[:-1], *t.shape)) for t, i, j in zip(types, ends, ends[1:])]


def check_kinds(caller: str, names: Sequence[str], types: Sequence[ShapedArray], kinds: str) -> None:
    for name, t in zip(names, types):
        if not is_differentiable(t.dtype):
            raise TypeError(
                f"{caller}: {name} has type {t}, but only floating-point numbers can be differentiated: convert "
                "it with .astype(float), or choose other arguments with argnums"
            )
        if t.dtype.kind not in kinds and kinds == "c":
            raise TypeError(f"{caller} with holomorphic=True: {name} has type {t}, which is not complex")
        if t.dtype.kind not in kinds:
            raise TypeError(
                f"{caller}: {name} has type {t}; pass holomorphic=True if the function is holomorphic, or else "
                "differentiate its real and imaginary parts"
            )
