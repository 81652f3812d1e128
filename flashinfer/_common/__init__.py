"""What several families of operations share."""
