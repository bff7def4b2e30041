"""W&B runs, read from their files."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from unittest.mock import Mock

import pytest
import torch
import wandb
import yaml
from commands import TINY, contents, rows, run, summary, tiny
from experiments import client_series, experiment
from matplotlib.image import imread
from wandb_files import Logged, of_kind, summary_of, values

import fl_lightning
from fl_lightning.algorithms import Local
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.names import Names
from fl_lightning.loggers.collection import Loggers
from fl_lightning.loggers.wandb import Labels, WandbRoundLogger, group_config

WANDB = ["--logger", "WandbRoundLogger"]
DRAWN = ["--callbacks", "[{class_path: ClassRelations, init_args: {every: 1}}, BytesByRound]"]
FIGURES = ("figures/class_relations", "figures/bytes")
LABELS = Labels("digits-seed0", "digits-123456", ["FedSKC", "Digits", "Dirichlet"])

DIVERGING = """
from fl_lightning.algorithms import FedAvg

class Diverging(FedAvg):
    def aggregation(self, round):
        if round.number == 2:
            raise ArithmeticError("diverged")
        return super().aggregation(round)
"""


def history(found):
    """Return one mapping per logged row."""
    return [values(record.item) for record in of_kind(found, "history")]


def metrics(row):
    """Return the part of a row that is in metrics.csv and clients.csv."""
    apart = ("_", "partition.", "figures/")
    return {name: value for name, value in row.items() if not name.startswith(apart)}


def config_of(found):
    """Return the config of a W&B run."""
    config = values(of_kind(found, "run")[0].config.update)
    for record in of_kind(found, "config"):
        config |= values(record.update)
    return config


@pytest.fixture(scope="module", autouse=True)
def wandb_at(tmp_path_factory):
    """Move W&B's folders, and remove its environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield


@pytest.fixture(scope="module")
def outcome_and_run(tmp_path_factory):
    """Return the outcome of a run of two rounds with figures, and the run after it was moved and resumed."""
    run_dir = tmp_path_factory.mktemp("logged") / "tiny"
    options = ["--logger.notes", "a try", "--logger.tags", "[mine, FedSKC]"]
    outcome = tiny(run_dir, "--rounds", "2", *WANDB, *DRAWN, *options)
    Logged(run_dir)
    moved = run_dir.rename(run_dir.parent / "elsewhere")
    assert run("fit", "--resume", moved, "--rounds", "3", "--log_clients", "false").code == 0
    return outcome, Logged(moved)


@pytest.fixture(scope="module")
def logged(outcome_and_run):
    """Return the run, whose two parts are before and after the resume."""
    return outcome_and_run[1]


class Online:
    """A fake W&B run and server."""

    def __init__(self, monkeypatch, **summary) -> None:
        self.given, self.rows, self.closed = [], [], 0
        self.summary, self.step, self.id, self.project, self.entity = summary, 0, "id1", "p", "e"
        monkeypatch.setattr(wandb, "init", self.init)

    def init(self, **given):
        self.given.append(given)
        return self

    def define_metric(self, *args, **kwargs):
        pass

    def finish(self, exit_code):
        pass

    def log(self, row, step=None, commit=None):
        if row:
            self.rows.append((step, row))
        self.closed += bool(commit)


# --- The content of a W&B run ---


def test_run_folder_keeps_its_wandb_run(logged):
    before, after = of_kind(logged.records, "run")
    assert before.run_id == after.run_id
    assert before.project == after.project == "fl-lightning"
    assert before.resume
    assert after.resume
    assert [ended.exit_code for ended in of_kind(logged.records, "exit")] == [0, 0]


def test_name_group_and_tags_come_from_the_config(logged):
    before, after = of_kind(logged.records, "run")
    assert before.display_name == "tiny-rounds=2-seed0"
    assert before.run_group.startswith("tiny-rounds=2-")
    assert list(before.tags) == ["mine", "FedSKC", "Digits", "Dirichlet"]
    assert (before.job_type, before.notes) == ("fit", "a try")
    for name in ("display_name", "run_group", "tags", "job_type", "project", "entity"):
        assert getattr(after, name) == getattr(before, name)


def test_round_is_the_step_of_every_metric(logged):
    defined = of_kind(logged.parts[0], "metric")
    assert [(metric.name, metric.glob_name, metric.step_metric) for metric in defined] == [
        ("round", "", ""),
        ("", "*", "round"),
    ]
    assert b"global_step" not in logged.paths[0].read_bytes()


