"""Basics for all packages: errors, files, messages, seeding, config files, state dicts."""
