"""Algorithms without a server: clients collect models from their peers and average them."""
