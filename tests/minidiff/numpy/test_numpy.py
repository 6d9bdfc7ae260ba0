"""The namespace `minidiff.numpy`, and NumPy's own functions and arrays meeting traced values."""

import doctest
import operator
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as mnp
from minidiff.checks.testing import check_grads
from minidiff.core.tracer import NUMPY_FUNCTIONS, Tracer
from minidiff.errors.other_libraries import suggestions
from minidiff.numpy import replaced
from minidiff.numpy.dispatch import reduce, unsupported_error
from minidiff.numpy.functions import CREATION, FROM_VALUES, public_callables
from tests.checks.samples import each
from tests.table import coverage

REFUSED = suggestions("numpy")["numpy"]

X = np.array([[1.0, 2.0], [3.0, 4.0]])


def on_tracer(f):
    """Run `f` on a traced value, and hand back what it is if it is no traced value itself."""
    seen = []
    md.make_tape(lambda x: seen.append(f(x)) or x)(X)
    return seen[0]


# ---------------------------------------------------------------- the namespace


def test_the_namespace_is_numpys():
    assert set(mnp.__all__) == {*np.__all__, *replaced.__all__}
    changed = {name for name in mnp.__all__ if getattr(mnp, name) is not getattr(np, name, None)}
    called = {name for name in changed if getattr(getattr(mnp, name), "__wrapped__", None) is getattr(np, name, None)}
    assert changed - called <= {*replaced.__all__, "linalg", "fft"}
    assert {name for name in dir(np.add) if not name.startswith("_")} <= set(dir(mnp.add))


@pytest.mark.parametrize(
    "f", [mnp.sin, mnp.abs, mnp.mean, mnp.linalg.norm, mnp.fft.fft, mnp.divmod], ids=lambda f: f.__name__
)
def test_functions_are_known_by_their_names(f):
    assert pickle.loads(pickle.dumps(f)) is f
    assert f.__doc__ == f.__wrapped__.__doc__


def test_functions_have_the_errors_of_numpys():
    for call in (
        lambda np: np.sin("a"),
        lambda np: np.add(X),
        lambda np: np.sum(X, axiss=0),
        lambda np: np.dot(X, "a"),
    ):
        with pytest.raises(TypeError):
            call(np)
        with pytest.raises(TypeError):
            call(mnp)
    out = np.zeros((2, 2))
    assert mnp.add(X, X, out) is out
    assert mnp.sin(X, out) is out
    np.testing.assert_array_equal(mnp.add(X, 1, where=X > 1, out=np.zeros((2, 2))), [[0, 3], [4, 5]])


#: The functions that take no argument that could be traced.
PLAIN = {
    name: group
    for group, names in {
        "creation": " ".join(CREATION),
        "files and buffers": """load loadtxt genfromtxt fromfile fromregex fromstring frombuffer memmap""",
        "printing and settings": """printoptions set_printoptions get_printoptions binary_repr base_repr info
            format_float_positional format_float_scientific errstate seterr geterr seterrcall geterrcall setbufsize
            getbufsize show_config show_runtime get_include test""",
        "dtypes": """dtype finfo iinfo isdtype issubdtype promote_types mintypecode typename ndarray ufunc""",
        "shapes": "isscalar iterable broadcast_shapes ndindex",
        "aliases, dispatched under their main name": "row_stack trapz",
        "dates": """busday_count busday_offset is_busday busdaycalendar datetime_as_string datetime_data""",
        "errors": "linalg.LinAlgError",
    }.items()
    for name in names.split()
}


def classes(name):
    """The classes of a public function; there should be exactly one."""
    f = public_callables()[name]
    result = {
        # A function that is both an operation and replaced is one that NumPy does not always dispatch.
        "operation": f in NUMPY_FUNCTIONS and name not in REFUSED,
        "replaced": name in replaced.__all__ and f not in NUMPY_FUNCTIONS,
        "from values": name in FROM_VALUES,
        "plain": name in PLAIN,
        "refused": name in REFUSED,
    }
    return [label for label, flag in result.items() if flag]


