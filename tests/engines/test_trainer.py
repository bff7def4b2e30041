"""A client's trainer: as quick to make as it can be, and nothing of that is left when it is done."""

import logging
import warnings
from functools import partial

import pytest
import torch
from experiments import ONE_EPOCH, experiment
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from fl_lightning.algorithms import FedAvg, FedBABU
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.engines import AutoEngine, ProcessesEngine, SequentialEngine, StackedEngine
from fl_lightning.engines.trainer import quiet_lightning, quiet_trainer


@pytest.mark.parametrize(
    ("options", "epochs", "steps"),
    [({}, 1, -1), ({"max_steps": 3}, -1, 3), ({"max_epochs": 2}, 2, -1), ({"max_epochs": 2, "max_steps": 3}, 2, 3)],
)
def test_local_work_is_one_epoch_unless_told_otherwise(options, epochs, steps):
    trainer = quiet_trainer({"accelerator": "cpu", **options})
    assert (trainer.max_epochs, trainer.max_steps) == (epochs, steps)


# --- What Lightning prints ---

CHATTER = [
    "GPU available but not used. You can set it by doing `Trainer(accelerator='gpu')`.",
    "TPU available but not used. You can set it by doing `Trainer(accelerator='tpu')`.",
    "The 'train_dataloader' does not have many workers which may be a bottleneck.",
    "You defined a `validation_step` but have no `val_dataloader`. Skipping val loop.",
    "Found 12 module(s) in eval mode at the start of training.",
    "`isinstance(treespec, LeafSpec)` is deprecated",
    "You passed `Trainer(accelerator='cpu', precision='16-mixed')` but AMP with fp16 is not supported on CPU.",
    "`precision=bf16` is supported for historical reasons but its usage is discouraged.",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.",
]


class Saying(LossTerm):
    """Has Lightning warn, and log, at the start of each fit."""

    def __init__(self, *texts):
        super().__init__()
        self.texts = texts

    def begin_epoch(self, module):
        for text in self.texts:
            rank_zero_warn(text)
        rank_zero_info("`Trainer.fit` stopped: something")
        logging.getLogger("lightning.pytorch.utilities.rank_zero").warning("a node is %s", "gone")

    def forward(self, step):
        return step.logits.sum() * 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "engine",
    [
        SequentialEngine,
        partial(SequentialEngine, local_loop=False),
        StackedEngine,
        partial(ProcessesEngine, 2),
        partial(AutoEngine, 1),
    ],
    ids=["shared", "alone", "stacked", "processes", "auto"],
)
def test_what_nobody_knows_yet_is_shown_once_a_run(tmp_path, engine, caplog, capfd):
    for name in ("one", "other"):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            term = Saying("the maths have changed", *CHATTER)
            experiment(tmp_path / name, FedAvg(loss_terms=[term]), engine=engine(), rounds=2).fit()
        assert sorted(str(one.message) for one in shown) == ["a node is gone", "the maths have changed"]
    assert not caplog.records
    assert "stopped" not in "".join(capfd.readouterr())


def test_a_warning_that_is_an_error_is_one_in_a_fit(tmp_path):
    with pytest.raises(Exception, match=r"client \d, round 1: UserWarning: the maths have changed"):
        experiment(tmp_path, FedAvg(loss_terms=[Saying("the maths have changed")])).fit()


@pytest.mark.parametrize("name", ["lightning.pytorch", "lightning.fabric"])
def test_warnings_and_loggers_are_as_before_after_a_fit(monkeypatch, name):
    logger = logging.getLogger(name)
    monkeypatch.setattr(logger, "propagate", True)

    def state():
        return warnings.showwarning, logger.handlers, logger.propagate, list(warnings.filters)

    before = state()
    with quiet_lightning():
        assert not any(one is other for one, other in zip(before, state(), strict=True))
    assert state() == before


def test_what_lightning_warns_of_when_it_builds_a_trainer_is_shown_once(tmp_path, monkeypatch):
    """On a cluster with SLURM, for instance, it warns in each: the trainer of the clients, and that of the rounds."""
    (tmp_path / "srun").touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        experiment(tmp_path / "run").fit()
    assert ["srun" in str(one.message) for one in shown] == [True]


@pytest.mark.thorough
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shared", [False, True])
def test_fits_as_they_are_warn_of_nothing(tmp_path, shared):
    experiment(tmp_path, FedBABU(tune_epochs=1), engine=SequentialEngine(local_loop=shared), rounds=1).fit()


def test_a_warning_says_that_max_epochs_ends_a_fit_before_max_steps(tmp_path):
    trainer = {"accelerator": "cpu", "max_epochs": 1, "max_steps": 100}
    with pytest.warns(UserWarning, match=r"^trainer.max_steps: 100, .*trainer.max_epochs 1 .* \d steps"):
        experiment(tmp_path, trainer=trainer).check()
    for fits in ({"max_epochs": -1}, {"max_steps": 1}, {"max_steps": -1}):  # a warning would be an error
        experiment(tmp_path, trainer=trainer | fits).check()
    experiment(tmp_path, trainer=ONE_EPOCH, batch_size=1000).fit(fast=True)  # which limits the steps to two


# --- What the environment says ---


@pytest.mark.thorough
def test_no_environment_variable_is_a_trainers_option(tmp_path, monkeypatch):
    def steps():
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            run = experiment(tmp_path / str(len(list(tmp_path.iterdir()))), rounds=1)
            run.fit()
        return run.state["model"]["head.weight"], [str(one.message) for one in shown]

    weights, told = steps()
    assert not told
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "1")
    monkeypatch.setenv("PL_TRAINER_FAST_DEV_RUN", "1")
    monkeypatch.setenv("PL_TRAINER_PRECISION", "")
    again, told = steps()
    assert torch.equal(weights, again)
    assert [line.split()[0] for line in sorted(told)] == ["PL_TRAINER_FAST_DEV_RUN", "PL_TRAINER_MAX_STEPS"]


def test_an_environment_variable_that_changes_rounding_is_reported(tmp_path, monkeypatch):
    name = "ONEDNN_DEFAULT_FPMATH_MODE"
    monkeypatch.setenv(name, "BF16")
    with pytest.warns(UserWarning, match=f"^{name} is BF16"):
        experiment(tmp_path).check()
