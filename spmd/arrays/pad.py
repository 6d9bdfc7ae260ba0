"""Padding: arrays whose sizes the ranks of a mesh do not divide."""

from __future__ import annotations

from typing import Any

import numpy

from minidiff import tree
from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.inputs.arguments import as_value
from spmd.arrays.reshard import check_mesh, check_no_body, distribute, specs_for
from spmd.mesh.checks import check_ndim, check_spec
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import PartitionSpec, part_count


def pad(x: Any, mesh: Mesh, spec: Any, **options: Any) -> tuple[Any, Any]:
    """Pad `x` until `spec` can split it over `mesh`, and return it distributed, with the mask of its own elements.

    Each dimension that the spec splits is filled up at its end to a multiple of its ranks; one that is a multiple stays
    as it is. The mask is a boolean array, True for elements of `x`, False for padding. It is split as the padded array,
    has its size along the dimensions that the spec splits, and size 1 along the others. So it broadcasts with the
    array, and is the `where=` of NumPy's reductions, of `minidiff.nn` and of `minidiff.optim`.

    Under MPI every rank must call it. Differentiable: the cotangent of the padding is dropped.

    Args:
        x: a tree of arrays, the same on all ranks.
        mesh: the mesh over which they are split.
        spec: a tree of partition specs that is a prefix of `x`.
        options: those of `numpy.pad`, which fills up with zeros; `mode='edge'` repeats the last element, where a
            function of zero is not finite, or has no finite derivative.

    Returns:
        The tree of padded arrays, and the tree of their masks.

    Raises:
        ValueError: if a spec does not fit the mesh, or has more entries than its array has dimensions.
        TypeError: in the body of a `shard_map`.

    >>> import numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((4,), ('i',), backend='simulated')
    >>> x, mask = pad(np.arange(1.0, 7.0), mesh, spmd.P('i'))
    >>> x
    ShardedArray([1., 2., 3., 4., 5., 6., 0., 0.], P('i'))
    >>> mask.local[-2:]
    [array([ True,  True]), array([False, False])]
    >>> float(np.mean(x, where=mask)), mask.shape, pad(np.ones((6, 3)), mesh, spmd.P('i'))[1].shape
    (3.5, (8,), (8, 1))
    """
    check_mesh("pad", mesh)
    check_no_body("pad")
    leaves, structure = tree.flatten_with_paths(x, "pad: x")
    pairs = [_pad(path, as_value(leaf), mesh, to, options) for (path, leaf), to in zip(leaves, specs_for(x, spec))]
    arrays, masks = zip(*pairs) if pairs else ((), ())
    return tree.unflatten(structure, arrays), tree.unflatten(structure, masks)


def _pad(path: str, x: Value, mesh: Mesh, spec: PartitionSpec, options: dict) -> tuple[Value, Value]:
    """Return an array, padded and distributed, and its mask."""
    check_spec(spec, mesh.shape, "spec")
    shape = typeof(x).shape
    check_ndim(spec, shape, "spec", path)
    widths, mask = [], numpy.ones((1,) * len(shape), bool)
    for d, (n, axes) in enumerate(zip(shape, spec.dims(len(shape)))):
        missing = -n % part_count(axes, mesh.shape)
        widths.append((0, missing))
        if axes:
            is_real = numpy.arange(n + missing) < n
            mask = mask & is_real.reshape(-1, *[1] * (len(shape) - 1 - d))
    x = numpy.pad(x, widths, **options) if any(map(any, widths)) else x
    return distribute(x, mesh, spec), distribute(mask, mesh, spec.with_states((), ()))
