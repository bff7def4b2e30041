"""Use FedSKC's contrastive loss (LCL) in any LightningModule.

FedProx's term, which needs the weights before training, is prepared in `on_fit_start`.

Run it with `python examples/loss_term_elsewhere.py`.
"""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import ClientModule, Step
from fl_lightning.algorithms import LocalContrastive, Proximal
from fl_lightning.data import Digits


class Classifier(L.LightningModule):
    """A LightningModule without federated learning, with two additional loss terms."""

    def __init__(self, class_logits: torch.Tensor) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.lcl = LocalContrastive(tau=0.5)
        self.lcl.load(class_logits, known=torch.ones(10, dtype=torch.bool))
        self.proximal = Proximal(mu=0.01)

    def on_fit_start(self):
        """Let the proximal term store the weights before training."""
        self.proximal.begin(ClientModule(self.net))

    def training_step(self, batch, batch_idx):
        """Return the cross-entropy plus LCL and the proximal term."""
        x, y = batch
        logits = self.net(x)
        step = Step(logits=logits, targets=y, backbone=self.net)
        return F.cross_entropy(logits, y) + self.lcl(step) + self.proximal(step)

    def configure_optimizers(self):
        """Return the SGD optimizer."""
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def main() -> float:
    """Train with one-hot vectors as shared knowledge. Return the test accuracy."""
    L.seed_everything(0, verbose=False)
    digits = Digits().load()
    module = Classifier(class_logits=10 * torch.eye(10))
    trainer = L.Trainer(
        max_epochs=10,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(digits.x_train, digits.y_train), batch_size=32, shuffle=True))
    accuracy = float((module.net(digits.x_test).argmax(dim=1) == digits.y_test).float().mean())
    print(f"test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
