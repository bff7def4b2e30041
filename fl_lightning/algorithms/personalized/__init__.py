"""A model for each client, made with the others' help: judged by each on its own test split."""
