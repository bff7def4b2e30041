"""Lightning's callbacks in clients' fits: a copy for each, what they log among the metrics, no use refused by name."""

import re
from functools import partial

import pytest
import torch
from commands import run, tiny
from experiments import NormMLP, client_series, digits, experiment, in_float64, same_bytes, untimed, weights_after
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, WeightAveraging

from fl_lightning.algorithms import SCAFFOLD, FedAvg, FedCM, FedDC, FedNova, FedProx, MoFedSAM
from fl_lightning.callbacks import EarlyStopping as StopsRun
from fl_lightning.callbacks import RowNorms
from fl_lightning.cli.catalogue import names
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.errors import ClientFailure, ConfigError
from fl_lightning.engines import AutoEngine, SequentialEngine

CPU = {"accelerator": "cpu"}


class Counts(Callback):
    """Logs the number of each step in every way that Lightning has, and in ways of its own."""

    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps += 1
        self.log("step_number", float(self.steps))
        self.log("mean_number", float(self.steps), on_step=False, on_epoch=True, batch_size=1)

    def on_train_end(self, trainer, module):
        trainer.logger.log_metrics({"told": torch.tensor(2.5), "text": "none", "several": torch.zeros(3)})


class Epochs(Callback):
    """Logs how many epochs began."""

    def __init__(self):
        self.begun = 0

    def on_train_epoch_start(self, trainer, module):
        self.begun += 1
        trainer.logger.log_metrics({"epochs": self.begun})


class Leaves(Callback):
    """Changes objects that the next fit might share, and logs the changes that it finds."""

    def __init__(self, box):
        self.box, self.count = box, 0

    def on_fit_start(self, trainer, module):
        found = self.count + len(self.box) + hasattr(module, "left") + hasattr(trainer, "left")
        trainer.logger.log_metrics({"found": found})
        self.count += 1
        self.box.append(1)
        module.left = trainer.left = True
        Leaves.forwards = self.batches = 0
        module.backbone.head.register_forward_hook(self.hook)

    def hook(self, *given):
        Leaves.forwards += 1

    def on_train_batch_end(self, trainer, *given):
        self.batches += 1
        trainer.logger.log_metrics({"hooks": Leaves.forwards / self.batches})


class Watches(Callback):
    """Logs a metric that the run may have itself."""

    def __init__(self, name):
        self.name = name

    def on_train_end(self, trainer, module):
        trainer.logger.log_metrics({self.name: 1.0})


class Ends(Callback):
    """Ends a fit before its first step."""

    def on_train_start(self, trainer, module):
        trainer.should_stop = True
        trainer.fit_loop.epoch_loop.max_steps = 0


class Quits(Callback):
    """Fails in the fits of some clients."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if float(outputs["loss"]) > 0:
            raise RuntimeError("enough")


class Locked(Callback):
    """Cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("there is one of me")


def one_client(tmp_path, *given, epochs=3, **options):
    return experiment(
        tmp_path,
        scenario=digits(1),
        clients_per_round=1,
        rounds=1,
        trainer=CPU | {"max_epochs": epochs},
        client_callbacks=list(given),
        **options,
    )


def batches_of_one_client(run):
    return -(-len(run.data.shards[0].train) // run.training.batch_size)


# --- What they log ---


@pytest.mark.thorough
def test_what_is_logged_is_each_clients_and_their_mean(tmp_path):
    run = experiment(tmp_path, rounds=2, client_callbacks=[Counts()])
    run.fit()
    for row in run.csv.rows:
        own = client_series(tmp_path, row["round"])
        for name in ("step_number", "mean_number", "told"):
            series = [value for key, value in own.items() if key.endswith(f"/{name}")]
            assert len(series) == 4
            assert row[f"client/{name}"] == pytest.approx(sum(series) / 4, rel=1e-12)
        assert row["client/told"] == 2.5
        assert not {"client/text", "client/several", "client/epoch", "client/step"} & row.keys()


def test_it_is_the_last_value_or_the_last_epochs_mean(tmp_path):
    run = one_client(tmp_path, Counts(), epochs=3)
    run.fit()
    batches, (row,) = batches_of_one_client(run), run.csv.rows
    assert batches > 10
    assert row["client/step_number"] == 3 * batches
    assert row["client/mean_number"] == pytest.approx(2 * batches + (batches + 1) / 2, rel=1e-6)


@pytest.mark.thorough
def test_learning_rates_are_logged_even_in_a_fit_of_one_step(tmp_path):
    scheduler = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    run = one_client(tmp_path / "epochs", LearningRateMonitor(), lr_scheduler=scheduler)
    run.fit()
    assert run.csv.rows[0]["client/lr-SGD"] == pytest.approx(0.1 * 0.5**2)
    run = experiment(
        tmp_path / "step", rounds=1, trainer=CPU | {"max_steps": 1}, client_callbacks=[LearningRateMonitor("step")]
    )
    run.fit()
    assert run.csv.rows[0]["client/lr-SGD"] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["acc_mean", "acc"])  # of all clients, and of each client
