"""Evaluation: accuracy and loss, torchmetrics by name, history and summary of a run."""