def test_each_round_is_one_row_with_its_images(logged):
    """The partition is logged before the first round."""
    actual = history(logged.records)
    steps = [record.step.num for record in of_kind(logged.records, "history")]
    assert steps == [row["round"] for row in actual] == [row["_step"] for row in actual] == [0, 1, 2, 3]
    captions = [[row.get(f"{figure}.captions") for row in actual] for figure in FIGURES]
    assert captions == [[None, ["round 1"], ["round 2"], ["round 3"]], [None, None, ["round 2"], ["round 3"]]]


def test_the_last_round_has_images_of_the_partition_and_the_curves(logged):
    """The last round of the run before the resume, and the one of the resumed run."""
    actual = history(logged.records)
    for name in ("partition", "curves"):
        captions = [row.get(f"figures/{name}.captions") for row in actual]
        assert captions == [None, None, [name], [name]]
        for part, row in ((logged.paths[0], actual[2]), (logged.paths[1], actual[3])):
            (file,) = row[f"figures/{name}.filenames"]
            image = imread(part.parent / "files" / file)
            assert image.shape[1] == {"partition": 2025, "curves": 975}[name]  # 6.75 and 3.25 inches
            assert image.std() > 0.01


def test_history_equals_metrics_csv_and_clients_csv(logged):
    actual = history(logged.parts[0])[1:]
    for row, expected in zip(actual, rows(logged.run_dir)[:2], strict=True):
        own = client_series(logged.run_dir, row["round"])  # client_3/acc
        series = {"client_{1}/{0}".format(*key.removeprefix("client_").split("/")): own[key] for key in own}
        assert metrics(row) == {name: float(text) for name, text in expected.items() if text} | series
    names = actual[0].keys()
    assert {"global/acc", "global/loss", "client/acc_mean", "client/acc_std", "client/train_loss"} <= names
    assert {"comm/up_bytes", "comm/down_bytes", "comm/total_bytes"} <= names
    assert {f"client_{what}/{k}" for k in range(4) for what in ("acc", "train_loss")} <= names


def test_config_is_logged_with_keys_to_filter_by(logged):
    """Each value of config.yaml is logged; `class_path` becomes `name`."""
    config = config_of(logged.parts[1])
    assert config["algorithm"]["name"] == "FedSKC"
    assert config["algorithm"]["tau"] == 0.08
    assert config["scenario"]["partition"] == {"name": "Dirichlet", "alpha": 0.5, "min_samples": 20, "form": "class"}
    written = yaml.safe_load((logged.run_dir / "config.yaml").read_text())
    assert config.keys() == written.keys() - {"logger"} | {"_wandb", "fl_lightning"}
    plain = {key: value for key, value in written.items() if key != "callbacks" and not isinstance(value, dict)}
    assert {key: config[key] for key in plain} == plain
    assert config["algorithm"] == {"name": "FedSKC", **written["algorithm"]["init_args"]}
    assert config["trainer"] == written["trainer"]
    assert config["fl_lightning"]["version"] == fl_lightning.__version__
    assert len(config["fl_lightning"].get("commit", 40 * "0")) == 40


@pytest.mark.thorough
def test_a_run_from_python_has_a_config_a_name_and_a_group(tmp_path):
    """Runs that differ only in the seed, or in options that do not change results, share the group."""
    options = {"base": {}, "seed": {"seed": 1}, "engine": {"engine": "stacked"}, "batch": {"batch_size": 16}}
    begun = {}
    for name, changed in options.items():
        settings = {"rounds": 1, "trainer": {"accelerator": "cpu", "max_epochs": 1}} | changed
        experiment(tmp_path / name, logger=WandbRoundLogger(), **settings).fit()
        records = Logged(tmp_path / name).records
        (begun[name],) = of_kind(records, "run")
        config = config_of(records)
        assert config["algorithm"]["name"] == "FedAvg"
        assert config["scenario"]["partition"]["alpha"] == 0.3
        assert config["optimizer"]["lr"] == 0.1
        assert config["batch_size"] == settings.get("batch_size", 64)
    names = [run.display_name for run in begun.values()]
    assert names == ["FedAvg-seed0", "FedAvg-seed1", "FedAvg-seed0", "FedAvg-seed0"]
    groups = [run.run_group for run in begun.values()]
    assert groups[0] == groups[1] == groups[2] != groups[3]
    assert all(group.startswith("FedAvg-") for group in groups)


