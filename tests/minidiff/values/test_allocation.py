"""Memory that is free stays with the process, as the operating system counts it."""

import os
import platform
import subprocess
import sys

import pytest

from tests.checks.samples import each

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

#: Gradients by NumPy's operations, whose temporaries are many arrays of 8 MB.
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
step, x = md.jit(md.grad(loss), kernels=False), numpy.linspace(-1, 1, 1_000_000)
for _ in range(3):
    step(x)
start = faults()
for _ in range(3):
    step(x)
print(faults() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, resident() >> 20)
md.release_memory()
print(resident() >> 20)
"""
#: The limits with which glibc begins, held there: otherwise it raises them by itself, depending on the heap's layout.
LIMITS = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def run(before="", **env):
    """Page faults of three steps, the peak and what is resident in MB, and what is after `release_memory`."""
    code, env = STEPS.format(before=before), {**os.environ, **LIMITS, **env}
    child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return [int(number) for number in child.stdout.split()]


@glibc
def test_memory_that_is_free_stays_until_it_is_released():
    """The environment says how much is kept, and so may a program."""
    off, peak_off, _, _ = run(MINIDIFF_KEEP_MEMORY="0")
    on, peak, resident, after = run()
    assert off > 1000 and on < 0.1 * off and peak <= peak_off * 1.1 + 8 and after < resident - 30
    off, _, resident, _ = run(before="md.keep_memory(0)")
    on, _, _, _ = run(before="md.keep_memory(1 << 29)", MINIDIFF_KEEP_MEMORY="0")
    assert off > 1000 and on < 0.1 * off and resident < 100


@each("text, warning", [("much", "'much' is ignored"), ("-1", "'-1' is ignored"), ("", "")])
def test_a_limit_that_is_no_number_is_a_warning(text, warning):
    code = "import sys, minidiff as md; print('imported', file=sys.stderr); print(md.grad(lambda x: x * x)(1.0))"
    env = {**os.environ, "MINIDIFF_KEEP_MEMORY": text}
    child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert child.stdout == "2.0\n" and child.stderr.startswith("imported\n")  # the first gradient reads it
    assert warning in child.stderr and bool(warning) == (child.stderr != "imported\n")