def test_every_public_function_is_in_one_class():
    result = {name: classes(name) for name in public_callables()}
    assert [name for name, labels in result.items() if not labels] == []
    assert {name: labels for name, labels in result.items() if len(labels) > 1} == {}


def test_the_classes_list_no_name_twice():
    names = [*FROM_VALUES, *PLAIN, *REFUSED]
    assert len(names) == len(set(names))


@pytest.mark.skipif(not hasattr(np, "vecmat") or hasattr(np, "in1d"), reason="newer NumPys have other names")
def test_the_table_in_the_guide_is_up_to_date():
    text = coverage.PAGE.read_text()
    assert coverage.with_table(text) == text, "python -m tests.table.coverage writes it anew"


def test_every_function_stands_in_one_line_of_the_table():
    lines = [
        re.fullmatch(r"\| \*\*(.+)\*\* `([^`]+)` \|(.*)\|", line) for line in coverage.coverage_table().splitlines()[2:]
    ]
    marks = {name: (line[1], line[3].split(" | ")) for line in lines for name in line[2].split()}
    assert len(marks) == sum(len(line[2].split()) for line in lines)
    public, shown = public_callables(), {public_callables().get(name) for name in marks}
    assert [n for n in public if {"operation", "from values"} & set(classes(n)) and public[n] not in shown] == []
    assert {name for name, (title, _) in marks.items() if "minidiff.nn" in title} <= set(md.nn.__all__)
    for name, expected in {"sin": "✓✓✓✓", "argmax": "–––✓", "unique": "✓✓✓–", "argwhere": "––––", "at": "✓✓✓✓"}.items():
        assert "".join(marks[name][1]).replace(" ", "") == expected, name


ARRAYS = [
    (lambda np_, x: np_.array([x, 2 * x]), 1.5),
    (lambda np_, x: np_.array([[x, 1.0], (0, x * x)]), 1.5),
    (lambda np_, x: np_.asarray([x[0], X[1]]), X),
    (lambda np_, x: np_.asarray(x), X),
    (lambda np_, x: np_.array([1, 2]) * x, 1.5),
    (lambda np_, x: np_.asarray(X) * x, 1.5),
    (lambda np_, x: np_.take(x, [1, 0], axis=1), X),
]


@pytest.mark.parametrize("f, x", ARRAYS)
def test_arrays_of_traced_values(f, x):
    value, tangent = md.jvp(lambda x: f(mnp, x), (x,), (x,))
    np.testing.assert_array_equal(value, f(np, x))
    step = 1e-6
    np.testing.assert_allclose(tangent, (f(np, x + step * x) - f(np, x - step * x)) / (2 * step), rtol=1e-6, atol=1e-9)


LEAVES = st.sampled_from([2, 2.5, True, 1j, np.float32(1.5), np.int8(3), "traced", "traced float32"])
LINES = st.lists(LEAVES, min_size=3, max_size=3) | st.sampled_from([np.arange(3), np.ones(3, np.float32), (1, 2.0, 3)])


@settings(max_examples=60, deadline=None)
@given(st.lists(LINES, min_size=1, max_size=3), st.booleans(), st.integers(0, 3))
def test_nested_lists_are_what_numpy_makes_of_them(nested, as_complex, ndmin):
    def build(np_, x, y):
        def value(v):
            return {"traced": x, "traced float32": y}[v] if isinstance(v, str) else v

        lines = [line if isinstance(line, np.ndarray) else [value(v) for v in line] for line in nested]
        return np_.array(lines, complex if as_complex else None, ndmin=ndmin)

    x, y = np.float64(0.5), np.float32(0.25)
    actual = md.jvp(lambda x, y: build(mnp, x, y), (x, y), (x, y))[0]
    np.testing.assert_array_equal(actual, build(np, x, y), strict=True)


def test_arrays_of_traced_values_take_a_dtype():
    value, tangent = md.jvp(lambda x: mnp.array([x, 1.0], dtype="float32"), (2.0,), (3.0,))
    assert (value.dtype, tangent.dtype, tangent.tolist()) == (np.float32, np.float32, [3.0, 0.0])
    assert mnp.asarray([1, 2], float).dtype == float
    assert on_tracer(lambda x: mnp.asarray(x) is x)