def test_group_config_replaces_class_paths_by_names():
    def one(name, /, **arguments):
        return {"class_path": f"some.where.{name}", "init_args": arguments}

    assert group_config({"terms": [one("A", mu=1), one("B"), one("A", inner=one("C", x=[1, 2]))]}) == {
        "terms": {
            "A": {"name": "A", "mu": 1},
            "B": {"name": "B"},
            "A-2": {"name": "A", "inner": {"name": "C", "x": [1, 2]}},
        }
    }
    assert group_config({"class_path": "Bare"}) == {"name": "Bare"}
    assert group_config(one("A", name="mine", size=3)) == {"name": "A", "size": 3, "init_args": {"name": "mine"}}
    assert group_config({"class_path": "A", "init_args": {"x": 1}, "dict_kwargs": {"y": 2}}) == {
        "name": "A",
        "x": 1,
        "y": 2,
    }
    assert group_config([]) == []
    assert group_config([one("A"), 1]) == [{"name": "A"}, 1]
    assert group_config([{"a": one("A")}, 1]) == [{"a": {"name": "A"}}, 1]


def test_partition_is_logged_as_a_table(logged):
    (reference,) = [row["partition.path"] for row in history(logged.records) if "partition.path" in row]
    table = json.loads((logged.paths[0].parent / "files" / reference).read_text())
    assert table["columns"] == ["client", *(f"class {label}" for label in range(10))]
    lines = [line.split(",") for line in (logged.run_dir / "partition.csv").read_text().splitlines()]
    assert table["data"] == [[int(n) for n in (line[0], *line[2:])] for line in lines if line[1] == "train"]


def test_summary_equals_the_summary_of_the_run(logged):
    """It covers the rounds before a resume too, and has each metric's last value."""
    actual, written = summary_of(logged.parts[-1]), rows(logged.run_dir)
    reached = {name: value for name, value in summary(logged.run_dir).items() if value is not None}
    assert {name: actual[name] for name in reached} == reached
    assert "R_0.9" not in actual
    for name in ("global/acc", "client/acc_mean", "global/loss"):
        assert actual[name] == float(written[-1][name])
    for name in ("global/loss", "client/loss_mean", "client/train_loss"):
        assert actual[f"{name}_best"] == min(float(row[name]) for row in written)


def test_wandb_prints_nothing(outcome_and_run):
    (code, out, err), logged = outcome_and_run
    assert (code, err) == (0, "")
    assert out.startswith("method: FedSKC")
    assert "WANDB_MODE" not in os.environ
    assert wandb.run is None
    assert [one for one in of_kind(logged.records, "artifact") if one.type == "model"] == []
    out = out.replace(str(logged.run_dir.parent), "").lower()
    assert "wandb" not in out
    assert "lightning" not in out


def test_resumed_run_continues_the_wandb_run(logged):
    actual = history(logged.records)
    assert any(name.startswith("client_") for name in actual[2])
    assert not any(name.startswith("client_") for name in actual[3])  # resumed with log_clients: false
    assert actual[3]["global/acc"] == float(rows(logged.run_dir)[2]["global/acc"])
    assert actual[3]["comm/total_bytes"] == 3 * actual[1]["comm/total_bytes"]
    assert config_of(logged.parts[1])["rounds"] == 3
    assert [metric.step_metric for metric in of_kind(logged.parts[1], "metric")] == ["", "round"]


@pytest.mark.thorough
def test_failed_run_is_marked_as_failed(tmp_path, monkeypatch):
    """Its summary covers the rounds before the failure."""
    (tmp_path / "diverging.py").write_text(DIVERGING)
    (tmp_path / "own.yaml").write_text(TINY)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--run_dir", tmp_path / "run", "--algorithm", "diverging.Diverging", *WANDB]
    code, _, err = run("fit", "--config", tmp_path / "own.yaml", *words)
    assert code == 1
    assert err.startswith("fl-lightning: error: ArithmeticError: diverged")
    logged = Logged(tmp_path / "run")
    (ended,) = of_kind(logged.records, "exit")
    assert ended.exit_code == 1
    actual = history(logged.records)
    assert [row["round"] for row in actual] == [0, 1]
    assert summary_of(logged.records)["global/acc_best"] == actual[1]["global/acc"]
    assert of_kind(logged.records, "run")[0].display_name == "own-algorithm=Diverging-seed0"


# --- Steps ---


def attach_logger(run_dir, **options):
    logger = WandbRoundLogger(**options)
    run_dir.mkdir(exist_ok=True)
    logger.attach(run_dir, {}, LABELS)
    return logger


