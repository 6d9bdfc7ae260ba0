"""Programs of mixed collectives on ranks, held against the reference; and such programs that exceptions interrupt."""

from __future__ import annotations

import random

DTYPES = ["float64", "float32", "int32", "int8", "uint8", "complex64", "float16"]
#: By name: the options of the call, of those of the reference, and the shape of a block of n entries.
CALLS = {
    "psum": ("", "{}"),
    "pmax": ("", "{}"),
    "pmin": ("", "{}"),
    "pprod": ("", "{}"),
    "all_gather": (", tiled=True", "dict(tiled=True)"),
    "psum_scatter": (", tiled=True", "dict(tiled=True)"),
    "all_to_all": (", 0, 0, tiled=True", "dict(split_axis=0, concat_axis=0, tiled=True)"),
    "ppermute": (", TURN", "dict(perm=TURN)"),
    "pscan": ("", "{}"),
    "broadcast": (", root=SIZE - 1", "dict(root=SIZE - 1)"),
    "reduce": ("", "{}"),
}
#: Other forms of calls that keep the shape of x, by the name of their reference.
FORMS = [
    ("psum", "psum((x, x + 1), 'i')[0]"),
    ("ppermute", "ppermute_start(x, 'i', TURN).wait()"),
    ("psum", "psum(x, 'i') + 0 * (x[:2] @ x[:2])"),  # compiled, the product is computed meanwhile
    ("ppermute", "ppermute(x, 'i', TURN) + 0 * (x[:2] @ x[:2])"),
]
SAME_SHAPE = ["psum", "pmax", "pmin", "ppermute", "pscan", "broadcast"]
SIZES = [1, 1, 3, 40, 600, 5000]

COMMON = """
TURN = [(r, (r + 1) % SIZE) for r in range(SIZE)]
def blocks_of(k, n, dtype):
    rng = numpy.random.default_rng(k)
    return [rng.integers(0, 3, n * SIZE).astype(dtype) + numpy.array(k % 5, dtype) for _ in range(SIZE)]
def on_ranks(body):
    return spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_rep=False)
def on_grid(axes):
    axes = axes if SIZE == 4 else ("a",)
    grid = spmd.make_mesh((2, 2) if SIZE == 4 else (SIZE,), ("a", "b")[:1 + (SIZE == 4)])
    def body(x):
        for a in axes: x = psum(x, a)
        return x
    return spmd.shard_map(body, mesh=grid, in_specs=P(grid.axis_names), out_specs=P(grid.axis_names), check_rep=False)
def check(step, y, expected):
    expected = [numpy.asarray(e) for e in expected]
    found = numpy.asarray(y.data)
    if found.shape != expected[rank].shape or not numpy.array_equal(found, expected[rank].astype(found.dtype)):
        shown = found.ravel()[:4], expected[rank].ravel()[:4]
        print(f"WRONG sums: rank {rank}, step {step}: {shown[0]}, not {shown[1]}", flush=True)
        raise AssertionError("WRONG")
"""


def draw_steps(rng: random.Random, count: int) -> str:
    """The text of a list of steps: a compiled or eager function of one to three collectives, and its reference."""
    lines = ["STEPS = []"]
    for _ in range(count):
        dtype, n = rng.choice(DTYPES), rng.choice(SIZES)
        complexes = dtype.startswith("complex")
        names = [rng.choice([c for c in CALLS if not (complexes and c in ("pmax", "pmin"))])]
        for _ in range(rng.choice([0, 0, 1, 2])):
            names.append(rng.choice([c for c in SAME_SHAPE if not (complexes and c in ("pmax", "pmin"))]))
        body, reference = "x", "b"
        for name in names:
            options, ref = CALLS[name]
            body = f"{name}({body}, 'i'{options})"
            reference = f"collective_ref({name!r}, {reference}, **{ref})"
        f = f"on_ranks(lambda x: {body})"
        if rng.random() < 0.3:
            name, body = rng.choice(FORMS)
            f = f"on_ranks(lambda x: {body})"
            reference = f"collective_ref({name!r}, b, **{CALLS[name][1]})"
        elif rng.random() < 0.2:
            f, reference = f"on_grid({rng.choice(['ab', 'ba'])!r})", "collective_ref('psum', b)"
        lines.append(
            f"STEPS.append(({rng.choice(['md.jit', 'not_jitted'])}({f}), lambda b: {reference}, {n}, {dtype!r}))"
        )
    return "\n".join(lines)


