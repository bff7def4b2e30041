"""Many runs: comparison, report, sweeps, tables of papers, export."""