def test_other_calls_of_log_lose_no_round(tmp_path):
    """W&B drops rows behind its step, and callbacks may log to the W&B run directly."""
    logger = attach_logger(tmp_path)
    for n in (1, 2, 3):
        logger.log_metrics({"a": n}, step=n)
        if n == 1:
            logger.log_metrics({"beside": 1})  # goes into the open row
            logger.log_image("figures/x", [torch.rand(4, 4).numpy()], step=n)
        else:
            logger.experiment.log({"stray": n})
            logger.experiment.log({"stray": -n})
            logger.log_metrics({"b": n}, step=n)
        logger.save()
        logger.save()
    logger.finalize("success")
    actual = history(Logged(tmp_path).records)
    assert [row["a"] for row in actual if "a" in row] == [1, 2, 3]
    assert [row["round"] for row in actual if "a" in row] == [row["a"] for row in actual if "a" in row]
    assert [(row["b"], row["round"]) for row in actual if "b" in row] == [(2, 2), (3, 3)]
    assert actual[0]["beside"] == 1
    assert actual[0]["figures/x._type"] == "images/separated"
    assert [row["_step"] for row in actual] == list(range(1, len(actual) + 1))


def test_wandb_rounds_are_not_logged_twice(tmp_path, monkeypatch):
    """A new folder that continues a W&B run by its id logs all rounds."""
    online = Online(monkeypatch, round=2)
    online.step = 3
    for actual in ([(3, 1), (3, 2), (3, 3)], [(3, 3)]):
        logger = attach_logger(tmp_path, offline=False)
        for n in (1, 2, 3):
            logger.log_metrics({"a": n}, step=n)
            logger.save()
            logger.save()  # of nothing new
        assert online.rows == [(step, {"a": n, "round": n}) for step, n in actual]
        assert online.closed == len(actual)
        online.rows, online.closed = [], 0


def test_a_shared_run_has_no_step(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "shared")
    online = Online(monkeypatch)
    del online.step  # W&B raises
    logger = attach_logger(tmp_path)
    logger.log_metrics({"a": 1}, step=1)
    logger.save()
    assert online.rows == [(None, {"a": 1, "round": 1})]


def test_partition_of_many_clients_is_not_logged(tmp_path, monkeypatch):
    online = Online(monkeypatch)
    for clients, tables in ((1000, 1), (1001, 0)):
        online.rows.clear()
        (tmp_path / str(clients)).mkdir()
        counts = torch.ones(clients, 2).int().numpy()
        Loggers(WandbRoundLogger()).begin(tmp_path / str(clients), {}, LABELS, counts, 0)
        assert len(online.rows) == tables


def test_the_table_of_the_partition_has_the_names_of_clients_and_classes(tmp_path, monkeypatch):
    online = Online(monkeypatch)
    counts = torch.arange(4).reshape(2, 2).numpy()
    names = Names(["north", "south"], ["no", "yes"])
    Loggers(WandbRoundLogger()).begin(tmp_path, {}, LABELS, counts, 0, names)
    ((_, row),) = online.rows
    assert row["partition"].columns == ["client", "name", "class no", "class yes"]
    assert row["partition"].data == [[0, "north", 0, 1], [1, "south", 2, 3]]


# --- Options and defaults ---


