"""Algorithms with a personalised model for each client, evaluated on the client's own test split."""
