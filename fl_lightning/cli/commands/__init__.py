"""The commands of `fl-lightning`, a file each: `parser()` says what it takes, `main(given, parser)` does it."""
