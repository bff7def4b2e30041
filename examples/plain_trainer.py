"""Train a FedSKC client with a plain Lightning Trainer, without a server or an orchestrator.

The client trains, computes its knowledge of each class, and trains again with this knowledge as contrastive targets.

    python examples/plain_trainer.py
"""

from functools import partial

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.algorithms import FedSKC
from fl_lightning.data import Digits
from fl_lightning.models import MLP


def trainer() -> L.Trainer:
    """Return a trainer for ten epochs on the CPU that writes no files."""
    return L.Trainer(
        max_epochs=10,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> float:
    """Train twice, the second time with LCL. Return the test accuracy."""
    L.seed_everything(0, verbose=False)
    digits = Digits().load()
    train = DataLoader(TensorDataset(digits.x_train, digits.y_train), batch_size=32, shuffle=True)
    test = DataLoader(TensorDataset(digits.x_test, digits.y_test), batch_size=256)

    backbone = MLP(in_shape=(1, 8, 8), num_classes=10)
    module = FedSKC(tau=0.5).client_module(backbone, optimizer=partial(torch.optim.SGD, lr=0.1))
    trainer().fit(module, train)
    print("without knowledge:", {name: round(value, 3) for name, value in module.train_losses().items()})

    (knowledge,) = module.knowledge
    with torch.no_grad():
        knowledge.load(knowledge.summarize(module.eval(), train, num_classes=10))
    trainer().fit(module.train(), train)
    print("with knowledge:   ", {name: round(value, 3) for name, value in module.train_losses().items()})

    (result,) = trainer().test(module, test, verbose=False)
    print(f"test accuracy {result['test_acc']:.3f}")
    return result["test_acc"]


if __name__ == "__main__":
    main()
