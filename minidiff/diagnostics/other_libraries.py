"""Names of JAX, autograd, PyTorch, mpi4py and SciPy that users try, and what to write here instead.

>>> import minidiff as md
>>> md.Jaxpr
Traceback (most recent call last):
AttributeError: minidiff has no attribute 'Jaxpr': write md.Tape
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any

import numpy

from minidiff.diagnostics.text import did_you_mean
from minidiff.diagnostics.tracebacks import hide_frames_of, hide_own_frames


def _table(rows: dict[str, str]) -> dict[str, str]:
    """Turn rows of advice and the names that it is for into a table from names to advice.

    In advice, `{}` is the name, and `{lower}` the name in lower case.
    """
    return {
        name: advice.replace("{}", name).replace("{lower}", name.lower())
        for advice, names in rows.items()
        for name in names.split()
    }


_COLLECTIVES = {
    "psum": "all_reduce allreduce Allreduce AllReduce",
    "psum_scatter": "reduce_scatter Reduce_scatter Reduce_scatter_block",
    "all_gather": "allgather Allgather all_gather_into_tensor",
    "all_to_all": "alltoall Alltoall all_to_all_single",
    "broadcast": "bcast Bcast",
    "ppermute": "send recv Send Recv sendrecv Sendrecv isend irecv pshuffle",
}

#: What users look for in `minidiff` and in `spmd`, and is in `collectives` or `spmd`.
_ON_RANKS = _table(
    {
        **{f"write collectives.{name}": names for name, names in _COLLECTIVES.items()},
        "write collectives.{}": "psum pmean pmax pmin ppermute pbroadcast psum_scatter all_gather all_to_all "
        "axis_index axis_size pvary",
        "write spmd.distribute(x, mesh, P('i'))": "device_put NamedSharding PositionalSharding",
        "write x.gather()": "device_get",
        "write spmd.reshard(x, P('i'))": "with_sharding_constraint",
        "write spmd.process_index()": "Get_rank get_rank axis_rank",
        "write spmd.process_count(), or mesh.shape": "Get_size get_world_size device_count local_device_count devices "
        "local_devices",
        "the launcher starts the ranks, mpirun -n 4 python -m spmd run script.py, and spmd.make_mesh names them": "MPI "
        "COMM_WORLD init_process_group distributed",
        "write spmd.barrier(mesh)": "Barrier sync_global_devices",
        "write spmd.shard_map": "pmap xmap smap",
        "write spmd.parallel.data_parallel": "DistributedDataParallel DDP",
        "write spmd.parallel.fully_sharded": "FullyShardedDataParallel FSDP",
    }
)

#: Module, or class -> a name that it lacks -> what to write. `md` is minidiff, `np` is minidiff.numpy.
INSTEAD: dict[str, dict[str, str]] = {
    "minidiff": _ON_RANKS
    | _table(
        {
            "write md.cond, md.scan, md.while_loop or md.fori_loop for control flow, a function of minidiff.numpy for "
            "arrays, and psum and its like of the package collectives": "lax",
            "write md.tree": "tree_util",
            "write md.tree.map": "tree_map",
            "write md.make_tape": "make_jaxpr",
            "write md.Tape": "Jaxpr",
            "values are NumPy's arrays: write numpy.ndarray": "Array Tensor",
            "write np.array": "tensor",
            "leave it out: a result is there when the call returns": "block_until_ready",
            "write md.debug_nans(True); dtypes are NumPy's, float64 by default": "config",
            "write spmd.{}": "shard_map make_mesh Mesh P PartitionSpec",
            "write spmd.make_mesh and spmd.P": "sharding",
            # autograd
            "write md.vmap(md.grad(f)), or md.grad(lambda x: f(x).sum())": "elementwise_grad",
            "write md.vjp": "make_vjp",
            "write md.jvp": "make_jvp deriv",
            "write md.hvp": "make_hvp hessian_vector_product hessian_tensor_product",
            "write md.grad(f, has_aux=True)": "grad_and_aux",
            "write md.jacrev(f, holomorphic=True)": "holomorphic_grad",
            "write md.custom_vjp, or md.custom_jvp": "primitive defvjp defjvp Function",
            # PyTorch
            "write md.grad, md.vjp or md.jacrev": "autograd func",
            "write md.grad of a function: no array carries a gradient": "backward",
            "write md.stop_gradient": "no_grad detach inference_mode",
            "write md.jit": "compile",
            "write key = md.random.key(0), and pass the key on": "manual_seed",
            "write md.random.normal(key, shape)": "randn",
            "write md.random.uniform(key, shape)": "rand",
        }
    ),
    "minidiff.random": _table(
        {
            "write md.random.key": "PRNGKey",
            "leave it out: a key is an array u32[2]": "key_data wrap_key_data key_impl clone",
            "write np.exp(md.random.normal(key, shape))": "lognormal",
            "write 2 * md.random.gamma(key, df / 2)": "chisquare",
            "write normal(k, shape) / np.sqrt(2 / df * gamma(l, df / 2, shape)), of two keys k and l": "t",
            "write np.sqrt(2 * md.random.exponential(key, shape))": "rayleigh",
            "write np.exp(md.random.exponential(key, shape) / b)": "pareto",
            "write scale * md.random.exponential(key, shape) ** (1 / concentration)": "weibull_min",
            "write np.ceil(md.random.exponential(key, shape) / -np.log1p(-p))": "geometric",
            "write (md.random.uniform(key, (n, *shape)) < p).sum(0)": "binomial",
            "write np.tan(np.pi * md.random.uniform(key, shape, minval=-0.5, maxval=0.5))": "cauchy",
            "write u = md.random.uniform(key, shape), and np.log(u) - np.log1p(-u)": "logistic",
            "write key = md.random.key(0), and pass the key on": "seed default_rng RandomState",
            "write md.random.normal(key, shape)": "randn standard_normal",
            "write md.random.uniform(key, shape)": "rand random random_sample",
        }
    ),
    "minidiff.nn": _table(
        {
            "a layer is a function of its parameters, x @ w + b": "Linear Dense Module Sequential Parameter",
            "write md.nn.{lower}": "ReLU GELU SiLU ELU Softmax Sigmoid Softplus Dropout",
            "write md.nn": "functional",
            "write np.tanh": "tanh",
        }
    ),
    "minidiff.optim": _table({"write md.optim.{lower}": "SGD Adam AdamW Adagrad Lion"}),
    "spmd": _ON_RANKS
    | _table(
        {
            "write md.{}": "grad value_and_grad jit vmap jvp vjp scan cond checkpoint_name",
            "an array has x.mesh and x.spec: write spmd.distribute(x, mesh, P('i'))": "Sharding",
        }
    ),
    "collectives": _table(
        {
            **{f"write {name}": names for name, names in _COLLECTIVES.items()},
            "write spmd.{}": "shard_map make_mesh P barrier",
        }
    ),
    "ShardedArray": _table(
        {
            "write x.mesh and x.spec": "sharding",
            "write x.local": "addressable_shards addressable_data global_shards to_local",
            "write x.mesh": "device devices device_mesh",
            "write x.spec": "placements is_fully_replicated",
            "write x.gather()": "full_tensor",
            "write spmd.reshard(x, P('i'))": "redistribute",
            "leave it out: a result is there when the call returns": "block_until_ready",
        }
    ),
}


def missing_attribute_error(owner: str, name: str, known: Iterable[str] = ()) -> AttributeError:
    """The error that a module or a class has no attribute `name`: what to write instead, or a similar known name."""
    advice = INSTEAD.get(owner, {}).get(name)
    if advice is None and owner == "minidiff" and name in numpy.__all__:
        advice = f"write np.{name}, after import minidiff.numpy as np"
    suggestion = f": {advice}" if advice else "" if name.startswith("_") else did_you_mean(name, known)
    return AttributeError(f"{owner} has no attribute {name!r}{suggestion}")


_NONE: Mapping[str, str] = MappingProxyType({})


def module_getattr(module: str, modules: Mapping[str, str] = _NONE, names: Mapping[str, str] = _NONE) -> Callable:
    """The `__getattr__` of a module, which imports on first use and has no other names.

    `modules` has the paths of modules that are attributes of it, `names` those of the modules that define the others.
    (A module must not have the same name as a function in it, since importing it would shadow that.)
    """

    @hide_own_frames
    def find(name: str) -> Any:
        namespace = vars(sys.modules[module])
        if name in modules:
            namespace[name] = importlib.import_module(modules[name])
        elif name in names:
            namespace[name] = getattr(importlib.import_module(names[name]), name)
            hide_frames_of(namespace, [name])
        else:
            raise missing_attribute_error(module, name, dir(sys.modules[module]))
        return namespace[name]

    return find


def finish_module(namespace: dict[str, Any]) -> None:
    """Finish a module that users import: hide the library's frames, list its names, explain those that it lacks."""
    names = namespace["__all__"]
    hide_frames_of(namespace, names)
    namespace["__dir__"] = functools.partial(sorted, names)
    namespace.setdefault("__getattr__", module_getattr(namespace["__name__"]))


