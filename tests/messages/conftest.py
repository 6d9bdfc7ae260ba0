"""Pages of messages run with the names that they share."""

import pytest

from tests.messages.names import names


@pytest.fixture
def doctest_namespace():
    """Names for the pages here alone: pytest's fixture is one dictionary for all doctests of a session."""
    return names()
