"""Algorithms with one model for each cluster of similar clients. The clusters are found during training."""