def test_a_name_that_the_run_has_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=rf"^client_callbacks: .*'{name}'"):
        experiment(tmp_path, client_callbacks=[Watches(name)]).fit()


@pytest.mark.thorough
def test_what_they_log_can_be_watched(tmp_path):
    stop = StopsRun("client/told", patience=1)
    run = experiment(tmp_path, client_callbacks=[Counts()], callbacks=[stop])
    run.fit()
    assert run.round == 2
    with pytest.raises(ConfigError, match="metric 'client/tolt' not found"):
        experiment(tmp_path / "no", client_callbacks=[Counts()], callbacks=[StopsRun("client/tolt")]).fit()


# --- A copy for each fit ---


@pytest.mark.thorough
def test_nothing_that_a_fit_leaves_behind_reaches_the_next(tmp_path):
    box = []
    given = Leaves(box)
    run = experiment(tmp_path, rounds=2, client_callbacks=[given])
    run.fit()
    found = [value for n in (1, 2) for key, value in client_series(tmp_path, n).items() if key.endswith("/found")]
    hooks = [value for n in (1, 2) for key, value in client_series(tmp_path, n).items() if key.endswith("/hooks")]
    assert (found, hooks) == ([0.0] * 8, [1.0] * 8)
    assert (box, given.count) == ([], 0)


@pytest.mark.thorough
def test_what_clients_train_is_what_they_train_without(tmp_path):
    alone = weights_after(tmp_path / "alone", FedProx(mu=0.1), model=NormMLP)
    watched = weights_after(tmp_path / "watched", FedProx(mu=0.1), model=NormMLP, client_callbacks=[Counts()])
    assert same_bytes(alone, watched)


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "engine",
    [lambda _: SequentialEngine(local_loop=False), lambda processes: processes, lambda _: AutoEngine(1)],
    ids=["alone", "processes", "auto"],
)
def test_every_engine_gives_the_same(tmp_path, engine, processes):
    options = {"client_callbacks": [Counts(), EarlyStopping("train_loss", patience=0, min_delta=0.3)], "rounds": 2}
    runs = []
    for name, one in (("sequential", SequentialEngine()), ("other", engine(processes))):
        runs.append(experiment(tmp_path / name, model=NormMLP, engine=one, trainer=CPU | {"max_epochs": 4}, **options))
        runs[-1].fit()
    assert same_bytes(*(run.state["model"] for run in runs))
    assert untimed(runs[0].csv.rows) == untimed(runs[1].csv.rows)
    assert client_series(tmp_path / "sequential", 2) == client_series(tmp_path / "other", 2)


# --- Those that change a fit ---


class Rising(LossTerm):
    """Its n-th step adds n, or the numbers that were given."""

    def __init__(self, *values):
        super().__init__()
        self.values, self.steps = values, 0

    def begin(self, module):
        self.steps = 0

    def begin_epoch(self, module):
        self.epoch = module.current_epoch

    def forward(self, step):
        return step.logits.sum() * 0 + 1000.0 * self.values[self.epoch]


def test_a_fit_stops_early_on_its_epochs_losses(tmp_path):
    """Their mean over the fit so far still falls in the third epoch, in which the epoch's own rises."""
    term = FedAvg(loss_terms=[Rising(9, 1, 2, 3, 4, 5)])
    run = one_client(tmp_path, Epochs(), EarlyStopping("train_loss", patience=1), epochs=6, algorithm=term)
    run.fit()
    assert run.csv.rows[0]["client/epochs"] == 3
    assert run.csv.rows[0]["client/train_loss"] == pytest.approx(1000 * (9 + 1 + 2) / 3, rel=0.01)


