"""Batches: every epoch is a permutation, ranks read their own rows, a resumed run sees what it would have seen."""

import gc
import itertools
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import spmd
from spmd import P, checkpoint
from spmd.data import batches, join
from tests.checks.samples import NOT_PLAIN, each

ONE = spmd.make_mesh((1,), ("i",), backend="simulated")
TWO = spmd.make_mesh((2,), ("i",), backend="simulated")
LINE = spmd.make_mesh((4,), ("i",), backend="simulated")
GRID = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
SPECS = {ONE: P(), TWO: P("i"), GRID: (P(("i", "j")), P("i", "j"))}  # of numbers and rows


def data_of(n):
    """Numbers [n], and rows [n, 2] that follow from them."""
    return np.arange(n), np.arange(2 * n).reshape(n, 2)


def stream_of(n):
    """The same as examples, in an order that differs from epoch to epoch."""
    numbers, rows = data_of(n)
    return lambda epoch: ((numbers[k], rows[k]) for k in np.roll(numbers, epoch))


def seen(actual):
    """The numbers in each batch, whose rows must be those of the numbers."""
    result = []
    for numbers, rows in actual:
        numbers, rows = np.asarray(numbers), np.asarray(rows)
        np.testing.assert_array_equal(rows, 2 * numbers[:, None] + [0, 1])
        result.append(numbers.tolist())
    return result


def check_join(mesh, lengths, until):
    """Ranks have so many examples in each block, along one axis; their masked batches have these, step by step."""
    numbers = itertools.count()
    data = [[[next(numbers) for _ in range(n)] for n in rank] for rank in lengths]
    rows = max(rank[0] for rank in lengths)
    data = [[block[:rows] for block in rank] for rank in data]
    make = lambda rank: ({"x": np.array(block, float), "y": np.zeros((len(block), 2))} for block in data[rank])  # noqa: E731
    count = (min if until == "first" else max)(map(len, data))
    steps, calls = join(make, mesh, P("i"), until), mesh.calls
    pairs = [*steps]
    assert len(pairs) == count and [*steps] == []
    if mesh.backend == "mpi":
        assert mesh.calls["psum"] - calls.get("psum", 0) == count + 1  # and nothing else that is counted
    for k, (batch, mask) in enumerate(pairs):
        x, y, mask = spmd.gather((batch["x"], batch["y"], mask))
        assert x.shape == mask.shape == (rows * mesh.size,) and y.shape == (rows * mesh.size, 2) and not y.any()
        for rank, (of_rank, keep) in enumerate(zip(x.reshape(mesh.size, rows), mask.reshape(mesh.size, rows))):
            real = data[rank][k] if k < len(data[rank]) else []
            assert of_rank[keep].tolist() == real and (np.flatnonzero(keep) == np.arange(len(real))).all()
            latest = real or data[rank][min(k, len(data[rank]) - 1)]
            assert {*of_rank[len(real) :]} <= ({*latest[-1:]} or {0.0}) | {*latest[len(real) :]}


sources = st.sampled_from([data_of, stream_of])
lasts = st.sampled_from(["drop", "keep", "wrap"])
few = settings(max_examples=40, deadline=None)
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


def test_epochs_and_seeds_have_orders_of_their_own():
    seeds = (0, 1, (0, 1), (1, 0))
    orders = [seen(batches(data_of(30), ONE, P(), batch=30, seed=seed, epochs=3)) for seed in seeds]
    assert len({str(order) for epochs in orders for order in epochs}) == 3 * len(seeds) - 3  # (1, 0) is 1


@few
@given(sources, st.integers(2, 6), st.sampled_from(["drop", "wrap"]), st.sampled_from([TWO, GRID]), st.data())
def test_ranks_together_have_the_batches_of_one(source, parts, last, mesh, data):
    """Split along one axis or two; after a resume on another mesh too."""
    size = parts * 4
    n, at = data.draw(st.integers(size, 3 * size)), data.draw(st.integers(0, 5))
    one, other = (batches(source(n), m, SPECS[m], batch=size, last=last, prefetch=0) for m in (ONE, mesh))
    want = seen(itertools.islice(one, at + 3))
    assert seen(itertools.islice(other, at)) == want[:at]
    resumed = batches(source(n), ONE, P(), batch=size, last=last)
    resumed.restore(other.state())
    assert seen(itertools.islice(resumed, 3)) == seen(itertools.islice(other, 3)) == want[at:]


