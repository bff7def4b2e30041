"""Many runs: comparison, report, sweeps, tables of papers; also `watch` and `export`."""
