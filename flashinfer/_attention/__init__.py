"""What the attention wrappers share."""