@few
@given(sources, st.integers(4, 20), lasts, st.integers(0, 3), st.data())
def test_a_resumed_run_sees_what_it_would_have_seen(source, n, last, prefetch, data):
    size, options = data.draw(st.integers(1, n)), {"last": last, "epochs": 3}
    whole = seen(batches(source(n), ONE, P(), batch=size, **options, prefetch=0))
    at = data.draw(st.integers(0, len(whole)))
    begun = batches(source(n), ONE, P(), batch=size, **options, prefetch=prefetch)
    assert seen(itertools.islice(begun, at)) == whole[:at]
    state = begun.state()
    rest = seen(begun)
    resumed = batches(source(n), ONE, P(), batch=size, **options, prefetch=prefetch)
    resumed.restore(state)
    begun.restore(state)  # it can go back, too
    assert rest == seen(resumed) == seen(begun) == whole[at:]


def test_the_state_is_saved_and_loaded(tmp_path):
    first = batches(data_of(10), TWO, P("i"), batch=4, seed=5)
    next(first)
    checkpoint.save(tmp_path, 1, first.state())
    second = batches(data_of(10), TWO, P("i"), batch=4, seed=5)
    second.restore(checkpoint.load(tmp_path, second.state())[0])
    assert seen([next(first), next(first)]) == seen([next(second), next(second)])


# ---------------------------------------------------------------- what is read


class Recorded:
    """An array that records the places that are read."""

    def __init__(self, x):
        self.x, self.shape, self.dtype, self.read = x, x.shape, x.dtype, []

    def __getitem__(self, index):
        actual = self.x[index]
        self.read.append((index[0].tolist(), actual.shape))
        return actual


def test_each_rank_reads_its_block():
    """Simulated ranks are one after the other; each block is read once, and no more than it."""
    numbers, rows = map(Recorded, data_of(12))
    actual = next(batches((numbers, rows), GRID, SPECS[GRID], batch=4, prefetch=0))
    order = np.asarray(actual[0]).tolist()
    assert numbers.read == [([k], (1,)) for k in order]
    assert rows.read == [(half, (2, 1)) for half in (order[:2], order[2:]) for _ in "jj"]


def test_memory_mapped_arrays(tmp_path):
    for name, x in zip("ab", data_of(9)):
        np.save(tmp_path / f"{name}.npy", x)
    mapped = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "ab")
    of_memory, of_files = (seen(batches(x, TWO, P("i"), batch=4, epochs=2)) for x in (data_of(9), mapped))
    assert of_memory == of_files
    (plain,) = batches(mapped[0], TWO, P(), batch=9, epochs=1)
    assert type(plain) is np.ndarray


def test_iterables():
    """Examples may be numbers. An iterator has one epoch, and cannot go back."""
    listed = batches(range(5), TWO, P("i"), batch=2)
    assert [np.asarray(x).tolist() for x in itertools.islice(listed, 3)] == [[0, 1], [2, 3], [0, 1]]
    once = batches(iter(range(5)), TWO, P("i"), batch=2)
    assert [x.local for x in once] == [[[0], [1]], [[2], [3]]]
    once.restore(once.state())
    with pytest.raises(ValueError, match="can be iterated over only once, and cannot go back"):
        next(once)
    later = batches(iter(range(5)), ONE, P(), batch=2)
    later.restore({"epoch": 0, "position": 2, "batch": 2})
    assert [x.tolist() for x in later] == [[2, 3]]


# ---------------------------------------------------------------- the thread


