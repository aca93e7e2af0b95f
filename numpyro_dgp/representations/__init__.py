"""How a function is represented: by values at inducing points, on a regular grid, or exactly. One file each."""
