"""Client side: the LightningModule, loss terms, shared knowledge, optimizers and weights."""
