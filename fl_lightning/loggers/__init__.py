"""Loggers for federated runs: CSV, TensorBoard, MLflow and Weights & Biases."""