def test_plain_arrays_at_traced_indices():
    assert md.vmap(lambda i: mnp.take(X, i, axis=1).sum())(np.array([1, 0, -1])).tolist() == [6.0, 4.0, 6.0]


def test_plain_arguments_make_numpys_arrays():
    for name in ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "asarray_chkfinite"):
        np.testing.assert_array_equal(getattr(mnp, name)([1, 2.0]), getattr(np, name)([1, 2.0]), strict=True)
    for args in ((3,), (1, 4), (1, 4, 0.5), (0, 3, 1, "float32")):
        np.testing.assert_array_equal(mnp.arange(*args), np.arange(*args), strict=True)
    np.testing.assert_array_equal(mnp.full((2, 1), [3]), np.full((2, 1), [3]), strict=True)
    np.testing.assert_array_equal(mnp.r_[1:3, 0.5], np.r_[1:3, 0.5], strict=True)
    np.testing.assert_array_equal(mnp.vectorize(abs)([-1, 2]), [1, 2], strict=True)


@pytest.mark.parametrize("args", [(0.5, 4.0), (4.0, 0.2, -1.3)])
def test_traced_ends_of_arange(args):
    check_grads(mnp.arange, args)
    np.testing.assert_allclose(md.jvp(mnp.arange, args, args)[0], np.arange(*args), rtol=1e-15)
    assert md.grad(lambda x: mnp.arange(x, dtype=float).sum() * x)(2.5) == 3.0


def test_finite_arrays_are_checked_by_their_values():
    check_grads(mnp.asarray_chkfinite, (X,))
    with pytest.raises(ValueError, match="infs or NaNs"):
        md.grad(lambda x: mnp.asarray_chkfinite(x).sum())(np.array([1.0, np.inf]))


def test_vectorized_functions_may_branch_on_each_element():
    def f(x, y):
        return (x * y, 2) if x < y else (y * y, 3)

    values, _ = md.jvp(mnp.vectorize(f), (X, 2.0), (X, 1.0))
    for value, expected in zip(values, np.vectorize(f)(X, 2.0), strict=True):
        np.testing.assert_array_equal(value, expected)
    assert (
        md.grad(lambda x: mnp.vectorize(lambda k, x: x**k, excluded=["k"])(x=x, k=2).sum())(X).tolist()
        == (2 * X).tolist()
    )


# ---------------------------------------------------------------- functions that are no operations


def test_lists_are_arrays_where_numpy_says_so():
    def several(x):
        parts = np.add([1.0, 2.0], x), np.dot([[x[0], 1.0], [2.0, x[1]]], x), np.concatenate([[x[0], 1.0], x])
        return *parts, np.concatenate([[0], x, [2, x[1], 3]])

    for actual, expected in zip(md.jvp(several, (X[0],), (X[0],))[0], several(X[0]), strict=True):
        np.testing.assert_array_equal(actual, expected, strict=True)


def test_some_functions_answer_from_the_values_behind():
    def facts(x):
        histogram = np.histogram2d(x[0], x[1], bins=2)
        return np.array2string(x), np.array_repr(x), np.unravel_index(np.argmax(x), x.shape), *histogram

    seen = []
    md.grad(lambda x: seen.extend(facts(x)) or x.sum())(X)
    np.testing.assert_equal(seen, list(facts(X)))


# ---------------------------------------------------------------- methods and keywords of ufuncs


DTYPES = [np.bool_, np.int8, np.uint32, np.float16, np.float32, np.complex64]
BINARY = [f for f in NUMPY_FUNCTIONS if isinstance(f, np.ufunc) and (f.nin, f.nout, f.signature) == (2, 1, None)]
BINARY = [f for f in BINARY if f in vars(np).values()]  # those of SciPy have no methods


def assert_equal_but_for_rounding(actual, expected):
    eps = np.finfo(expected.dtype).eps if expected.dtype.kind in "fc" else 0
    np.testing.assert_allclose(actual, expected, rtol=8 * eps, strict=True)