# ---------------------------------------------------------------- SciPy

#: A function of SciPy -> what to write for traced values, unless `md.scipy` has a function of this name.
SCIPY = _table(
    {
        "md.scipy.signal.convolve": "convolve2d fftconvolve oaconvolve",
        "md.scipy.signal.correlate": "correlate2d",
        "np.{}": "kron trapezoid",
        "np.linalg.solve(a, b)": "lu_factor lu_solve lu",
        "md.scipy.linalg.matrix_function, for a symmetric matrix": "funm",
        "np.interp": "interp1d",
    }
)
#: Frames of these call the functions of users, whose traced values no function of SciPy around them has.
_TRANSFORMATIONS = ("minidiff.transforms.", "minidiff.compiler.", "minidiff.higher_order.")


def scipy_function() -> tuple[str, str] | None:
    """The function of SciPy that was called with traced values, and what to write instead; None outside SciPy."""
    frame: FrameType | None = sys._getframe(1)
    running: list[tuple[str, str]] = []
    while frame is not None and not (module := frame.f_globals.get("__name__", "")).startswith(_TRANSFORMATIONS):
        if module.startswith("scipy."):
            running.append((module, _name_of_method(module, frame)))
            # A decorator's wrapper has the function in a variable.
            running += [
                (f.__module__, f.__name__)
                for f in frame.f_locals.values()
                if callable(f) and str(getattr(f, "__module__", "")).startswith("scipy.") and hasattr(f, "__name__")
            ]
        frame = frame.f_back
    for module, name in reversed(running):  # the user called the outermost
        if instead := _instead_of_scipy(module.split(".")[1], name):
            return _public(module, name), instead
    places = [*map(_public, *zip(*reversed(running)))] if running else [""]
    place = next((p for p in places if p.rpartition(".")[2] in _public_names(p)), places[0])
    return (place, "write it in NumPy's functions") if running else None


