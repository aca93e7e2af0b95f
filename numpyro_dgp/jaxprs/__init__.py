"""What a traced function depends on, read off its jaxpr."""
