"""What a prediction computes, compiled programs for it, and the rows that these take at a time."""
