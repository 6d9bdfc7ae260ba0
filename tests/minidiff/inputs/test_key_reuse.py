"""A key that is used twice is a warning at the user's line; `key_reuse.md` and `keys_in_programs.md` show programs."""

import linecache
import warnings

from minidiff import random


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
