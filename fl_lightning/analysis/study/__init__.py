"""Studies: settings x seeds x a rule that proposes the next settings. Used by four commands, such as `sweep`."""
