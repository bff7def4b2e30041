"""The commands, the config and the table of docs/adapters.md."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("peft")

import torch
import transformers

from fl_lightning import ClientModule
from fl_lightning.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adapters.md").read_text()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files of the example, from fewer steps of training."""
    spec = importlib.util.spec_from_file_location("tiny_bert", ROOT / "examples" / "tiny_bert.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.chdir(tmp_path)
    example.write_model("tiny-bert", steps=2)
    example.write_texts("tokens.npz", samples=120)
    Path("adapters.yaml").write_text(re.search(r'```yaml title="adapters.yaml"\n(.*?)```', PAGE, re.S)[1])
    return tmp_path


def test_the_commands_of_the_page_run(folder, capsys):
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    lines = block.splitlines()
    assert len(lines) == 8
    for line in lines:
        words = shlex.split(line)[1:]
        assert main([*words, *(["--rounds", "1", "--trainer.max_epochs", "1"] if words[0] == "fit" else [])]) == 0
    out, err = capsys.readouterr()
    assert "model: Adapted, 26,562 parameters, 25,472 of them frozen" in out
    assert not err
    exported = torch.load("adapters.pt", weights_only=True)
    assert exported["head.weight"].shape == (2, 32)
    example = re.search(r"```python\n(from peft .*?)```", PAGE, re.S)[1]
    exec(example, names := {})
    head = names["model"].base_model.model.classifier.modules_to_save["default"]
    assert torch.equal(head.weight, exported["head.weight"])


def test_an_exported_checkpoint_is_opened_without_the_run(folder):
    assert main(["fit", "--config", "adapters.yaml", "--rounds", "1", "--run_dir", "run"]) == 0
    assert main(["export", "run", "--out", "adapters.ckpt"]) == 0
    module = ClientModule.load_from_checkpoint("adapters.ckpt")
    assert type(module.backbone).__name__ == "Adapted"
    exported = torch.load("adapters.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(module.backbone.head.weight, exported["backbone.head.weight"])


def test_an_unknown_target_is_one_line(folder, capsys):
    code = main(["fit", "--config", "adapters.yaml", "--model.adapter.targets", "[q_proj]"])
    line = " ".join(capsys.readouterr().err.split())
    assert code == 2
    assert line == re.search(r"fl-lightning: error: model\.adapter\.targets.*", PAGE)[0]


@pytest.mark.parametrize("kind", ["Adapted", "Pretrained"])
def test_the_models_have_help(kind, capsys):
    assert main(["fit", "--model.help", kind]) == 0
    assert f"{kind}: " in capsys.readouterr().out


SIZES = {
    "RoBERTa base, 2 classes": (
        transformers.RobertaForSequenceClassification,
        lambda: transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1),
        ("query", "value"),
    ),
    "Llama 2, 7B": (transformers.LlamaForCausalLM, transformers.LlamaConfig, ("q_proj", "v_proj")),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_table_of_memory_follows_from_the_formula(name):
    kind, config, targets = SIZES[name]
    with torch.device("meta"):  # allocates nothing
        model = kind(config())
    layers = [layer for path, layer in model.named_modules() if path.rpartition(".")[2] in targets]
    parameters = sum(p.numel() for p in model.parameters())
    head = sum(p.numel() for path, p in model.named_parameters() if path.startswith("classifier."))
    trained = sum(8 * sum(layer.weight.shape) for layer in layers) + head
    base = sum(layer.weight.numel() for layer in layers)
    frozen = parameters - head
    megabytes = [4 * frozen, 2 * frozen, 16 * trained, 4 * trained, 4 * (trained + base)]
    row = re.search(rf"^\| {re.escape(name)} \| (.+) \|$", PAGE, re.M)[1].split(" | ")
    assert row[:2] == [f"{parameters:,}", f"{trained:,}"]
    assert row[2:] == [f"{size / 1e6:.1f} MB" for size in megabytes]
