"""Linear algebra, Gaussians and quadrature: arrays in, arrays out."""