@each("ufunc", sorted(BINARY, key=lambda f: f.__name__))
@each("method", ["reduce", "accumulate"])
@each("asked", [None, np.int8, np.float32])
def test_methods_of_ufuncs_have_numpys_dtypes(ufunc, method, asked):
    def f(x):
        return getattr(ufunc, method)(x, 0, asked)

    for x in [np.ones((n, 2), dtype) for n in (1, 2) for dtype in DTYPES]:
        try:
            expected = f(x)
        except TypeError:  # NumPy's own
            continue
        if ufunc is not np.ldexp:  # which takes what it returns for no exponent
            assert_equal_but_for_rounding(md.make_tape(f)(x)(x)[0], expected)


@pytest.mark.parametrize("asked", [np.bool_, np.int8, np.uint32, np.float32])
def test_means_have_the_dtype_asked_for(asked):
    for x in (np.array([[1.75, 2.5], [3.5, 7.0]]), np.array([[0, 1], [0, 4]], np.uint8)):
        for axis in (None, 0, (0, 1)):
            (actual,) = md.make_tape(lambda x, axis=axis: np.mean(x, axis, asked))(x)(x)
            np.testing.assert_array_equal(np.asarray(actual), np.asarray(np.mean(x, axis, asked)), strict=True)


@pytest.mark.parametrize("axis, keepdims", [(0, False), (-1, True), (None, False), ((0, 1), True)])
def test_logaddexp_reduces_without_overflow(axis, keepdims):
    def f(x):
        return reduce(np.logaddexp, x, axis, keepdims=keepdims)

    np.testing.assert_allclose(md.jvp(f, (X,), (X,))[0], np.logaddexp.reduce(X, axis, keepdims=keepdims))
    np.testing.assert_allclose(f(1000 * X), np.logaddexp.reduce(1000 * X, axis, keepdims=keepdims))
    check_grads(f, (X,))


def test_ufuncs_compute_in_the_dtype_asked_for():
    for dtype, x in ((np.float32, X), (float, np.float32(X)), (complex, X)):
        value = md.jvp(lambda x, d=dtype: np.multiply(x, 3.5, dtype=d, casting="same_kind"), (x,), (x,))[0]
        np.testing.assert_array_equal(value, np.multiply(x, 3.5, dtype=dtype), strict=True)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (3, 3)])
def test_points_of_an_integral_may_have_more_axes(shape):
    f = lambda y: np.trapezoid(y, np.arange(9.0)[: np.prod(shape)].reshape(shape) ** 2)  # noqa: E731
    y = np.array([1.0, 2.0, 4.0])
    np.testing.assert_array_equal(md.make_tape(f)(y)(y)[0], f(y), strict=True)


@each("ufunc", [np.hypot, np.gcd, np.bitwise_and, np.copysign, np.logaddexp])
@each("shape", [(), (1,), (1, 2), (3,)])
def test_reductions_begin_with_the_identity(ufunc, shape):
    x = np.full(shape, -7)
    assert_equal_but_for_rounding(md.make_tape(lambda x: ufunc.reduce(x))(x)(x)[0], ufunc.reduce(x))


@pytest.mark.parametrize("method", ["reduce", "accumulate", "reduceat"])
def test_methods_of_ufuncs_take_a_dtype(method):
    def f(x):
        return getattr(np.subtract, method)(x, *([[0, 1]] if method == "reduceat" else []), dtype=np.float32)

    np.testing.assert_array_equal(md.jvp(f, (X,), (X,))[0], f(X), strict=True)


# ---------------------------------------------------------------- the protocol

OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.mod, operator.floordiv]
OPERATORS += [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@each("other", [2, 2.5, np.float64(2.5), np.float32(2), np.array(3.0), X], ids=repr)
@each("op", OPERATORS, ids=lambda f: f.__name__)
def test_operators_with_whatever_is_on_the_other_side(op, other):
    def both(x):
        return op(x, other), op(other, x)

    tape = md.make_tape(both)(X)
    for actual, expected in zip(tape(X), both(X), strict=True):
        assert md.typeof(actual) == md.typeof(expected)
        np.testing.assert_array_equal(actual, expected)


ALIASES = {"abs": X, "mod": X, "true_divide": X, "concat": X, "permute_dims": X, "pow": X}


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_are_the_functions_they_name(name):
    assert getattr(np, name) in NUMPY_FUNCTIONS


def test_code_written_for_numpy_is_differentiated_as_it_stands():
    def softmax_loss(logits, label):
        shifted = logits - np.max(logits, axis=-1, keepdims=True)
        return -(shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True)))[np.arange(2), label].mean()

    p = np.exp(X) / np.exp(X).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(md.grad(softmax_loss)(X, np.array([1, 0])), (p - np.array([[0, 1], [1, 0]])) / 2)


def test_constants_of_integers_promote_as_in_numpy():
    x = np.ones(3, np.float32)
    _, pullback = md.vjp(lambda x: x * np.arange(3), x)
    assert md.jvp(lambda x: x * np.arange(3), (x,), (x,))[1].dtype == np.float64
    assert pullback(np.ones(3))[0].dtype == np.float32


SUPPORTED = "not supported on traced values (f64[2,2])"

ERRORS = {
    "asarray": (np.asarray, md.TracerError, "value (f64[2,2]) cannot become a plain NumPy array: its derivative would"),
    "array of a list": (lambda x: np.array([x[0, 0], 1.0]), TypeError, "to build an array out of traced values, use"),
    "sum of a list": (
        lambda x: np.sum([x, x]),
        TypeError,
        "to build an array out of traced values, use minidiff.numpy",
    ),
    "uneven lists": (lambda x: mnp.array([x, x[0]]), ValueError, "must have one shape, got (2, 2) and (2,)"),
    "writing a row": (lambda x: np.zeros((2, 2)).__setitem__(0, x[0]), TypeError, "cannot become a plain NumPy array"),
    "no function of numbers": (lambda x: np.busday_offset(x, 1), TypeError, f"np.busday_offset is {SUPPORTED}"),
    "values on a tape": (
        np.array_str,
        md.TracerError,
        "np.array_str needs a concrete value, but on this",
    ),
    "weights": (lambda x: np.histogram2d([0], [1], weights=x[0]), TypeError, "np.histogram2d on traced values has no"),
    "keyword": (
        lambda x: np.moveaxis(x, 0, 1, order="C"),
        TypeError,
        "moveaxis() got an unexpected keyword argument 'order'",
    ),
    "keyword of tracers": (
        lambda x: np.expand_dims(x, 0, out=np.ones(1)),
        TypeError,
        "got an unexpected keyword argument 'out'",
    ),
    "order": (
        lambda x: np.argmax(x, 0, keepdims=np.True_, foo=1),
        TypeError,
        "argmax() got an unexpected keyword argument 'foo'",
    ),
    "signature of a ufunc": (
        lambda x: np.sin(x, signature="d->d"),
        TypeError,
        "np.sin on traced values: got an unexpected keyword argument 'signature'; it takes np.sin(",
    ),
    "cast": (lambda x: np.add(x, 1, dtype=int), TypeError, "Cannot cast ufunc 'add' input"),
    "operands": (lambda x: np.add.__call__(x), TypeError, "add() takes from 2 to 3 positional arguments but 1"),
    "reduce of one": (lambda x: np.sin.reduce(x), ValueError, "reduce only supported for binary functions"),
    "keyword of reduce": (lambda x: np.add.reduce(x, foo=1), TypeError, "unexpected keyword argument 'foo'"),
    "order of reduce": (lambda x: np.subtract.reduce(x, (0, 1)), ValueError, "subtract.reduce: the order matters"),
    "nothing": (
        lambda x: np.divide.reduce(x[:0], initial=None),
        ValueError,
        "is empty along 0, and there is no identity",
    ),
    "mask": (lambda x: np.divide.reduce(x, where=X > 1), ValueError, "no identity, so where= needs initial="),
    "reduceat": (
        lambda x: np.add.reduceat(x, [2]),
        IndexError,
        "add.reduceat: index 2 is out of bounds for an axis of",
    ),
    "vectorize": (
        lambda x: mnp.vectorize(np.sum, signature="(n)->()")(x),
        TypeError,
        "np.vectorize with a signature does not take traced values; use md.vmap",
    ),
    "vectorize nothing": (lambda x: mnp.vectorize(abs)(x[:0]), ValueError, "a traced value has size 0"),
}


