"""Programs for MCMC, and samplers."""
