"""Random functions, the representations that they are drawn with, and their values."""
