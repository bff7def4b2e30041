"""What every room needs: errors, files, messages, seeding, config files, state dicts, names."""
