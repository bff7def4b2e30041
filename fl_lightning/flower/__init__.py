"""A client's own machine in a federation on Flower: its data, its state, and its answers to the server."""
