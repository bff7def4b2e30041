"""Algorithms with one global model, evaluated on the global test set."""
