"""Arrays in, arrays out: the linear algebra, densities, quadrature and differentiation under everything else."""
