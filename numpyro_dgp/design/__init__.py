"""Surrogates of simulators: where to look next, designs, and what the function depends on (``dgp.design``)."""

__all__: list[str] = []