@each("case", ERRORS)
def test_errors_say_what_is_not_possible(case):
    f, error, message = ERRORS[case]
    with pytest.raises(error, match=re.escape(message)) as caught:
        on_tracer(f)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", [n for n in REFUSED if isinstance(public_callables().get(n), type(np.sum))])
def test_what_is_refused_says_what_to_use_instead(name):
    arguments = {"copyto": (X,), "putmask": (X, X), "place": (X, X), "put": (X, 0), "put_along_axis": (X, [[0]])}
    f = public_callables()[name]
    last = {"put_along_axis": (0,), "fill_diagonal": (0,)}.get(name, ())
    with pytest.raises(TypeError, match=re.escape(f"np.{name} is not supported on traced values")) as error:
        on_tracer(lambda x: f(*arguments.get(name, ("file",) if "sav" in name else ()), x, *last))
    assert REFUSED[name] in str(error.value)


def test_what_is_not_there_names_what_is_named_alike():
    def expand_dim():
        pass

    assert str(unsupported_error(expand_dim, ())).endswith(
        "not supported on traced values. Did you mean 'np.expand_dims'?"
    )
    assert str(unsupported_error(np.is_busday, ())).endswith("not supported on traced values")  # nothing is alike


def test_arguments_with_numpys_defaults_are_no_others():
    value, _ = md.jvp(lambda x: np.add.reduce(x, 0, None, None, True), (X,), (X,))
    np.testing.assert_array_equal(value, np.add.reduce(X, 0, keepdims=True))
    assert on_tracer(lambda x: np.moveaxis(x, source=0, destination=1)).shape == (2, 2)
    assert on_tracer(lambda x: np.sum(x, dtype=None, out=None, initial=np._NoValue)).shape == ()


def test_errors_of_the_function_itself_are_not_explained_away():
    def f(x):
        raise TypeError("got an unexpected keyword argument of its own")

    with pytest.raises(TypeError, match="of its own"):
        on_tracer(lambda x: mnp.vectorize(f)(x))


def test_arrays_leave_operators_to_traced_values():
    results = on_tracer(lambda x: [np.ones(2) * x, np.float64(2) * x, np.ones((2, 2)) @ x, np.less(X, x)])
    assert all(isinstance(y, Tracer) for y in results)


# ---------------------------------------------------------------- conversions to plain numbers and arrays


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.bool_])
def test_whole_numbers_are_converted_where_there_is_a_value(kind):
    seen = []
    md.grad(lambda x: seen.append((kind(x), kind(x[0, 0]), np.asarray(x, kind))) or x.sum())(X)
    for actual, expected in zip(seen[0], (kind(X), kind(X[0, 0]), np.asarray(X, kind)), strict=True):
        np.testing.assert_array_equal(actual, expected, strict=True)


@each("around", [lambda f: md.jit(f), lambda f: md.vmap(f), lambda f: md.make_tape(f)])
@each("kind", [np.int64, np.bool_, np.float32, np.complex128])
def test_conversions_of_names_say_how_to_convert(kind, around):
    with pytest.raises(
        md.TracerError, match=rf"plain NumPy array of dtype .* write x\.astype\('{np.dtype(kind).name}'\)"
    ):
        around(lambda x: kind(x))(X)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.complex64, object])
def test_conversions_that_lose_a_derivative_say_how_to_convert(kind):
    with pytest.raises(md.TracerError, match=r"derivative would be lost. .* write x\.astype\("):
        md.grad(lambda x: np.asarray(x, kind).sum())(X)
    if kind is not object:
        with pytest.raises(md.TracerError, match=r"derivative would be lost. .* write x\.astype\("):
            md.jvp(lambda x: kind(x[0, 0]), (X,), (X,))


