"""The namespace `minidiff.numpy`: every public function of NumPy's is in one class, and in the guide's table."""

import re

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
from minidiff.core.tracer import NUMPY_FUNCTIONS
from minidiff.errors.other_libraries import suggestions
from minidiff.numpy import replaced
from minidiff.numpy.functions import CREATION, FROM_VALUES, public_callables
from tests.checks.samples import each
from tests.table import coverage

REFUSED = suggestions("numpy")["numpy"]
X = np.array([[1.0, 2.0], [3.0, 4.0]])


def test_the_namespace_is_numpys():
    assert set(mnp.__all__) == {*np.__all__, *replaced.__all__}
    changed = {name for name in mnp.__all__ if getattr(mnp, name) is not getattr(np, name, None)}
    called = {name for name in changed if getattr(getattr(mnp, name), "__wrapped__", None) is getattr(np, name, None)}
    assert changed - called <= {*replaced.__all__, "linalg", "fft"}
    assert {name for name in dir(np.add) if not name.startswith("_")} <= set(dir(mnp.add))
    for name in {"__array_api_version__", "__array_namespace_info__"} & vars(np).keys():  # since NumPy 2.1
        assert getattr(mnp, name) is getattr(np, name)


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
    assert {name: labels for name in public_callables() if len(labels := classes(name)) != 1} == {}
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


@each("name", [n for n in REFUSED if isinstance(public_callables().get(n), type(np.sum))])
def test_what_is_refused_says_what_to_use_instead(name):
    arguments = {"copyto": (X,), "putmask": (X, X), "place": (X, X), "put": (X, 0), "put_along_axis": (X, [[0]])}
    last = {"put_along_axis": (0,), "fill_diagonal": (0,)}.get(name, ())
    before = arguments.get(name, ("file",) if "sav" in name else ())
    with pytest.raises(TypeError, match=re.escape(REFUSED[name])):
        md.make_tape(lambda x: public_callables()[name](*before, x, *last))(X)
