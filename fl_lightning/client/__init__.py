"""Code that runs on clients: the LightningModule, loss terms, shared knowledge, optimizers and weights."""
