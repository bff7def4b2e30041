"""A model for each group of clients that are alike; who belongs together is found out on the way."""
