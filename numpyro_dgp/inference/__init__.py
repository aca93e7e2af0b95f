"""What is done with a program: bounds, fits, streams, chains."""
