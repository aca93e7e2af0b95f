"""A source of minibatches: rows of arrays in memory, with replacement."""

import numpy as np


class Rows:
    """``size`` rows drawn anew in every step, a pure function of the step."""

    def __init__(self, *arrays, size):
        self.arrays, self.size = arrays, size

    @property
    def num_rows(self):
        return len(self.arrays[0])

    def batch(self, step):
        rows = np.random.default_rng(step).integers(self.num_rows, size=self.size)
        return tuple(a[rows] for a in self.arrays)
