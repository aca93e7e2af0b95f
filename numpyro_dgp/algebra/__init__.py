"""Functions of arrays: linear algebra, Gaussian densities, quadrature, derivatives, analysis of jaxprs."""
