"""How many steps a client's training has: as many as Lightning takes and announces under the same limits."""

from itertools import product

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from fl_lightning.client.local_work import LocalWork
from fl_lightning.engines.trainer import quiet_lightning, quiet_trainer


class Counting(L.LightningModule):
    """Counts the optimizer steps of each epoch."""

    def __init__(self):
        super().__init__()
        self.layer, self.steps, self.announced = torch.nn.Linear(1, 1), [], None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self):
        self.announced = self.trainer.estimated_stepping_batches

    def on_train_epoch_start(self):
        self.steps.append(0)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def optimizer_step(self, *args, **options):
        self.steps[-1] += 1
        super().optimizer_step(*args, **options)


@pytest.mark.parametrize(("limit", "accumulate"), [*product((1.0, 0.5, 3, 100), (1, 2))])
def test_the_number_of_steps_is_that_of_lightning(limit, accumulate):
    for epochs, steps in [(1, -1), (2, -1), (None, 7), (-1, 7), (3, 7), (1, 100)]:
        options = {"limit_train_batches": limit, "accumulate_grad_batches": accumulate}
        trainer = quiet_trainer({"accelerator": "cpu", "max_epochs": epochs, "max_steps": steps} | options)
        work, module = LocalWork.under(trainer, 5), Counting()
        with quiet_lightning():
            trainer.fit(module, DataLoader(torch.ones(5, 1)))
        assert [work.steps_in(epoch) for epoch in range(work.epochs)] == module.steps
        assert work.steps == module.announced == sum(module.steps)
        assert work.steps_in(work.epochs) == 0