OPTIONS = {
    "project": ("WANDB_PROJECT", "fl-lightning"),
    "entity": ("WANDB_ENTITY", None),
    "name": ("WANDB_NAME", "digits-seed0"),
    "group": ("WANDB_RUN_GROUP", "digits-123456"),
    "job_type": ("WANDB_JOB_TYPE", "fit"),
    "notes": ("WANDB_NOTES", None),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option_takes_precedence_over_environment_and_default(option, tmp_path, monkeypatch):
    online, (variable, default) = Online(monkeypatch), OPTIONS[option]
    attach_logger(tmp_path)
    monkeypatch.setenv(variable, "")
    attach_logger(tmp_path / "empty")
    monkeypatch.setenv(variable, "variable")
    attach_logger(tmp_path / "variable")
    attach_logger(tmp_path / "option", **{option: "option"})
    assert [given[option] for given in online.given] == [default, default, "variable", "option"]


@pytest.mark.parametrize(("offline", "key"), [(False, "logger.offline"), (True, "no such host")])
def test_an_error_of_wandb_names_the_option_that_avoids_the_network(offline, key, tmp_path, monkeypatch):
    monkeypatch.setattr("wandb.init", Mock(side_effect=wandb.errors.CommError("no such host")))
    with pytest.raises(wandb.errors.CommError if offline else ConfigError) as raised:
        attach_logger(tmp_path, offline=offline)
    assert str(raised.value).startswith(key)
    assert not (tmp_path / "wandb").exists()


@pytest.mark.parametrize(
    ("option", "outside", "mode"),
    [
        (None, None, "offline"),
        (None, "disabled", "disabled"),
        (True, "online", "offline"),
        (False, "disabled", "online"),
    ],
)
def test_mode_from_option_and_environment(option, outside, mode, monkeypatch):
    if outside:
        monkeypatch.setenv("WANDB_MODE", outside)
    begun = Mock()
    monkeypatch.setattr("wandb.init", begun)
    assert WandbRoundLogger(offline=option).experiment is begun.return_value
    given = begun.call_args.kwargs
    assert given["mode"] == mode
    assert given["settings"].silent == (mode != "online")
    assert given["settings"].console == "off"


@pytest.mark.parametrize(
    ("option", "outside", "mode", "key"),
    [
        (None, None, "online", None),
        (False, None, "online", None),
        (False, "offline", "online", None),
        (None, "shared", "shared", None),
        (True, None, "offline", "logger.offline"),
        (None, "offline", "offline", "WANDB_MODE"),
        (None, "disabled", "disabled", "WANDB_MODE"),
    ],
)
def test_a_run_of_a_wandb_sweep_is_online_unless_told_otherwise(option, outside, mode, key, monkeypatch):
    """The agent sees no metrics of an offline run, which is warned of."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    if outside:
        monkeypatch.setenv("WANDB_MODE", outside)
    logger = WandbRoundLogger(offline=option)
    assert logger.mode == mode
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        logger.check()
    assert [str(one.message).partition(":")[0] for one in shown] == ([key] if key else [])


@pytest.mark.parametrize(
    ("option", "outside", "tags"),
    [(None, None, []), (None, "a, FedSKC,,b", ["a", "FedSKC", "b"]), (["c"], "a", ["c"]), ([], "a", [])],
)
def test_default_tags_are_added_to_the_users_tags(option, outside, tags, tmp_path, monkeypatch):
    if outside:
        monkeypatch.setenv("WANDB_TAGS", outside)
    online = Online(monkeypatch)
    attach_logger(tmp_path, tags=option)
    assert online.given[0]["tags"] == list(dict.fromkeys([*tags, *LABELS.tags]))


@pytest.mark.thorough
def test_disabled_mode_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    words = ["--rounds", "1", *WANDB, *DRAWN, "--logger.log_model", "all"]
    outcome = tiny(tmp_path / "run", *words)
    assert outcome.err == ""
    assert not (tmp_path / "run" / "wandb").exists()
    assert len(rows(tmp_path / "run")) == 1


def test_wandb_sweep_sets_the_run(tmp_path, monkeypatch):
    """W&B warns if a project or an id is given to a run of a sweep."""
    for name, text in {"SWEEP_ID": "s", "RUN_ID": "r", "PROJECT": "p", "ENTITY": "e"}.items():
        monkeypatch.setenv(f"WANDB_{name}", text)
    online = Online(monkeypatch)
    attach_logger(tmp_path)
    attach_logger(tmp_path)
    assert [[given[key] for key in ("id", "project", "entity")] for given in online.given] == [[None] * 3] * 2
    assert online.given[0]["name"] == LABELS.name
    for name in ("SWEEP_ID", "RUN_ID", "PROJECT", "ENTITY"):
        monkeypatch.delenv(f"WANDB_{name}")
    attach_logger(tmp_path)  # resumed without the agent
    assert [online.given[2][key] for key in ("id", "project", "entity")] == ["id1", "p", "e"]


def test_a_logger_of_two_runs_keeps_no_names_of_the_first(tmp_path, monkeypatch):
    online, logger = Online(monkeypatch), WandbRoundLogger(tags=["mine"])
    for name in ("first", "second", "first"):
        labels = Labels(f"{name}-seed0", f"{name}-123456", [name])
        logger.attach(tmp_path / name, {"seed": 0}, labels)
        online.id = f"id-{name}"
        logger.finalize("success")
        logger.attach(tmp_path / name, {"seed": 0}, labels)
        logger.finalize("success")
    actual = [[given[key] for key in ("id", "name", "group", "tags")] for given in online.given]
    first, second = (
        ["first-seed0", "first-123456", ["mine", "first"]],
        ["second-seed0", "second-123456", ["mine", "second"]],
    )
    assert [given[1:] for given in actual] == [first, first, second, second, first, first]
    assert actual[0][0] is None
    assert actual[2][0] is None


def test_a_wandb_run_of_the_user_goes_on(tmp_path):
    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True, console="off")) as own:
        logger = WandbRoundLogger()
        logger.attach(tmp_path / "run", {"seed": 0}, LABELS)
        logger.finalize("success")
        assert wandb.run is own
        own.log({"x": 1})  # raises an error if the run is finished
        assert own.id != json.loads((tmp_path / "run" / "wandb" / "run.json").read_text())["id"]


def test_names_edited_online_are_kept(tmp_path, monkeypatch):
    """A run that was online is resumed only with the names in the config."""
    online = Online(monkeypatch)
    for options in ({}, {"offline": False}, {"offline": True}, {"offline": False, "name": "mine", "tags": ["x"]}):
        logger = attach_logger(tmp_path, **options)
    assert (logger.name, logger.save_dir, logger.version) == ("p", str(tmp_path), "id1")
    actual = [[given[key] for key in ("id", "name", "group", "tags")] for given in online.given]
    assert actual == [
        [None, LABELS.name, LABELS.group, LABELS.tags],
        ["id1", LABELS.name, LABELS.group, LABELS.tags],
        ["id1", None, None, []],
        ["id1", "mine", None, ["x", *LABELS.tags]],
    ]


def test_option_refused_by_wandb_gives_one_line(tmp_path):
    words = [*WANDB, "--run_dir", tmp_path / "run", "--logger.tags", json.dumps(["x" * 65])]
    (tmp_path / "own.yaml").write_text(TINY)
    code, _, err = run("fit", "--config", tmp_path / "own.yaml", *words)
    assert code == 2
    assert err.startswith("fl-lightning: error: logger.tags: ")
    assert "65 characters" in err
    assert err.count("\n") == 1


# --- Artifacts ---


def files_of(artifact, folder):
    """Copy an artifact's files to a folder, and return their content by path."""
    for one in artifact.manifest.contents:
        (folder / one.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(one.local_path, folder / one.path)
    return {path: content for path, content in contents(folder).items() if content is not None}


@pytest.mark.thorough
def test_log_model_all_logs_the_model_and_the_checkpoints(tmp_path):
    run_dir = tmp_path / "run"
    tiny(run_dir, "--rounds", "2", *WANDB, "--logger.log_model", "all")
    logged = Logged(run_dir)
    model, checkpoints = [one for one in of_kind(logged.records, "artifact") if one.type == "model"]
    run_id = of_kind(logged.records, "run")[0].run_id
    assert (model.name, checkpoints.name) == (f"model-{run_id}", f"checkpoints-{run_id}")
    assert files_of(model, tmp_path / "model") == {"model.pt": (run_dir / "final" / "model.pt").read_bytes()}
    fetched = files_of(checkpoints, tmp_path / "fetched")
    kept = ("config.yaml", "metrics.csv", "clients.csv", "checkpoints/", "clients/")
    assert fetched == {
        path: content for path, content in contents(run_dir).items() if path.startswith(kept) and content is not None
    }
    again = run("test", tmp_path / "fetched")
    assert again.code == 0
    assert again.out == run("test", run_dir).out
    assert run("fit", "--resume", tmp_path / "fetched", "--rounds", "3", "--logger", "null").code == 0


@pytest.mark.thorough
def test_log_model_without_a_global_model_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match=r"^logger.log_model: .*`all`"):
        experiment(tmp_path, Local(), rounds=1, logger=WandbRoundLogger(log_model=True)).fit()
    assert [one for one in of_kind(Logged(tmp_path).records, "artifact") if one.type == "model"] == []


def test_log_model_is_true_false_or_all():
    with pytest.raises(ConfigError, match=r"^logger.log_model: 'most'"):
        WandbRoundLogger(log_model="most")


@pytest.mark.thorough
def test_run_without_wandb_does_not_import_it(tmp_path):
    """Importing wandb creates two temporary folders, which a killed run would leave."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    code = "import sys; from fl_lightning.cli.main import main; sys.exit(main(sys.argv[1:]) or 'wandb' in sys.modules)"
    words = ["fit", "--config=digits_fedavg", "--rounds=1", "--engine=sequential", "--logger=null"]
    environment = os.environ | {"TMPDIR": str(temporary)}
    subprocess.run([sys.executable, "-c", code, *words, f"--run_dir={tmp_path / 'run'}"], env=environment, check=True)
    assert list(temporary.iterdir()) == []
