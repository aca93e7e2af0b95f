"""What a program is made of: random functions, their values, likelihoods, and what a trace of it tells."""
