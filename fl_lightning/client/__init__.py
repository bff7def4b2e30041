"""A client: its module and loss terms, what clients share, their optimizers."""
