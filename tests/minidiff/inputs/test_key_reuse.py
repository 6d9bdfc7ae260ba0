"""A key that is used twice is a warning at the user's line, under every transformation; `key_reuse.md` shows some."""

import linecache
import warnings

from minidiff import random
from tests.checks.samples import each
from tests.programs.key import check, transformations


@each("name", transformations("simulated"))
def test_transformations(name):
    check("simulated", name)


def test_the_warning_is_at_the_second_line_and_names_the_first():
    key = random.key(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # which shows a warning of a line once
        random.split(key)
        for _ in range(5):
            random.normal(key)  # the second line
    (warning,) = caught
    assert linecache.getline(warning.filename, warning.lineno).strip().endswith("# the second line")
    first = f"test_key_reuse.py:{warning.lineno - 2}: random.split(key)"
    assert str(warning.message).startswith(f"normal uses a key again: split used it at {first}. ")
