"""Tools to run, tune and compare many experiments, to draw and report their results, and to watch or export one run."""