def mixed_collectives(rng: random.Random) -> str:
    return f"""
{COMMON}
{draw_steps(rng, 4)}
for k, (f, reference, n, dtype) in enumerate(STEPS * 3):
    blocks = blocks_of(k, n, dtype)
    with numpy.errstate(all="ignore"):
        check(k, f(numpy.concatenate(blocks)), reference(blocks))
"""


INTERRUPTING = """
from collectives.guards import deadlock
deadlock.TICK = 0.1
class Stop(BaseException): pass
ERRORS = (TimeoutError, KeyboardInterrupt, MemoryError, Stop)
def by_alarm(error, seconds):
    def handler(*_): raise error("interrupted")
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
def by_line(error, count):
    folders = [os.path.join(os.path.dirname(collectives.__file__), folder) for folder in ("backends", "guards")]
    def trace(frame, event, arg):
        nonlocal count
        if not frame.f_code.co_filename.startswith(tuple(folders)): return None
        if event == "line":
            count -= 1
            if count == 0: raise error("interrupted")
        return trace
    sys.settrace(trace)
def calm():
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.settrace(None)
"""


def _faults(rng: random.Random) -> dict[int, str]:
    """Lines that raise on some ranks, by the steps in which they do."""
    faults = {}
    for _ in range(rng.choice([1, 1, 2])):
        step, which = rng.randrange(6, 18), f"rank in {rng.choice(['(0,)', '(SIZE - 1,)', '(0, 1)', 'range(SIZE)'])}"
        error, late = rng.randrange(4), rng.choice([0, 0, 0.02, 0.1])
        way = rng.choice(
            [
                f"by_alarm(ERRORS[{error}], {rng.uniform(1e-5, 2e-3 + 2 * late)})",
                f"by_line(ERRORS[{error}], {rng.randint(1, 120)})",
            ]
        )
        faults[step] = f"""
    if k == {step}:
        if not {which}: time.sleep({late})
        else: {way}"""
    return faults


def exceptions_in_waits(rng: random.Random) -> str:
    """Exceptions on some ranks, at a random point of a random step, which the program catches."""
    faults = "".join(_faults(rng).values())
    overflow = rng.randrange(6, 18) if rng.random() < 0.4 else -1
    return f"""
{COMMON}
{INTERRUPTING}
{draw_steps(rng, rng.choice([1, 2, 3]))}
def arm(k):
    pass{faults}
caught = (*ERRORS, FloatingPointError)
for k in range(24):
    f, reference, n, dtype = STEPS[k % len(STEPS)]
    blocks = blocks_of(k, n, dtype)
    large = {overflow} == k and dtype in ("float32", "float64")
    if large: blocks = [b + numpy.array(numpy.finfo(dtype).max * (r < 2) * 0.9, dtype) for r, b in enumerate(blocks)]
    try:
        try:
            with numpy.errstate(all="ignore" if k < 6 or not large else "raise"):
                arm(k)
                y = f(numpy.concatenate(blocks))
        finally:
            calm()
    except caught as error:
        print(f"rank {{rank}}: {{type(error).__name__}} at step {{k}}", flush=True)
    except RuntimeError as error:
        if "no further calls" not in str(error): raise
        print(f"rank {{rank}} refuses at step {{k}}: {{error}}"[:200], flush=True)
        break
    else:
        if not large: check(k, y, reference(blocks))
"""