@pytest.mark.parametrize("kind", [float, complex])
def test_numbers_that_lose_a_derivative_are_taken_by_item(kind):
    with pytest.raises(
        md.TracerError,
        match=rf"{kind.__name__}\(\) of .* would lose its derivative.* take md\.stop_gradient\(x\)\.item\(\);",
    ):
        md.grad(lambda x: kind(x[0, 0]))(X)
    with pytest.raises(md.TracerError, match=r"take md\.stop_gradient\(x\)\.tolist\(\)"):
        md.grad(lambda x: kind(x))(X)
    with pytest.raises(md.TracerError, match=rf"{kind.__name__}\(\) needs a concrete value, .* name"):
        md.jit(md.grad(lambda x: kind(x[0, 0])))(X)  # there .item() would be no help


# ---------------------------------------------------------------- operands of classes that decide for themselves


class Labeled:
    """An array with labels, as xarray's: it has a `__array_ufunc__`, and operators that call it."""

    def __init__(self, data):
        self.data = data

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return Labeled(getattr(ufunc, method)(*[x.data if isinstance(x, Labeled) else x for x in inputs], **kwargs))


class Opaque:
    """A class that takes no part in ufuncs."""

    __array_ufunc__ = None

    def __init__(self, data):
        self.data = data


class Prior:
    """A class that goes before arrays, and before traced values."""

    __array_priority__ = 2000

    def __init__(self, data):
        self.data = data


def _reflected(cls, op):
    """The class's own result of `op(x, it)`."""
    return lambda self, x: cls(op(x, self.data))


for _cls in (Labeled, Opaque, Prior):
    for _op in (
        operator.add,
        operator.sub,
        operator.mul,
        operator.truediv,
        operator.pow,
        operator.mod,
        operator.matmul,
    ):
        setattr(_cls, f"__r{_op.__name__}__", _reflected(_cls, _op))
    _cls.__rfloordiv__, _cls.__rdivmod__ = _reflected(_cls, operator.floordiv), _reflected(_cls, divmod)
    _cls.__gt__, _cls.__eq__ = _reflected(_cls, operator.lt), _reflected(_cls, operator.eq)

DEFERRED = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.mod, operator.matmul]
DEFERRED += [operator.floordiv, divmod, operator.lt, operator.eq]


@each("x", [X, 2.0], ids=["array", "number"])
@each("around", [lambda f: md.grad(f), lambda f: md.jit(f), lambda f: md.grad(md.checkpoint(f))])
@each("cls", [Labeled, Opaque, Prior])
def test_operators_are_left_to_classes_that_numpy_leaves_them_to(cls, around, x):
    for op in DEFERRED:
        if op in (operator.matmul, divmod) and x is not X:
            continue
        seen = []
        around(lambda x, op=op, seen=seen: seen.append(op(x, cls(X))) or np.sum(x))(x)
        assert type(seen[0]) is cls, op


def test_ufuncs_are_left_to_classes_that_have_their_own():
    def f(x):
        for namespace in (np, mnp):
            for y in (
                namespace.multiply(x, Labeled(X)),
                namespace.hypot(Labeled(X), x),
                namespace.add(x, Labeled(X), dtype=float),
                namespace.multiply.outer(x, Labeled(X)),
            ):
                assert type(y) is Labeled
                assert isinstance(y.data, Tracer)
        return namespace.multiply(x, Labeled(X)).data.sum()

    np.testing.assert_array_equal(md.grad(f)(X), X)
    with pytest.raises(TypeError, match="does not support ufuncs"):
        md.grad(lambda x: mnp.multiply(x, Opaque(X)).sum())(X)


def test_the_examples_of_the_namespace():
    (examples,) = doctest.DocTestFinder(recurse=False).find(mnp)
    assert examples.examples and doctest.DocTestRunner().run(examples).failed == 0


def test_the_namespace_says_what_it_implements():
    assert mnp.__version__ == np.__version__
    for name in {"__array_api_version__", "__array_namespace_info__"} & vars(np).keys():  # since NumPy 2.1
        assert getattr(mnp, name) is getattr(np, name)
    with pytest.raises(AttributeError):
        mnp.__array_api__  # noqa: B018
