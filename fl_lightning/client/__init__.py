"""What runs on a client: the LightningModule, loss terms, shared knowledge, optimizers and weights."""
