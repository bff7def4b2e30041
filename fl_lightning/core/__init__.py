"""What every room uses: errors, files, messages, seeding, config files, state dicts, renamed options."""
