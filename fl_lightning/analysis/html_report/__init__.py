"""Tables and figures of a run and of a scenario."""