def test_the_thread_reads_ahead_and_no_further():
    taken = []
    stream = (taken.append(k) or k for k in itertools.count())
    actual = batches(stream, ONE, P(), batch=1, prefetch=3)
    assert not taken  # before the first batch
    for k in range(4):
        assert next(actual).tolist() == [k] and actual.state()["position"] == k + 1
    actual.close()
    assert 4 <= len(taken) <= 4 + 3
    with pytest.raises(StopIteration):
        next(actual)


@pytest.mark.parametrize("end", ["closed", "exhausted", "collected", "failed"])
def test_the_thread_ends(end):
    actual = batches(failing if end == "failed" else data_of(8), ONE, P(), batch=4, epochs=1)
    next(actual)
    thread = actual._steps._thread
    if end == "closed":
        actual.close()
    elif end == "exhausted":
        assert len([*actual]) == 1
    elif end == "failed":
        with pytest.raises(OSError):
            next(actual)
    del actual
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def failing(epoch):
    yield from range(6)
    raise OSError("the disk is gone")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_reading_raises(prefetch):
    """It is raised where the batch is asked for; from the state before, one can try again."""
    actual = batches(failing, ONE, P(), batch=3, prefetch=prefetch)
    assert [next(actual).tolist(), next(actual).tolist()] == [[0, 1, 2], [3, 4, 5]]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(actual)
        with pytest.raises(StopIteration):
            next(actual)
        actual.restore(actual.state())


# ---------------------------------------------------------------- masks of short batches


@fewer
@given(sources, st.integers(1, 20), st.sampled_from([1, 3, 4]), st.sampled_from([ONE, TWO, GRID]))
def test_masks_of_short_batches(source, n, half, mesh):
    size, epochs = 4 * half, 3
    actual = batches(source(n), mesh, SPECS[mesh], batch=size, last="mask", epochs=epochs, prefetch=0)
    real = []
    for (numbers, rows), mask in actual:
        assert numbers.shape == mask.shape == (size,) and spmd.spec_of(mask) == spmd.spec_of(numbers)
        ((all_numbers,), keep) = seen([(numbers, rows)]), np.asarray(mask)
        count = int(keep.sum())
        assert count and keep[:count].all() and {*all_numbers[count:]} <= {all_numbers[count - 1]}
        real.append(all_numbers[:count])
    want = batches(source(n), ONE, P(), batch=min(size, n), last="keep", epochs=epochs, prefetch=0)
    assert [*itertools.chain(*real)] == [*itertools.chain(*seen(want))]


def test_a_masked_batch_resumes():
    make = lambda: batches(data_of(10), TWO, P("i"), batch=4, last="mask", epochs=2)  # noqa: E731
    whole, first = [x[0].gather().tolist() for x, _ in make()], make()
    for _ in range(3):
        next(first)
    rest = make()
    rest.restore(first.state())
    assert [x[0].gather().tolist() for x, _ in rest] == whole[3:] and len(whole) == 6


# ---------------------------------------------------------------- ranks with different amounts of data


@fewer
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=4, max_size=4), st.booleans())
def test_ranks_leave_together(lengths, first):
    check_join(LINE, lengths, "first" if first else "last")


