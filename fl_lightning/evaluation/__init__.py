"""Evaluation: accuracy and loss, torchmetrics by name, and summaries of runs."""
