"""Rules: from a latent site of the program to its variational distribution. One family a file."""