def _instead_of_scipy(family: str, name: str) -> str | None:
    """Return the advice for a function of a module of SciPy, or a distribution's method: the text to write instead."""
    libraries = importlib.import_module("minidiff.scipy").__all__
    library = importlib.import_module(f"minidiff.scipy.{family}") if family in libraries else None
    first, _, method = name.partition(".")
    if library and first in library.__all__:
        methods = [m for m in dir(getattr(library, first)) if m.endswith(("df", "mf", "sf"))]
        if method in ("", "entropy", *methods) and hasattr(getattr(library, first), method or "__call__"):
            return f"write md.scipy.{family}.{name}"
        return f"md.scipy.{family}.{first} has {', '.join(methods)}"
    if name in SCIPY:
        return f"write {SCIPY[name]}"
    numpys = next((f for f in ("linalg", "fft") if name in getattr(numpy, f).__all__), None)
    return f"write np.{numpys}.{name}" if numpys else None


def _name_of_method(module: str, frame: FrameType) -> str:
    """The name of the function of a frame: for a distribution's method, also frozen, `norm.logpdf`."""
    owner = frame.f_locals.get("self")
    owner = getattr(owner, "dist", getattr(owner, "_dist", owner))
    distribution = getattr(owner, "name", None) or type(owner).__name__.removesuffix("_gen")
    known = module.startswith("scipy.stats.") and distribution in vars(sys.modules["scipy.stats"])
    return f"{distribution}.{frame.f_code.co_name}" if known else frame.f_code.co_name


def _public_names(path: str) -> Sequence[str]:
    """The public names of the module of SciPy that a path begins with: of `scipy.optimize.root`, of scipy.optimize."""
    return getattr(sys.modules.get(".".join(path.split(".")[:2])), "__all__", ())


def _public(module: str, name: str) -> str:
    """The import path of a function of SciPy, whose private modules users do not import."""
    family = ".".join(module.split(".")[:2])
    if name.split(".")[0] in _public_names(family):
        return f"{family}.{name}"
    return ".".join([*(part for part in module.split(".") if not part.startswith("_")), name])
