"""The command line `fl-lightning`: commands, options, help and error messages."""
