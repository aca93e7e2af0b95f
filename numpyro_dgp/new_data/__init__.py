"""A fitted program that gets new data, without those of the fit."""
