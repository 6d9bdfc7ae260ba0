"""Memory that is free stays with the process: as the operating system counts it."""

import os
import subprocess
import sys
import threading
import weakref

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.values import allocation

glibc = pytest.mark.skipif(allocation._libc() is None, reason="needs glibc")

STEPS = """
import resource, sys
import numpy, minidiff as md, minidiff.numpy as np
{before}
def loss(x):
    for _ in range(4):
        x = np.tanh(1.3 * x + 0.1) * np.exp(-x * x)
    return x.sum()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step, x = {step}, numpy.linspace(-1, 1, 1_000_000)
for _ in range(3):
    step(x)
start = faults()
for _ in range(3):
    step(x)
print(faults() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, resident() >> 20)
md.release_memory()
print(resident() >> 20)
"""
#: How gradients are computed: by NumPy's operations, compiled or not, whose temporaries are many arrays of 8 MB.
COMPILED, EAGER = "md.jit(md.grad(loss), kernels=False)", "md.grad(loss)"


#: The limits with which glibc begins, held there: otherwise it raises them by itself, depending on the heap's layout.
LIMITS = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def run(step, before="", **env):
    """Page faults of three steps, the peak and what is resident in MB, and what is after `release_memory`."""
    code, env = STEPS.format(step=step, before=before), {**os.environ, **LIMITS, **env}
    child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return [int(number) for number in child.stdout.split()]


@glibc
@pytest.mark.parametrize("step", [COMPILED, EAGER])
def test_steps_map_no_memory_anew(step):
    off, peak_off, _, _ = run(step, MINIDIFF_KEEP_MEMORY="0")
    on, peak, _, _ = run(step)
    assert on < 0.1 * off
    assert peak <= peak_off * 1.1 + 8


@glibc
def test_memory_is_given_back_on_demand():
    _, _, held, after = run(COMPILED)
    assert after < held - 30


@glibc
def test_a_program_may_say_how_much_is_kept():
    few, _, held, _ = run(COMPILED, before="md.keep_memory(0)")
    assert few > 1000 and held < 100
    none, _, _, _ = run(COMPILED, before="md.keep_memory(1 << 29)", MINIDIFF_KEEP_MEMORY="0")
    assert none < 0.1 * few


@glibc
def test_importing_changes_nothing():
    code = "import minidiff, sys; from minidiff.values import allocation; print(allocation._decided)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_errors():
    with pytest.raises(ValueError, match="the number of bytes must be 0 or positive, got -1"):
        md.keep_memory(-1)
    code = "import minidiff as md; print(md.grad(lambda x: x * x)(1.0))"
    for text, warning in (("much", "'much' is ignored: write a number of bytes"), ("-1", "'-1' is ignored"), ("", "")):
        env = {**os.environ, "MINIDIFF_KEEP_MEMORY": text}
        child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert child.stdout == "2.0\n" and warning in child.stderr and bool(warning) == bool(child.stderr)


# ---------------------------------------------------------------- what is held stays as it is


def results(x, k):
    return np.tanh(x * k), x + k, (np.sin(x) * k).sum()


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(["run", "grad", "drop", "view", "thread", "raise", "weak"]), st.integers(0, 9)),
        max_size=25,
    )
)
def test_what_is_held_keeps_its_values(actions):
    """Arrays, and views of arrays that are gone, while others come and go."""
    compiled = md.jit(results)
    x = numpy.linspace(0.0, 1.0, 50_000)
    held, expected = [], []

    def add(arrays):
        for a in arrays:
            held.append(a)
            expected.append(numpy.array(a))

    for action, k in actions:
        if action == "run":
            add(compiled(x, float(k)))
        elif action == "grad":
            add([md.grad(lambda x, k=k: results(x, k)[2])(x)])
        elif action == "view":
            add([compiled(x, float(k))[0][::-3]])
        elif action == "thread":
            thread = threading.Thread(target=lambda: add(compiled(x, 1.0)))
            thread.start()
            thread.join()
        elif action == "raise":
            with pytest.raises(ZeroDivisionError):
                md.grad(lambda x, k=k: results(x, k)[2] * (1 // 0))(x)
        elif action == "weak":
            first, *_ = compiled(x, float(k))
            seen = weakref.ref(first)
            del first, _
            assert seen() is None
        elif held:
            held.pop(k % len(held))
            expected.pop(k % len(expected))
    for a, b in zip(held, expected):
        numpy.testing.assert_array_equal(a, b)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork_both_processes_have_their_arrays():
    code = (
        "import os, numpy, minidiff as md, minidiff.numpy as np\n"
        "f = md.jit(lambda x: np.tanh(x) * 2 + x); x = numpy.ones(200_000); y = f(x)\n"
        "child = os.fork(); z = f(x * (1 if child else 2)); child and os.wait()\n"
        "print(round(float(y[-1]), 3), round(float(z[-1]), 3), flush=True)"
    )
    actual = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert sorted(actual.stdout.split()) == sorted(["2.523", "2.523", "2.523", "3.928"])
