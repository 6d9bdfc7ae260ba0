"""Machines, models, types and options made of nonsense are refused where they are made, in one line."""

import math
import pickle

import numpy
import pytest

import minidiff as md
import spmd
from spmd.machines import A100, Efficiency, Link, Machine, Placement, link
from spmd.prices.forecast import Measurement
from tests.checks.samples import check_each

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")
DOUBLE = spmd.shard_map(lambda x: x * 2, mesh=MESH, in_specs=spmd.P("i"), out_specs=spmd.P("i"))
X = md.ShapedArray((8,), "float32")
MODEL = spmd.CostModel(1e-6, 1e-9)
ARRAY = numpy.ones(8)

NO_NUMBERS = [math.nan, -1.0, -math.inf, "12", None, True, [1.0], 1j, numpy.array(1.0)]
POSITIVE, FINITE = [*NO_NUMBERS, 0.0], [*NO_NUMBERS, math.inf]  # not positive; not finite
NO_COUNTS = [*POSITIVE, 2.5]
SIZES = [x for x in POSITIVE if x is not None]  # None is the default


def by_name(values):
    return [3, None, "x", math.nan, [1.0], {3: 1.0}, *[{"a": x} for x in values]]


def plan(**changes):
    options = {"devices": 4, "axes": ("data",), "microbatch": [1], "chunks": [1], "zero": [0], "recompute": [None]}
    return spmd.plan(lambda choice: (DOUBLE, (X,)), A100, **{**options, **changes})


