"""Tools for many runs: comparison, report, sweeps, tables of papers; for a single run: `watch` and `export`."""
