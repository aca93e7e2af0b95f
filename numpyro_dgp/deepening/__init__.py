"""The start of a deeper program at the fit of a shallower one."""
