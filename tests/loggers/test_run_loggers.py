"""Loggers of a run: when they are called, their files, and resuming."""

import csv
import importlib.util
import json
import os
import warnings
from pathlib import Path

import pytest
import yaml
from commands import TINY, rows, run, tiny
from experiments import experiment
from lightning.pytorch import loggers as lightnings
from lightning.pytorch.loggers.logger import DummyLogger

from fl_lightning.callbacks import RoundCallback
from fl_lightning.core.errors import ConfigError
from fl_lightning.loggers import files as file_loggers
from fl_lightning.loggers.base import Beginning, Labels, RoundLogger
from fl_lightning.loggers.collection import Loggers
from fl_lightning.loggers.files import CSVLogger, MLFlowLogger, TensorBoardLogger
from fl_lightning.loggers.wandb import WandbRoundLogger
from fl_lightning.runs.folder import WRITTEN_NAMES

LABELS = Labels("digits-seed0", "digits-123456", ["FedAvg", "Digits", "Dirichlet"])


class Recording(DummyLogger):
    """Record the calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def log_hyperparams(self, params, *rest):
        self.calls.append("config")

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, metrics))

    def save(self):
        self.calls.append("save")

    def finalize(self, status):
        self.calls.append(status)


class RecordingRounds(Recording, RoundLogger):
    """Record also the calls that only round loggers get."""

    def check(self, run_dir=None):
        self.calls.append("check")

    def begin(self, run):
        self.calls.append(("begin", run.round, run.labels.tags))

    def log_summary(self, summary):
        self.calls.append(("summary", summary["rounds"]))

    def log_files(self):
        self.calls.append("files")


class Failing(Recording, RoundLogger):
    """Fail to begin."""

    def begin(self, *given, **options):
        raise RuntimeError("no room")


class Beside(RoundCallback):
    """Log a metric from a callback."""

    def on_round_end(self, run, metrics):
        run.logger.log_metrics({"beside": 7.0}, step=run.round)


def lines(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def series(run_dir):
    """Return the metrics by round from metrics.csv and clients.csv."""
    found = {int(row["round"]): {k: float(v) for k, v in row.items() if v and k != "round"} for row in rows(run_dir)}
    for row in rows(run_dir, "clients.csv"):
        own = {k: float(v) for k, v in row.items() if v and k not in ("round", "client")}
        found[int(row["round"])] |= {f"client_{k}/{row['client']}": v for k, v in own.items()}
    return found


def csv_logs(run_dir, place="csv_logs/metrics.csv"):
    calls = lines(run_dir / place)
    assert len({row["step"] for row in calls}) == len(calls)
    return {int(row["step"]): {k: float(v) for k, v in row.items() if v and k != "step"} for row in calls}


def event_accumulator(folder):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reading.EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def events(folder):
    """Return the scalars of a TensorBoard folder by step."""
    accumulator, found = event_accumulator(folder), {}
    for name in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    return found


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        assert found[step] == pytest.approx(row, rel=1e-6, nan_ok=True)


# --- Calls ---


@pytest.mark.thorough
def test_loggers_are_called_at_each_stage_of_a_run(tmp_path):
    one, other, of_rounds = Recording(), Recording(), RecordingRounds()
    experiment(tmp_path, rounds=2, logger=[one, other, of_rounds], callbacks=[Beside()]).fit(config={"seed": 0})
    assert one.calls == other.calls
    steps = [calls[0] for calls in one.calls if isinstance(calls, tuple)]
    assert (one.calls[0], steps, one.calls[-1]) == ("config", [1, 1, 2, 2], "success")
    calls = [len(call[1]) if isinstance(call[0], int) else call for call in of_rounds.calls]
    (row,) = {count for count in calls if isinstance(count, int) and count > 1}
    begin = ("begin", 0, ["FedAvg", "Digits", "Dirichlet"])
    rounds = [[row, 1, "save", ("summary", n)] for n in (1, 2)]
    assert calls == ["check", begin, *rounds[0], *rounds[1], "files", "success"]
    assert (2, {"beside": 7.0}) in of_rounds.calls


def test_a_run_from_python_gives_its_hyperparameters_to_all_loggers(tmp_path):
    """Without a config, loggers get the arguments of the orchestrator, as `config.yaml` has them."""
    recording, lightning_csv = Recording(), lightnings.CSVLogger(str(tmp_path / "own"))
    given = [recording, lightning_csv, CSVLogger()]
    experiment(tmp_path / "run", logger=given, rounds=1, trainer={"accelerator": "cpu", "max_epochs": 1}).fit()
    assert recording.calls[0] == "config"
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (written["rounds"], written["algorithm"]["class_path"]) == (1, "fl_lightning.FedAvg")
    for folder in (tmp_path / "run" / "csv_logs", tmp_path / "own" / "lightning_logs" / "version_0"):
        assert yaml.safe_load((folder / "hparams.yaml").read_text()) == written


def test_a_sweep_of_wandb_without_a_logger_that_reports_to_it_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    for given in (None, [CSVLogger()]):
        with pytest.warns(UserWarning, match="^logger: .*WandbRoundLogger"):
            Loggers(given).check(tmp_path)
    Loggers([CSVLogger(), WandbRoundLogger()]).check(tmp_path)
    Loggers([lightnings.WandbLogger()]).check(tmp_path)
    monkeypatch.delenv("WANDB_SWEEP_ID")
    Loggers(None).check(tmp_path)


@pytest.mark.parametrize("given", [False, []])
@pytest.mark.fast_cases(1)
def test_run_without_loggers(tmp_path, given):
    run = experiment(tmp_path, rounds=1, logger=given)
    run.fit()
    assert not run.logger
    of_loggers = {"wandb", "csv_logs", "tensorboard", "mlflow"}
    assert {path.name for path in tmp_path.iterdir()} <= {*WRITTEN_NAMES} - of_loggers


@pytest.mark.parametrize(
    ("given", "calls"),
    [
        (True, "True is not a Lightning logger. Give one, a list of them, or false."),
        ([Recording(), "CSVLogger"], "'CSVLogger' is not a Lightning logger"),
        ([CSVLogger(), Recording(), CSVLogger(prefix="x")], "CSVLogger is listed twice"),
    ],
)
def test_invalid_loggers_are_refused(tmp_path, given, calls):
    with pytest.raises(ConfigError, match=f"^logger: {calls}"):
        experiment(tmp_path, logger=given)
    assert len(Loggers([Recording(), Recording()])) == 2


def test_loggers_are_closed_if_one_cannot_begin(tmp_path):
    first, last = Recording(), Recording()
    with pytest.raises(ConfigError, match=r"^logger: no room$"):
        experiment(tmp_path / "run", logger=[first, Failing(), last]).fit(config={"seed": 0})
    assert (first.calls, last.calls) == (["config", "failed"], [])
    assert not (tmp_path / "run").exists()


def test_images_go_to_loggers_that_support_them(tmp_path):
    class RecordingImages(Recording):
        def log_image(self, key, images, step=None, caption=None):
            self.calls.append((key, images, step, caption))

    plain, taking = Recording(), RecordingImages()
    Loggers([plain, taking]).log_image("figures/x", ["a.png"], step=3, caption=["round 3"])
    assert (plain.calls, taking.calls) == ([], [("figures/x", ["a.png"], 3, ["round 3"])])


# --- Files in the run folder, also after a resume ---

LOCAL = ["CSVLogger", "TensorBoardLogger"]


@pytest.mark.thorough
def test_loggers_write_the_metrics_to_the_run_folder(tmp_path):
    pytest.importorskip("tensorboard")
    drift = "[{class_path: ClientDrift, init_args: {every: 2}}]"
    tiny(tmp_path / "run", "--rounds", "2", "--logger", f"[{', '.join(LOCAL)}]", "--callbacks", drift)
    assert_close(csv_logs(tmp_path / "run"), series(tmp_path / "run"))
    calls = events(tmp_path / "run" / "tensorboard")
    assert_close(calls, series(tmp_path / "run"))  # without hp_metric
    accumulator = event_accumulator(tmp_path / "run" / "tensorboard")
    for name in ("drift", "partition", "curves"):
        (image,) = accumulator.Images(f"figures/{name}")
        assert image.step == 2
        assert image.width > 100
    for place in ("csv_logs", "tensorboard"):
        assert yaml.safe_load((tmp_path / "run" / place / "hparams.yaml").read_text())["rounds"] == 2
    assert {path.name for path in (tmp_path / "run").iterdir()} <= set(WRITTEN_NAMES)


@pytest.mark.thorough
@pytest.mark.parametrize("harm", ["later rows", "cut short", "new column"])
def test_resumed_run_continues_the_files_of_loggers(tmp_path, harm):
    pytest.importorskip("tensorboard")
    run_dir = tmp_path / "run"
    tiny(run_dir, "--logger", f"[{', '.join(LOCAL)}]")
    logged = run_dir / "csv_logs" / "metrics.csv"
    text = logged.read_text()
    width = text.splitlines()[0].count(",")
    last = "," * text.splitlines()[0].split(",").index("step")
    if harm == "later rows":  # as a kill after round 5 leaves them, whose last checkpoint is of round 3
        logged.write_text(text + f"{last}4{',' * (width - len(last))}\n{last}5{',' * (width - len(last))}\n")
        stray = lightnings.TensorBoardLogger(str(run_dir), name="tensorboard", version="")
        stray.log_metrics({"global/acc": 99.0, "stray": 1.0}, step=5)
        stray.finalize("failed")
    if harm == "cut short":
        logged.write_text(text + "0.25,0.5")
    callbacks = ["--callbacks", "[{class_path: ClientDrift, init_args: {every: 1}}]"] if harm == "new column" else []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome = run("fit", "--resume", run_dir, "--rounds", "5", *callbacks)
    assert outcome.code == 0, outcome.err
    assert_close(csv_logs(run_dir), series(run_dir))
    calls = events(run_dir / "tensorboard")
    assert_close(calls, series(run_dir))
    assert set(csv_logs(run_dir)) == {1, 2, 3, 4, 5}


def test_tensorboards_table_of_hyperparameters_has_the_main_metrics(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    def table(folder):
        """Return the columns of the table: names of hyperparameters and of metrics."""
        plugin = event_accumulator(folder).summary_metadata["_hparams_/experiment"].plugin_data
        experiment = HParamsPluginData.FromString(plugin.content).experiment
        return [one.name for one in experiment.hparam_infos], [one.name.tag for one in experiment.metric_infos]

    logger = TensorBoardLogger()
    logger.begin(Beginning(tmp_path, {"rounds": 2, "algorithm": {"mu": 0.5}}, LABELS, 0))
    logger.log_metrics({"time/round_s": 1.0}, step=1)  # not evaluated
    for step in (2, 3):
        logger.log_metrics({"global/acc": step / 4, "client/acc_mean": 0.25, "global/loss": 2.0}, step=step)
    logger.finalize("success")
    assert table(tmp_path / "tensorboard") == (["rounds", "algorithm/mu"], ["global/acc", "client/acc_mean"])
    accuracy = {"global/loss": 2.0, "client/acc_mean": 0.25}
    rounds = {1: {"time/round_s": 1.0}, 2: accuracy | {"global/acc": 0.5}, 3: accuracy | {"global/acc": 0.75}}
    assert_close(events(tmp_path / "tensorboard"), rounds)


def test_resume_before_the_first_row_begins_a_new_file(tmp_path):
    logger = CSVLogger()
    logger.begin(Beginning(tmp_path, {}, LABELS, 0))
    logger.log_metrics({"a": 1.0}, step=1)
    logger.save()
    again = CSVLogger(prefix="mine")
    again.begin(Beginning(tmp_path, {}, LABELS, 0))
    assert not (tmp_path / "csv_logs" / "metrics.csv").exists()
    again.log_metrics({"b": 2.0}, step=1)
    again.save()
    assert csv_logs(tmp_path) == {1: {"mine-b": 2.0}}


@pytest.mark.thorough
def test_save_dir_has_the_layout_of_lightning(tmp_path):
    tiny(tmp_path / "run", "--logger=CSVLogger", f"--logger.save_dir={tmp_path / 'logs'}", "--logger.name=mine")
    assert_close(csv_logs(tmp_path / "logs", "mine/version_0/metrics.csv"), series(tmp_path / "run"))
    outcome = run("fit", "--resume", tmp_path / "run", "--rounds", "4")
    assert outcome.code == 0, outcome.err
    assert set(csv_logs(tmp_path / "logs", "mine/version_1/metrics.csv")) == {4}
    assert not (tmp_path / "run" / "csv_logs").exists()


# --- MLflow ---

mlflow_as_it_is = pytest.mark.filterwarnings("ignore:The ``noload``", "ignore::DeprecationWarning:mlflow")


def metrics_of(run_dir):
    """Return metrics by step, parameters, tags and status of the MLflow runs."""
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{run_dir}/mlflow/mlflow.db")
    found = []
    (experiment,) = [one for one in client.search_experiments() if one.name == "fl-lightning"]
    for one in client.search_runs([experiment.experiment_id]):
        steps = {}
        for name in one.data.metrics:
            for metric in client.get_metric_history(one.info.run_id, name):
                assert name not in steps.setdefault(metric.step, {})
                steps[metric.step][name] = metric.value
        found.append((steps, one.data.params, one.data.tags, one.info.status))
    return found


@mlflow_as_it_is
def test_mlflow_database_in_the_run_folder_is_continued(tmp_path):
    pytest.importorskip("mlflow")
    run_dir = tmp_path / "run"
    tiny(run_dir, "--rounds", "2", "--logger", "MLFlowLogger", "--callbacks+=Checkpointing", "--callbacks.every=5")
    assert {path.name for path in run_dir.iterdir()} <= set(WRITTEN_NAMES)
    outcome = run("fit", "--resume", run_dir, "--rounds", "4")
    assert outcome.code == 0, outcome.err
    ((steps, parameters, tags, status),) = metrics_of(run_dir)
    assert_close(steps, series(run_dir))
    assert parameters["algorithm/class_path"].endswith("FedSKC")
    assert (tags["algorithm"], tags["dataset"], tags["partition"]) == ("FedSKC", "Digits", "Dirichlet")
    assert tags["mlflow.runName"] == "run-rounds=2-seed0"
    assert status == "FINISHED"


@mlflow_as_it_is
def test_mlflow_rounds_are_not_logged_twice(tmp_path):
    pytest.importorskip("mlflow")
    calls = os.environ.get("MLFLOW_TRACKING_URI")
    first = MLFlowLogger()
    first.begin(Beginning(tmp_path, {"seed": 0}, LABELS, 0))
    for step in (1, 2, 3):
        first.log_metrics({"time/round_s": 1.0, "a": step}, step=step)
    first.finalize("failed")
    assert os.environ.get("MLFLOW_TRACKING_URI") == calls
    again = MLFlowLogger()
    again.check(tmp_path)
    again.begin(Beginning(tmp_path, {"seed": 1}, LABELS, 2))
    for step in (3, 4):
        again.log_metrics({"time/round_s": 1.0, "a": 10 * step}, step=step)
    again.finalize("success")
    ((steps, parameters, _, status),) = metrics_of(tmp_path)
    assert {step: row["a"] for step, row in steps.items()} == {1: 1, 2: 2, 3: 3, 4: 40}
    assert (parameters, status) == ({"seed": "0"}, "FINISHED")


def test_damaged_mlflow_run_id_is_refused(tmp_path):
    pytest.importorskip("mlflow")
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "run_id").write_text("../../x")
    with pytest.raises(ConfigError, match="run_id is damaged"):
        MLFlowLogger().check(tmp_path)


# --- On the command line ---


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("logger: null\n", ""))
    return tmp_path


FIT = ["fit", "--config", "tiny.yaml", "--rounds", "1", "--run_dir", "run"]


@pytest.mark.thorough
def test_logger_is_added_to_the_default(here):
    assert run(*FIT, "--logger+=CSVLogger").code == 0
    assert (here / "run" / "wandb" / "run.json").is_file()
    assert set(csv_logs(here / "run")) == {1}
    assert json.loads((here / "run" / "wandb" / "run.json").read_text())["name"] == "tiny-rounds=1-seed0"


@pytest.mark.thorough
@pytest.mark.parametrize("word", ["false", "[]"])
def test_false_and_empty_list_give_no_logger(here, word):
    code, _, err = run(*FIT, "--logger", word)
    assert code == 0, err
    assert not (here / "run" / "wandb").exists()
    assert run("fit", "--resume", "run", "--rounds", "2").code == 0
    assert run("test", "run").code == 0


@pytest.mark.parametrize(("name", "package"), [("TensorBoardLogger", "tensorboard"), ("MLFlowLogger", "mlflow")])
def test_missing_package_is_named_with_the_install_command(here, name, package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(file_loggers, "find_spec", lambda wanted: None if wanted == package else find(wanted))
    code, _, err = run(*FIT, "--logger", name)
    calls = f"logger: {package} is not installed. Run: pip install 'fl-lightning[{package}]'"
    assert (code, err) == (2, f"fl-lightning: error: {calls}\n")
    assert not Path("run").exists()
