"""Which cases of a test run by default."""

import pytest


def mostly_slow(few, values):
    """Parameters of a test, of which only ``few`` run by default and the others with the slow tests."""
    return [value if value in few else pytest.param(value, marks=pytest.mark.slow) for value in values]
