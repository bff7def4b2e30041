"""A client's trainer: as quick to make as it can be, and nothing of that is left when it is done."""

import lightning as L
import pytest
import torch
from lightning.fabric.utilities import registry

from fl_lightning.engines import trainer as trainers
from fl_lightning.engines.trainer import lightning_at_ease, quiet_trainer


def test_plugins_and_gpus_are_looked_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(trainers, "_entry_points", lambda group: asked.append(group) or ())
    monkeypatch.setattr(trainers, "_device_count", lambda: asked.append("GPUs") or 0)
    monkeypatch.setattr(registry, "entry_points", lambda group: pytest.fail("looked for plugins"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("counted GPUs"))
    quiet_trainer({"accelerator": "cpu"})
    assert "lightning.pytorch.callbacks_factory" in asked


def test_what_was_remembered_is_what_would_be_found():
    assert set(trainers._entry_points(group="console_scripts")) == set(registry.entry_points(group="console_scripts"))
    assert trainers._device_count() == torch.cuda.device_count()


def test_other_trainers_look_for_themselves_again():
    before = registry.entry_points, torch.cuda.device_count

    def broken():
        with lightning_at_ease():
            assert registry.entry_points is not before[0]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        broken()
    assert (registry.entry_points, torch.cuda.device_count) == before


def test_callbacks_of_other_packages_are_still_added(monkeypatch):
    class Plugin:
        name = "theirs"

        def load(self):
            return lambda: [L.Callback()]

    monkeypatch.setattr(trainers, "_entry_points", lambda group: [Plugin()])
    ours = [quiet_trainer({"accelerator": "cpu"}).callbacks for _ in range(2)]
    own = [next(c for c in callbacks if type(c) is L.Callback) for callbacks in ours]
    assert own[0] is not own[1]


@pytest.mark.parametrize(
    ("options", "epochs", "steps"),
    [({}, 1, -1), ({"max_steps": 3}, -1, 3), ({"max_epochs": 2}, 2, -1), ({"max_epochs": 2, "max_steps": 3}, 2, 3)],
)
def test_local_work_is_one_epoch_unless_told_otherwise(options, epochs, steps):
    trainer = quiet_trainer({"accelerator": "cpu", **options})
    assert (trainer.max_epochs, trainer.max_steps) == (epochs, steps)
