"""Batches: each epoch is a permutation, ranks read their own rows, a resumed run goes on as it would; see `data.md`."""

import itertools
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import spmd
import tests.programs.batches
from spmd import P
from spmd.data import batches, join
from tests.checks.meshes import mesh
from tests.checks.samples import NOT_PLAIN, each
from tests.programs.batches import ONE, broken, check_join, data_of, seen, stream_of

TWO, LINE, PLANE = mesh(2), mesh(4), mesh(2, 2)
SPECS = {ONE: P(), TWO: P("i"), PLANE: (P(("i", "j")), P("i", "j"))}  # of numbers and rows
sources = st.sampled_from([data_of, stream_of])
lasts = st.sampled_from(["drop", "keep", "wrap"])
few = settings(max_examples=25, deadline=None)
fewer = settings(max_examples=12, deadline=None)


@few
@given(st.sampled_from([0, 3, (1, 2), None]), st.integers(4, 30), lasts, st.data())
def test_each_epoch_is_a_permutation(seed, n, last, data):
    size, epochs = data.draw(st.integers(1, n)), 3
    actual = seen(batches(data_of(n), ONE, P(), batch=size, seed=seed, last=last, epochs=epochs, prefetch=0))
    per_epoch = [size] * (n // size) + [n % size] * (last == "keep" and n % size > 0)
    assert [*map(len, actual)] == ([size] * -(-n * epochs // size) if last == "wrap" else per_epoch * epochs)
    order, count = [*itertools.chain(*actual)], n if last == "wrap" else sum(per_epoch)
    for epoch in (order[k * count : (k + 1) * count] for k in range(epochs)):
        assert len({*epoch}) == count and {*epoch} <= {*range(n)}
        assert seed is not None or epoch == [*range(count)]


@few
@given(sources, st.integers(2, 6), st.sampled_from(["drop", "wrap"]), st.sampled_from([TWO, PLANE]), st.data())
def test_ranks_together_have_the_batches_of_one(source, parts, last, over, data):
    """Split along one axis or two; after a resume on another mesh too."""
    size = parts * 4
    n, at = data.draw(st.integers(size, 3 * size)), data.draw(st.integers(0, 5))
    one, other = (batches(source(n), m, SPECS[m], batch=size, last=last, prefetch=0) for m in (ONE, over))
    want = seen(itertools.islice(one, at + 3))
    assert seen(itertools.islice(other, at)) == want[:at]
    resumed = batches(source(n), ONE, P(), batch=size, last=last)
    resumed.restore(other.state())
    assert seen(itertools.islice(resumed, 3)) == seen(itertools.islice(other, 3)) == want[at:]


@few
@given(sources, st.integers(4, 20), st.sampled_from(["drop", "keep", "wrap", "mask"]), st.integers(0, 3), st.data())
def test_a_resumed_run_sees_what_it_would_have_seen(source, n, last, prefetch, data):
    size, unmasked = data.draw(st.integers(1, n)), (lambda x: (b for b, _ in x)) if last == "mask" else lambda x: x
    make = lambda prefetch=prefetch: batches(source(n), ONE, P(), batch=size, last=last, epochs=3, prefetch=prefetch)  # noqa: E731
    whole = seen(unmasked(make(0)))
    at, begun, resumed = data.draw(st.integers(0, len(whole))), make(), make()
    assert seen(unmasked(itertools.islice(begun, at))) == whole[:at]
    state = begun.state()
    rest = seen(unmasked(begun))
    for again in (resumed, begun):  # it can go back, too
        again.restore(state)
        assert seen(unmasked(again)) == rest == whole[at:]


@pytest.mark.parametrize(
    "read", [lambda: join(broken, TWO, P("i")), lambda: batches(lambda e: broken(1), TWO, P("i"), batch=2)]
)
def test_tracebacks_show_what_reads_the_data(read):
    """Not the library's lines, but those of the program, and of its function that reads."""
    with pytest.raises(OSError, match="the disk is full") as error:
        for _ in read():
            pass
    files = {Path(__file__), Path(tests.programs.batches.__file__)}
    assert {Path(entry.path) for entry in error.traceback} <= files and error.traceback[-1].name == "broken"


# ---------------------------------------------------------------- masks, and ranks with different amounts of data


@fewer
@given(sources, st.integers(1, 20), st.sampled_from([1, 3, 4]), st.sampled_from([ONE, TWO, PLANE]))
def test_masks_of_short_batches(source, n, half, over):
    size, epochs = 4 * half, 3
    actual = batches(source(n), over, SPECS[over], batch=size, last="mask", epochs=epochs, prefetch=0)
    real = []
    for (numbers, rows), mask in actual:
        assert numbers.shape == mask.shape == (size,) and spmd.spec_of(mask) == spmd.spec_of(numbers)
        ((all_numbers,), keep) = seen([(numbers, rows)]), np.asarray(mask)
        count = int(keep.sum())
        assert count and keep[:count].all() and {*all_numbers[count:]} <= {all_numbers[count - 1]}
        real.append(all_numbers[:count])
    want = batches(source(n), ONE, P(), batch=min(size, n), last="keep", epochs=epochs, prefetch=0)
    assert [*itertools.chain(*real)] == [*itertools.chain(*seen(want))]


@fewer
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=4, max_size=4), st.booleans())
def test_ranks_leave_together(lengths, first):
    check_join(LINE, lengths, "first" if first else "last")


class Masked:
    """A file of which arrays are read with a mask, as by netCDF4."""

    shape, dtype = (4,), np.dtype(float)

    def __getitem__(self, index):
        return np.ma.masked_array(np.arange(4.0), [0, 1, 0, 0])[index]


@each("kind", NOT_PLAIN)
@each("prefetch", [0, 2])
def test_arrays_that_would_lose_something_are_refused(kind, prefetch):
    make, x = lambda data: batches(data, TWO, P("i"), batch=2, prefetch=prefetch), NOT_PLAIN[kind][0]
    with pytest.raises(TypeError):
        make({"x": x})
    for data in (lambda epoch: [{"x": x}] * 2, iter([{"x": x}] * 2), iter([{"x": x[:1]}] * 2), {"x": Masked()}):
        with pytest.raises(TypeError):
            next(make(data))
