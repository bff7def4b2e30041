"""Tools for many runs: comparison, HTML report, sweeps, papers' tables; and for one run: `watch` and `export`."""
