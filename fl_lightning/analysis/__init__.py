"""Tools for many runs: comparison, figures, HTML report, sweeps, papers' tables; for one run: `watch` and `export`."""