def test_ranks_that_have_the_same_data():
    blocks = [[np.arange(2.0) + rank] * (rank + 1) for rank in range(2)]
    pairs = [*join(lambda rank: blocks[rank // 2], GRID, P("i"))]
    assert [x.gather().tolist() for x, _ in pairs] == [[0, 1, 1, 2]] * 2
    assert [mask.gather().tolist() for _, mask in pairs] == [[True] * 4, [False, False, True, True]]
    ((x, mask),) = join([[np.ones((2, 4))]] * 4, GRID, P(None, "i"))
    assert x.shape == (2, 8) and mask.tolist() == [True, True]


def test_a_masked_mean_is_that_of_all_examples():
    data = [np.arange(7.0), np.arange(3.0) + 10, np.arange(0.0), np.arange(5.0) - 4]
    for rows in (1, 2, 3):
        total = count = 0
        for x, mask in join(lambda rank, n=rows: np.split(data[rank], range(n, len(data[rank]), n)), LINE, P("i")):
            total, count = total + np.sum(x, where=mask), count + np.sum(mask)
        assert float(total / count) == np.concatenate(data).mean()


def test_one_rank_s_word_is_enough():
    steps = join(lambda rank: itertools.repeat(np.ones(2)), TWO, P("i"))
    for k, _ in enumerate(steps):
        if k == 3:
            steps.stop()
    assert k == 3 and [*steps] == []
    steps = join([[np.ones(2)]] * 2, TWO, P("i"))
    steps.stop()
    assert [*steps] == []


def broken(rank):
    """Blocks of which rank 1 cannot read the second."""
    yield np.ones(2)
    if rank == 1:
        raise OSError("the disk is full")
    yield np.ones(2)


JOIN_MISTAKES = {
    r"until is 'end'; write 'first' or 'last'": lambda: join([[X], [X]], TWO, P("i"), until="end"),
    r"mesh is P\('i'\), which is not a mesh: write join\(x, mesh": lambda: join([[X]], P("i"), TWO),
    r"all 2 of them need a block": lambda: join([[X]], TWO, P("i")),
    r"a rank has no block, .* give it one of no examples, \[x\[:0\]\]": lambda: next(join([[X], []], TWO, P("i"))),
    r"blocks differ: .*block: float64\[examples\].*block: float32": (
        lambda: next(join([[X], [X.astype("f4")]], TWO, P("i")))
    ),
    r"blocks differ: .*block\['x'\]: float64\[examples, 2\].*float64\[examples, 3\]": (
        lambda: next(join([[{"x": np.ones((4, n))}] for n in (2, 3)], TWO, P("i")))
    ),
    r"none is larger; got block: float64\[examples\], of 3 examples, after .*, of at most 2": (
        lambda: [*join([[X[:2], X[:3]], [X[:1]]], TWO, P("i"))]
    ),
    r"got block: int64\[examples\], of 2 examples, after block: float64": (
        lambda: [*join([[X[:2], np.arange(2)], [X[:1]]], TWO, P("i"))]
    ),
    r"first dimension .*; got block\[0\] of shape \(4,\), block\[1\] of shape \(3,\)": (
        lambda: next(join([[(X, X[:3])]] * 2, TWO, P("i")))
    ),
    r"first dimension .*; got block of shape \(\)": lambda: next(join([[1.0]] * 2, TWO, P("i"))),
    r"first dimension .*; got no array": lambda: next(join([[()]] * 2, TWO, P("i"))),
    r"names the axis 'k'": lambda: next(join([[X]] * 2, TWO, P("k"))),
    r"join: block: .*MaskedArray: its mask would be lost": lambda: next(
        join([[np.ma.masked_array(X, [0, 1, 0, 0])]] * 2, TWO, P("i"))
    ),
    r"the disk is full": lambda: [*join(broken, TWO, P("i"))],
}
X = np.arange(4.0)


def test_tracebacks_show_what_reads_the_data():
    """Not the library's lines, but those of the program, and of its function that reads."""
    for steps in (join(broken, TWO, P("i")), batches(lambda epoch: broken(1), TWO, P("i"), batch=2)):
        with pytest.raises(OSError, match="the disk is full") as error:
            for _ in steps:
                pass
        assert {entry.path.name for entry in error.traceback} == {Path(__file__).name}
        assert error.traceback[-1].name == "broken"


@pytest.mark.parametrize("message", JOIN_MISTAKES)
def test_mistakes_with_join(message):
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        JOIN_MISTAKES[message]()


# ---------------------------------------------------------------- errors

NUMBERS, ROWS = data_of(10)
MISTAKES = {
    r"data\[0\] has 10, data\[1\] has 9": lambda: batches((NUMBERS, ROWS[:9]), TWO, P("i"), batch=2),
    r"there are no arrays": lambda: batches((), TWO, P("i"), batch=2),
    r"data\['x'\] is 3 of type int; data must be NumPy arrays": lambda: batches({"x": 3}, TWO, P("i"), batch=2),
    r"batches: data.*dtype": lambda: batches(np.array(["a", None]), TWO, P("i"), batch=2),
    r"a batch of data\[1\] has shape \(3, 2\): dimension 0, of size 3, .* along 'i' \(2\)": (
        lambda: batches((NUMBERS, ROWS), TWO, (P(), P("i")), batch=3)
    ),
    r"last='drop' leaves it out\) of data\[0\] has shape \(1,\): .* along 'i' \(2\)": (
        lambda: batches((NUMBERS[:9], ROWS[:9]), TWO, P("i"), batch=4, last="keep")
    ),
    r"batch=11 is more than the 10 examples": lambda: batches(NUMBERS, TWO, P("i"), batch=11),
    r"batch is 0; it must be at least 1": lambda: batches(NUMBERS, TWO, P("i"), batch=0),
    r"batch is 2.0 of type float; write an integer": lambda: batches(NUMBERS, TWO, P("i"), batch=2.0),
    r"prefetch is -1": lambda: batches(NUMBERS, TWO, P("i"), batch=2, prefetch=-1),
    r"last is 'pad'; write one of 'drop', 'keep', 'wrap'": lambda: batches(NUMBERS, TWO, P("i"), batch=2, last="pad"),
    r"mesh is P\('i'\), which is not a mesh": lambda: batches(NUMBERS, P("i"), TWO, batch=2),
    r"names the axis 'k'": lambda: batches(NUMBERS, TWO, P("k"), batch=2),
    r"data are not: write P\(\)": lambda: batches(NUMBERS, TWO, P(unreduced={"i"}), batch=2),
    r"epoch 0 has 3 examples, fewer than batch=4": lambda: next(batches(range(3), TWO, P("i"), batch=4)),
    r"epoch 1 has 2 examples, fewer than batch=4": (
        lambda: [*batches(lambda epoch: range(5 if epoch == 0 else 2), TWO, P("i"), batch=4, last="wrap")]
    ),
    r"can be iterated over only once, which epochs=2": lambda: batches(iter(NUMBERS), TWO, P("i"), batch=2, epochs=2),
    r"must have one type; got i64\[\] and f64": lambda: next(batches(iter([1, 2.0]), TWO, P(), batch=2)),
    r"with batch = None, length = None, seed = None, but these have batch = 2": (
        lambda: batches(NUMBERS, TWO, P("i"), batch=2).restore({})
    ),
    r"batch = 2, seed = \[0\], but these have batch = 4, seed = \[1\]": (
        lambda: batches(NUMBERS, TWO, P("i"), batch=4, seed=1).restore(batches(NUMBERS, TWO, P("i"), batch=2).state())
    ),
    r"length = 9, but these have length = 10": (
        lambda: batches(NUMBERS, TWO, P("i"), batch=2).restore(batches(NUMBERS[:9], TWO, P("i"), batch=2).state())
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(message):
    with pytest.raises((ValueError, TypeError), match=message):
        MISTAKES[message]()


class Masked:
    """A file of which arrays are read with a mask, as by netCDF4."""

    shape, dtype = (4,), np.dtype(float)

    def __getitem__(self, index):
        return np.ma.masked_array(np.arange(4.0), [0, 1, 0, 0])[index]


@each("kind", NOT_PLAIN)
@each("prefetch", [0, 2])
def test_arrays_that_would_lose_something_are_refused(kind, prefetch):
    x, message = NOT_PLAIN[kind]
    make = lambda data: batches(data, TWO, P("i"), batch=2, prefetch=prefetch)  # noqa: E731
    with pytest.raises(TypeError, match=rf"batches: data\['x'\].*{message}"):
        make({"x": x})
    for stream in (lambda epoch: [{"x": x}] * 2, iter([{"x": x}] * 2), iter([{"x": x[:1]}] * 2)):
        with pytest.raises(TypeError, match=rf"batches: an example\['x'\].*{message}"):
            next(make(stream))


def test_what_is_read_with_a_mask_is_refused():
    with pytest.raises(TypeError, match=r"batches: what is read of data\['x'\].*its mask would be lost"):
        next(batches({"x": Masked()}, TWO, P("i"), batch=2))
