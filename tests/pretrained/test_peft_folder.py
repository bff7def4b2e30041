"""`export --peft`: the folder that peft loads onto the base, and refusals."""

import json
import shutil
from functools import partial

import pytest

pytest.importorskip("peft")

import torch
import yaml
from peft import PeftModel
from tiny_models import TARGETS, TASKS, save_model, save_texts

from fl_lightning.analysis.export import Network
from fl_lightning.analysis.peft_folder import write_adapter
from fl_lightning.cli.main import main
from fl_lightning.core.errors import ConfigError
from fl_lightning.models import Adapted, LoRA, Pretrained

pytestmark = pytest.mark.usefixtures("no_network")
IDS = torch.tensor([[5, 9, 7, 12, 0, 0], [8, 1, 3, 4, 6, 2]])


def network(folder, name, task="sequence_classification", **options):
    """Return a network with adapters whose trained parameters are random, as an export gets it."""
    base = {"class_path": "fl_lightning.models.Pretrained", "init_args": {"path": str(folder), "task": task}}
    model = {"class_path": "fl_lightning.models.Adapted", "init_args": {"base": base}}
    targets = TARGETS.get(name, ["query", "value"])
    adapter = LoRA(targets=targets, **{"r": 2, "alpha": 8} | options)
    adapted = Adapted((6,), 2, base=partial(Pretrained, path=str(folder), task=task), adapter=adapter)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.5)
    return Network(adapted, model, (6,), 2, IDS)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert", {}),
        ("bert", {"rslora": True, "modules_to_save": ["pooler.dense"]}),
        ("roberta", {}),
        ("gpt2", {}),
        ("gpt2", {"task": "causal_lm"}),
    ],
)
def test_peft_loads_the_folder_onto_the_base(tmp_path, name, options):
    task = options.get("task", "sequence_classification")
    save_model(tmp_path / "base", name, task)
    trained = network(tmp_path / "base", name, **options)
    write_adapter(trained, tmp_path / "adapter")
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    base = TASKS[task].from_pretrained(tmp_path / "base", local_files_only=True)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        logits = loaded(IDS, attention_mask=(base.config.pad_token_id != IDS).long()).logits
    torch.testing.assert_close(logits, trained.outputs[:2], rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 8)
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


def test_frozen_weights_that_differ_from_the_folder_are_refused(tmp_path):
    save_model(tmp_path / "base", "bert")
    trained = network(tmp_path / "base", "bert")
    shutil.rmtree(tmp_path / "base")
    save_model(tmp_path / "base", "bert")  # other random weights
    with pytest.raises(ConfigError, match=r"^--peft: "):
        write_adapter(trained, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def run_config(model):
    """Return the config of a short run on texts."""
    return {
        "scenario": {
            "dataset": {"class_path": "Arrays", "init_args": {"path": "texts.npz"}},
            "partition": {"class_path": "Dirichlet", "init_args": {"alpha": 1.0, "min_samples": 12}},
            "clients": 3,
        },
        "model": model,
        "algorithm": "FedAvg",
        "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1}},
        "rounds": 1,
        "trainer": {"max_epochs": 1, "accelerator": "cpu"},
        "logger": None,
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a tiny BERT and texts, as the working folder."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "bert", "bert")
    save_texts(tmp_path / "texts.npz")
    return tmp_path


def error_line(capsys, *words):
    assert main(["export", *words]) == 2
    return " ".join(capsys.readouterr().err.split()).removeprefix("fl-lightning: error: ")


def test_a_run_is_exported_with_its_head(folder, capsys):
    base = {"class_path": "Pretrained", "init_args": {"path": "bert"}}
    adapter = {"class_path": "LoRA", "init_args": {"r": 2, "alpha": 4, "targets": ["query"]}}
    config = run_config({"class_path": "Adapted", "init_args": {"base": base, "adapter": adapter}})
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "run.yaml", "--algorithm", "FedIT", "--run_dir", "run"]) == 0
    capsys.readouterr()
    assert error_line(capsys, "run", "-o", "adapter", "--peft", "--merge").startswith("--merge: ")
    assert main(["export", "run", "-o", "adapter", "--peft"]) == 0
    assert "wrote adapter (peft's folder, 0." in capsys.readouterr().out
    base = TASKS["sequence_classification"].from_pretrained("bert", local_files_only=True)
    loaded = PeftModel.from_pretrained(base, "adapter")
    state = torch.load("run/final/model.pt", weights_only=True)
    head = loaded.base_model.model.classifier.modules_to_save["default"].weight
    assert torch.equal(head, state["head.weight"])
    assert error_line(capsys, "run", "-o", "adapter", "--peft").startswith("-o: ")


def test_a_model_without_adapters_is_refused(folder, capsys):
    config = run_config({"class_path": "Pretrained", "init_args": {"path": "bert"}})
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "run.yaml", "--run_dir", "run"]) == 0
    capsys.readouterr()
    assert error_line(capsys, "run", "-o", "adapter", "--peft").startswith("--peft: ")
    assert not (folder / "adapter").exists()
