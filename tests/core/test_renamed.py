"""Old names of options and classes are refused in a user's config, and read in a recorded one."""

from importlib import import_module

import pytest

from fl_lightning.cli.main import main
from fl_lightning.core import renamed
from fl_lightning.core.config import flatten
from fl_lightning.core.errors import ConfigError
from fl_lightning.runs.fingerprint import Fingerprint, settings
from fl_lightning.runs.reader import open_run_folder
from fl_lightning.runs.trust import restrict_and_load_config

OLD = {
    "goals": [0.5],
    "evaluation": {"rate": 3},
    "scenario": {"partition": {"class_path": "fl_lightning.data.Dealt", "init_args": {"alfa": 0.1}}},
    "save_every": 5,
    "save_most": 3,
    "callbacks": [{"class_path": "fl_lightning.callbacks.RowNorms", "init_args": {}}],
    "logger": {"class_path": "fl_lightning.wandb_logger.WandbRoundLogger", "init_args": {"name": "Dealt"}},
}
CHECKPOINTING = {"class_path": "fl_lightning.callbacks.Checkpointing", "init_args": {"every": 5, "keep": 3}}
NEW = {
    "evaluation": {"rate": 3, "target_accuracies": [0.5]},
    "scenario": {"partition": {"class_path": "fl_lightning.data.Dirichlet", "init_args": {"alpha": 0.1}}},
    "callbacks": [*OLD["callbacks"], CHECKPOINTING],
    "logger": {"class_path": "fl_lightning.loggers.wandb.WandbRoundLogger", "init_args": {"name": "Dealt"}},
}


@pytest.fixture(autouse=True)
def _entries(monkeypatch):
    options = {"goals": "evaluation.target_accuracies", "scenario.partition.alfa": "scenario.partition.alpha"}
    monkeypatch.setattr(renamed, "OPTIONS", options)
    moved = {"save_every": ("Checkpointing", "every"), "save_most": ("Checkpointing", "keep")}
    monkeypatch.setattr(renamed, "CALLBACK_OPTIONS", moved)
    monkeypatch.setattr(renamed, "CLASSES", {"Dealt": "Dirichlet"})


def test_a_recorded_config_is_read_under_the_new_names():
    assert renamed.update_config(OLD) == NEW
    assert renamed.update_settings(settings(OLD)) == settings(NEW)
    assert renamed.update_config(NEW) == NEW
    with_own = OLD | {"callbacks": [{"class_path": "Checkpointing", "init_args": {"every": 2}}]}
    assert renamed.update_config(with_own)["callbacks"][0]["init_args"] == {"every": 2, "keep": 3}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fl_lightning.data.pictures.ImageFolder", "fl_lightning.data.image_folder.ImageFolder"),
        ("fl_lightning.data.natural.Dealt", "fl_lightning.data.natural_partitions.Dirichlet"),
        ("mine.data.pictures.ImageFolder", "mine.data.pictures.ImageFolder"),
    ],
)
def test_a_recorded_class_path_is_updated_to_the_new_module(old, new):
    assert renamed.update_path(old) == new


@pytest.mark.parametrize(
    "config", [{"scenario": None, "save_every": 1, "callbacks": "?"}, {"evaluation": [], "goals": 1}]
)
def test_an_invalid_recorded_config_is_not_repaired(config):
    assert renamed.update_config(config).keys() <= config.keys()


def test_a_run_is_opened_and_resumed_under_the_new_names(tmp_path):
    (tmp_path / "config.yaml").write_text(str(OLD))
    (tmp_path / "metrics.csv").write_text("round,global/acc\n1,0.5\n")
    assert open_run_folder(tmp_path).config == NEW
    assert restrict_and_load_config(tmp_path, NEW.keys(), dict, trust=True) == NEW
    fingerprint = Fingerprint(flatten(OLD), made_with={"fl-lightning": "0.1.0"})
    fingerprint.check_config(NEW)
    with pytest.raises(ConfigError, match=r"the config differs from the run's: .*partition"):
        fingerprint.check_config(NEW | {"scenario": {"partition": "fl_lightning.data.IID"}})


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--goals", "[0.9]"], "goals: renamed to evaluation.target_accuracies. Use the new name."),
        (["--scenario.partition", "Dealt"], "scenario.partition: Dealt is renamed to Dirichlet. Use the new name."),
        (["--scenario.partition", "fl_lightning.data.Dealt"], "fl_lightning.data.Dealt is renamed to Dirichlet."),
        (["--save_every", "5"], "save_every: moved to the callback Checkpointing, as every. Use"),
    ],
)
def test_a_users_old_name_is_refused_with_the_new_one(words, line, capsys, tmp_path):
    assert main(["fit", "--config", "digits_fedavg", *words]) == 2
    assert line in capsys.readouterr().err
    config = tmp_path / "mine.yaml"
    config.write_text("goals: [0.9]\n")
    assert main(["fit", "--config", str(config)]) == 2
    assert "goals: renamed to evaluation.target_accuracies. Use the new name." in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(renamed.MODULES))
def test_a_module_or_class_that_moved_is_found_under_its_new_path(path):
    name = path.rpartition(".")[2]
    moved = renamed.update_path(f"fl_lightning.{path}" if name[0].isupper() else f"fl_lightning.{path}.anything")
    home, _, attribute = moved.rpartition(".")
    assert moved != f"fl_lightning.{path}"
    assert hasattr(import_module(home), attribute) or attribute == "anything"