#: What makes something by a name and a value, and for each name the values that it refuses.
REFUSED = {
    "Machine": (
        A100.replace,
        {
            "name": [None, 3],
            **dict.fromkeys(("elementwise", "bandwidth", "memory"), POSITIVE),
            **dict.fromkeys(("launch", "issue"), FINITE),
            "flops": by_name(POSITIVE),
            **dict.fromkeys(("steps", "steps_in_loops"), by_name([*POSITIVE, math.inf])),
            "caches": [3, None, "x", (1, 2), ((1,),), *[((8, x),) for x in POSITIVE], *[((x, 8),) for x in POSITIVE]],
            "links": [3, None, (), [A100.links[0]], (1,), A100.links[::-1]],
            "efficiency": [None, 0.5, {}],
            "fuses": ["sum", 3, ["sum"]],
            **{key: [None, 1, "yes", math.nan] for key in ("hides_memory", "overlap")},
            "sources": [None, {"flops": 3}],
        },
    ),
    "caches that do not grow": (A100.replace, {"caches": [((8, 1.0), (8, 1.0)), ((8, 1.0), (4, 1.0))]}),
    "Efficiency": (Efficiency, {"best": [*POSITIVE, 1.5], "half": FINITE, "power": [*FINITE, 0.0]}),
    "Link": (
        lambda **changes: Link(**{"name": "a", "ranks": 4, "model": MODEL, **changes}),
        {"name": [None, 3], "ranks": NO_COUNTS, "model": [None, 1e-6], "source": [None]},
    ),
    "link": (
        lambda **changes: link(**{"name": "a", "ranks": 4, "latency": 1e-6, "bandwidth": 1e9, **changes}),
        {"ranks": NO_COUNTS, "latency": FINITE, "bandwidth": POSITIVE},
    ),
    "CostModel": (
        lambda **changes: spmd.CostModel(**{"alpha": 1e-6, "beta": 1e-9, **changes}),
        {
            **{key: [*FINITE, {"i": math.nan}, {"i": -1.0}, {3: 1.0}] for key in ("alpha", "beta", "gamma")},
            "factors": [None, 3, *[{"psum": x} for x in [*POSITIVE, math.inf]]],
            "algorithms": [None, 3, "ring", {"psum": None}],
            "measurements": [None, 3, ("x",), *[(Measurement("psum", *x),) for x in ((0, 8, 1.0), (2, -8, 1.0))]],
            "source": [None],
        },
    ),
    "Placement": (lambda size: Placement(A100, (("i", size),)), {"size": NO_COUNTS}),
    "a mesh": (lambda size: A100.on({"i": size}), {"size": NO_COUNTS}),
    "ShapedArray": (lambda n: md.ShapedArray((3, n), "float32"), {"n": [*NO_NUMBERS, math.inf, 2.5, 2.0]}),
    "a call": (
        lambda ranks=2, nbytes=8: MODEL.seconds("psum", ranks, nbytes),
        {"ranks": NO_COUNTS, "nbytes": FINITE},
    ),
    "CostModel.predict": (lambda n: MODEL.predict(DOUBLE, ranks=[n])(ARRAY), {"n": NO_COUNTS}),
    "CostModel.compare": (
        lambda ranks=2, nbytes=8: MODEL.compare(["ring_all_reduce"], nbytes, [ranks]),
        {"ranks": NO_COUNTS, "nbytes": FINITE},
    ),
    "predict": (
        lambda **options: spmd.predict(DOUBLE, A100, **options)(X),
        {"overlap": ["i", ("k",), 3, math.nan, [3]], "nearest": ["i", ("k",), ("i", "i"), 3, math.nan, True]},
    ),
    "predict without a mesh": (
        lambda **options: spmd.predict(lambda x: x * 2, A100, **options)(X),
        {"overlap": [("k",)], "nearest": [("k",)]},
    ),
    "a machine": (lambda m: spmd.predict(DOUBLE, m)(X), {"m": [None, "A100"]}),
    "timeline": (
        lambda model=MODEL, rate=1e9: spmd.timeline(DOUBLE, model, rate)(ARRAY),
        {"rate": POSITIVE, "model": [3, "A100"]},
    ),
    "calibrate": (
        lambda repeats=1, size=64: spmd.calibrate(MESH, repeats=repeats, sizes=[size]),
        {"repeats": NO_COUNTS, "size": NO_COUNTS},
    ),
    "this_machine": (lambda n: spmd.machines.this_machine(MESH, repeats=n), {"n": NO_COUNTS}),
    "speed_up": (
        lambda one=1.0, n=2, repeats=1: spmd.speed_up(DOUBLE, MESH, MODEL, one, ranks=[n], repeats=repeats)(ARRAY),
        {"one": [*POSITIVE, math.inf], "n": NO_COUNTS, "repeats": NO_COUNTS},
    ),
    "plan": (
        plan,
        {
            **dict.fromkeys(("devices", "count", "tries"), NO_COUNTS),
            "memory": [x for x in POSITIVE if x is not None],
            "axes": [(), ("k",), ("data", "data"), "data", None],
            **{key: [[], None, *[[x] for x in NO_COUNTS]] for key in ("microbatch", "chunks")},
            "zero": [[], [4], [math.nan]],
            "schedule": [[], "gpipe", [None], ["interleave"], ["gpipe", "Schedule"], [3], [math.nan], [["gpipe"]]],
            "recompute": [[], None, "full", ["none"], [None, "attention"], [True], [0], [math.nan], [["full"]]],
            "overlap": [("k",), 3, math.nan, "data"],
        },
    ),
    "jit": (lambda **options: md.jit(DOUBLE, **options), {"bucket_bytes": SIZES}),
    "rewritten": (lambda **options: spmd.rewritten(DOUBLE, **options), {"bucket_bytes": SIZES}),
    "rewritten of a jitted function": (
        lambda **options: spmd.rewritten(md.jit(DOUBLE), **options),
        {"bucket_bytes": SIZES},
    ),
    "a picture": (lambda n: spmd.visualize_sharding((8, n), MESH, spmd.P("i")), {"n": [-1, True]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nonsense_is_refused_in_one_line(name):
    make, values = REFUSED[name]

    def check(**inputs):
        with pytest.raises((ValueError, TypeError)) as error:
            make(**inputs)
        assert "\n" not in str(error.value), error.value

    check_each([(f"{k}={x!r}", lambda k=k, x=x: check(**{k: x})) for k, each in values.items() for x in each])


def test_ideal_machines_and_numbers_of_numpy_are_fine():
    links = (link("any", math.inf, latency=0, bandwidth=math.inf),)
    ideal = A100.replace(launch=0, elementwise=math.inf, bandwidth=math.inf, memory=math.inf, links=links)
    assert spmd.predict(DOUBLE, ideal)(X).seconds == 0.0
    narrow = A100.replace(bandwidth=numpy.float32(1e9), launch=numpy.float64(1e-6), overlap=numpy.bool_(False))
    assert spmd.predict(DOUBLE, narrow)(X).seconds > 0
    assert md.ShapedArray((numpy.int64(3), 0), "float32").shape == (3, 0)
    assert type(md.ShapedArray((numpy.int64(3),), "float32").shape[0]) is int
    assert all(isinstance(pickle.loads(pickle.dumps(m)), Machine) for m in (A100, ideal, narrow))
