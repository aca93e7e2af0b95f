"""How a function is held: by values at inducing points, on a regular grid, or exactly. One file each."""
