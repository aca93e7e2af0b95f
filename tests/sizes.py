"""Which cases of a test run by default, and constants of the fast paths for a test."""

import dataclasses

import pytest

from numpyro_dgp.math import tuning


def mostly_long(few, values):
    """Parameters of a test, of which only ``few`` run by default and the others with the long tests."""
    return [value if value in few else pytest.param(value, marks=pytest.mark.long) for value in values]


def tune(monkeypatch, **changes):
    """Set constants of the fast paths of the platform in use, to take the way of large data with small ones."""
    name = "CPU" if tuning.tuned() is tuning.CPU else "ACCELERATOR"
    monkeypatch.setattr(tuning, name, dataclasses.replace(tuning.tuned(), **changes))
