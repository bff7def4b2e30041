"""What is measured: accuracy and loss, torchmetrics by name, a run's history and summary."""