class MeanOfTwo(WeightAveraging):
    """The mean of what the last two epochs end with."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None and epoch_idx >= 1


@in_float64
def test_averaged_weights_are_what_is_uploaded(tmp_path):
    ends = []
    for epochs in (2, 3):
        plain = one_client(tmp_path / str(epochs), epochs=epochs, model=NormMLP)
        plain.fit()
        ends.append(plain.state["model"])
    averaged = one_client(tmp_path / "mean", MeanOfTwo(), model=NormMLP)
    averaged.fit()
    for name, value in averaged.state["model"].items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(value, (ends[0][name] + ends[1][name]) / 2, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", [SCAFFOLD, FedNova, FedCM, FedDC, MoFedSAM])
def test_averaged_weights_are_refused_by_methods_that_compute_gradients_from_them(tmp_path, method):
    optimizer = partial(torch.optim.SGD, lr=0.1)
    run = experiment(tmp_path / "run", method(), optimizer=optimizer, client_callbacks=[MeanOfTwo()])
    with pytest.raises(ConfigError) as refused:
        run.fit()
    what = f"MeanOfTwo averages weights, but {method.__name__} computes gradients from their changes"
    assert str(refused.value) == f"client_callbacks: {what}. Remove it."
    assert not (tmp_path / "run").exists()


def test_a_fit_that_takes_no_step_is_the_clients_failure(tmp_path):
    with pytest.raises(ClientFailure, match=r"client 0, round 1: .* first step"):
        one_client(tmp_path, Ends()).fit()


def test_an_error_of_theirs_is_the_clients(tmp_path):
    with pytest.raises(ClientFailure, match=r"^client \d, round 1: RuntimeError: enough$"):
        experiment(tmp_path, client_callbacks=[Quits()]).fit()


# --- What is refused ---

STAND_INS = {
    "ModelCheckpoint": "use Checkpointing under callbacks",
    "Checkpoint": "use Checkpointing under callbacks",
    "OnExceptionCheckpoint": "checkpointed",
    "ProgressBar": "RoundProgress",
    "RichProgressBar": "RoundProgress",
    "TQDMProgressBar": "RoundProgress",
    "ModelSummary": "client_module",
    "RichModelSummary": "client_module",
    "BasePredictionWriter": "client_module",
    "BatchSizeFinder": "batch_size",
    "LearningRateFinder": "sweep",
    "GradientAccumulationScheduler": "trainer.accumulate_grad_batches",
    "BackboneFinetuning": "FedRep",
    "StochasticWeightAveraging": "EMAWeightAveraging",
    "SpikeDetection": "on_client_failure drop",
}


@pytest.mark.parametrize("name", STAND_INS)
def test_one_without_a_use_says_what_to_use(tmp_path, name):
    kind = getattr(lightnings, name)
    for given in (object.__new__(type(name, (kind,), {})), object.__new__(type("Own", (kind,), {}))):
        told = f"^client_callbacks: {type(given).__name__} does not work in a client's fit: .*{STAND_INS[name]}"
        with pytest.raises(ConfigError, match=told):
            experiment(tmp_path, client_callbacks=[given]).load()


def test_every_callback_of_lightnings_is_known_or_refused():
    assert {*names("client_callbacks"), *STAND_INS, "Callback", "BaseFinetuning"} == set(lightnings.__all__)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            EarlyStopping("val_loss"),
            "EarlyStopping.monitor: val_loss: a client's fit has no validation; monitor train_loss",
        ),
        (
            EarlyStopping("train_los"),
            "EarlyStopping.monitor: metric 'train_los' not found. Available: train_loss, train_ce",
        ),
        (
            EarlyStopping("train_loss", check_on_train_epoch_end=False),
            "EarlyStopping.check_on_train_epoch_end: a client",
        ),
        (Locked(), "Locked cannot be copied, and each fit has a copy: there is one of me"),
        (RowNorms(), "RowNorms watches the run, not a client's fit. List it under callbacks."),
        (3, "int is not a callback"),
    ],
    ids=["validation", "unknown", "after validation", "one of a kind", "of a run", "none"],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, given, told):
    with pytest.raises(ConfigError, match=f"^client_callbacks: {re.escape(told)}"):
        experiment(tmp_path / "run", client_callbacks=[given]).fit()
    assert not (tmp_path / "run").exists()


def test_another_callback_may_log_what_is_watched(tmp_path):
    """A metric that is not known before the fit is looked up in the fit."""
    run = one_client(tmp_path, Counts(), Epochs(), EarlyStopping("mean_number", patience=0), epochs=4)
    run.fit()
    assert run.csv.rows[0]["client/epochs"] == 2


# --- On the command line ---

FIT = ["fit", "--config", "tiny.yaml", "--rounds", "1", "--run_dir", "run"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--client_callbacks", "[RowNorms]"], ["client_callbacks: RowNorms watches the run", "under callbacks"]),
        (["--callbacks+=lightning.pytorch.callbacks.Timer"], ["Timer is Lightning's", "under client_callbacks"]),
        (["--callbacks", "[RichProgressBar]"], ["RichProgressBar is Lightning's", "RoundProgress"]),
        (["--client_callbacks", "[Tymer]"], ["class 'Tymer' not found", "Did you mean Timer?"]),
        (["--client_callbacks", "[EarlyStopping]"], ["client_callbacks: monitor must be given"]),
        (["--client_callbacks", "Timer"], ["client_callbacks: got 'Timer', expected list"]),
    ],
)
def test_the_command_line_says_where_one_belongs(here, words, told):
    code, _, err = run(*FIT, *words)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert all(part in err for part in told), err
    assert not (here / "run").exists()
    assert run(*FIT, "--client_callbacks", "[Timer]").code == 0


@pytest.mark.thorough
def test_a_run_with_callbacks_is_resumed_from_its_own_config(tmp_path):
    words = ["--client_callbacks+=EarlyStopping", "--client_callbacks.monitor=train_loss"]
    tiny(tmp_path / "run", *words, "--client_callbacks+=LearningRateMonitor", "--client_callbacks+=Timer")
    outcome = run("fit", "--resume", tmp_path / "run", "--rounds", "4")
    assert outcome.code == 0, outcome.err
    code, _, err = run("fit", "--resume", tmp_path / "run", "--rounds", "5", "--client_callbacks", "null")
    assert code == 2
    assert "client_callbacks" in err
