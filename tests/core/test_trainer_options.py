"""Every option of Lightning's `Trainer` is supported, or refused with a replacement."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import yaml
from commands import TINY, run
from experiments import experiment

from fl_lightning import FederatedOrchestrator
from fl_lightning.cli.commands import fit
from fl_lightning.cli.experiment import experiment_parser
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.trainer_options import TRAINER_FIXES, TRAINER_KEYS

OPTIONS = set(inspect.signature(L.Trainer).parameters)


def test_every_option_is_either_supported_or_has_a_replacement():
    assert not TRAINER_KEYS & TRAINER_FIXES.keys()
    assert TRAINER_KEYS | TRAINER_FIXES.keys() == OPTIONS


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", sorted(OPTIONS - TRAINER_KEYS))
def test_an_unsupported_option_is_refused_with_its_replacement(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    config = yaml.safe_load(TINY)
    config["trainer"][name] = 1
    Path("bad.yaml").write_text(yaml.safe_dump(config))
    message = f"fl-lightning: error: trainer.{name}: {TRAINER_FIXES[name]}\n"
    assert run("fit", "--config", "tiny.yaml", f"--trainer.{name}", "1") == (2, "", message)
    assert run("fit", "--config", "bad.yaml") == (2, "", message)
    with pytest.raises(ConfigError, match=f"^{re.escape(message[21:-1])}$"):
        experiment(tmp_path / "run", trainer={name: None}).fit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml", "tiny.yaml"]


def test_the_replacements_are_keys_of_an_experiment():
    keys = set(experiment_parser().get_defaults().keys())
    own = {word for fix in TRAINER_FIXES.values() for word in re.findall(r"\b(?:trainer|scenario)\.\w+", fix)}
    assert own <= keys
    for key in ("client_callbacks", "callbacks", "evaluation.every", "run_dir"):
        assert key in keys
        assert any(key in fix for fix in TRAINER_FIXES.values())


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", sorted(TRAINER_KEYS))
def test_a_supported_option_reaches_the_trainer(name, tmp_path, monkeypatch):
    values = {"accelerator": "cpu", "precision": "64-true", "gradient_clip_algorithm": "norm", "deterministic": True}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit, "print_results", lambda *args: None)
    given = []

    def fitted(self, *rest):
        given.append(self.training.trainer)
        return SimpleNamespace(summary={})

    monkeypatch.setattr(FederatedOrchestrator, "fit", fitted)
    Path("tiny.yaml").write_text(TINY)
    value = values.get(name, True if name in ("benchmark", "detect_anomaly") else 1)
    outcome = run("fit", "--config", "tiny.yaml", f"--trainer.{name}", str(value))
    assert outcome.code == 0, outcome.err
    assert str(given[0][name]) == str(value)


def test_an_unknown_option_is_refused_with_all_supported_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"^trainer.frobnicate: .*Available: acc"):
        experiment(tmp_path, trainer={"frobnicate": 1}).fit()
