"""Pages of messages run with the names that they share."""

import pytest

from tests.messages.names import names


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace.update(names())
