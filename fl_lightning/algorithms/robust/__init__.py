"""Robust aggregation: rules that take the place of the mean and tolerate clients that send wrong models."""
