"""Where a run's numbers go."""
