"""Differential privacy: the epsilon of noisy rounds and steps."""
