"""Loggers of a run, and its files of metrics and warnings."""
