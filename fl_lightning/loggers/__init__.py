"""Metrics files and loggers of a run."""
