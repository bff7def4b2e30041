"""Bad input gets one line on stderr that names the key and the fix, has exit code 2, and changes no files."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import TINY, contents, run, tiny

OWN_MODULE = """
from torch import nn
from fl_lightning.models import Backbone

class TwoOutputs(Backbone):
    def __init__(self, in_shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 2), 64)

class NoBackbone(nn.Module):
    pass
"""

FIT = ["fit", "--config", "tiny.yaml"]
ARRAYS = [*FIT, "--scenario.partition", "IID", "--scenario.dataset", "Arrays", "--scenario.dataset.path"]
PARTITION = [*FIT, "--scenario.partition"]


def kind(name, words, *told, marks=()):
    """One kind of bad input: its name, the command, and what the line must say."""
    return pytest.param(words, told, id=name, marks=marks)


KINDS = [
    # The command line and the file
    kind("unlike any command", ["xyzzy"], "'xyzzy'", "Available: fit, test, watch, partition"),
    kind("unknown command", ["fitt"], "'fitt'", "Did you mean fit?"),
    kind("no config", ["fit"], "scenario.dataset, scenario.partition, model, algorithm", "--config"),
    kind(
        "missing config", ["fit", "--config", "nowhere.yaml"], "--config", "nowhere.yaml", "fl-lightning list configs"
    ),
    kind("shipped config in a folder that is not", ["fit", "--config", "./digits_fedskc.yaml"], "--config", "neither"),
    kind("config without a name", ["fit", "--config"], "--config", "expected one argument"),
    kind("config is a folder", ["fit", "--config", "."], "--config", "neither a file"),
    kind("config is binary", ["fit", "--config", "good.npz"], "--config", "good.npz is no readable YAML"),
    kind("YAML syntax", ["fit", "--config", "syntax.yaml"], "--config", "syntax.yaml is no readable YAML: line 2"),
    kind("YAML tab", ["fit", "--config", "tab.yaml"], "--config", "tab.yaml is no readable YAML: line 2", r"'\t'"),
    kind(
        "config is a list", ["fit", "--config", "list.yaml"], "--config", "list.yaml needs lines `key: value`", "list"
    ),
    kind("config is a word", ["fit", "--config", "word.yaml"], "--config", "word.yaml needs lines `key: value`", "str"),
    kind("config is empty", ["fit", "--config", "empty.yaml"], "--config", "empty.yaml needs lines `key: value`"),
    kind(
        "unknown list kind",
        ["list", "metods"],
        "'metods'",
        "algorithms, loss_terms, aggregators, graphs, datasets, models, partitions, objectives, engines, callbacks",
    ),
    kind("too many words", ["list", "configs", "more"], "unrecognized arguments: more"),
    # Keys
    kind("unknown key in YAML", ["fit", "--config", "key.yaml"], "'round'", "Did you mean rounds?"),
    kind(
        "unknown nested key in YAML", ["fit", "--config", "nested.yaml"], "'trainer.precisions'", "trainer.precision?"
    ),
    kind("several devices", [*FIT, "--trainer.devices", "2"], "trainer.devices", "one device"),
    kind("no epoch", [*FIT, "--trainer.max_epochs", "0"], "trainer.max_epochs: 0", "1 or more"),
    kind("no step", [*FIT, "--trainer.max_steps", "0"], "trainer.max_steps: 0", "1 or more"),
    kind(
        "no training batches",
        [*FIT, "--trainer.limit_train_batches", "0"],
        "trainer.limit_train_batches: 0",
        "1 or more",
    ),
    kind("work without end", [*FIT, "--trainer.max_epochs", "-1"], "trainer.max_epochs: -1", "never ends"),
    kind(
        "schedule of zero",
        [*FIT, "--round_lr_scheduler", "CosineAnnealingLR", "--round_lr_scheduler.T_max", "0"],
        "round_lr_scheduler",
    ),
    kind("more uploads than clients", [*FIT, "--min_clients", "99"], "min_clients: 99 is above"),
    kind("unknown key", [*FIT, "--algoritm.tau", "1"], "'algoritm.tau'", "Did you mean --algorithm.tau?"),
    kind("abbreviated key", [*FIT, "--scenario.client=3"], "'scenario.client'", "Did you mean --scenario.clients?"),
    kind("key of a trainer not offered", [*FIT, "--trainer.logger", "true"], "trainer.logger: ", "Use logger"),
    kind("unlike any key", [*FIT, "--xyzzy", "1"], "'xyzzy'", "See `fl-lightning fit --help`."),
    kind("unknown init_arg", [*FIT, "--algorithm.taw", "1"], "algorithm: FedSKC", "'taw'", "Did you mean tau?"),
    kind("unlike any init_arg", [*FIT, "--algorithm.mu", "1"], "FedSKC has no key 'mu'", "Available: tau, similar"),
    kind("null for a list", [*FIT, "--evaluation.metrics", "null"], "evaluation.metrics: got", "Leave it out"),
    kind("init_arg of no class", [*FIT, "--scenario.dataset.size", "1"], "Digits has no key 'size'. Available: none."),
    kind("unknown optimizer arg", [*FIT, "--optimizer.momentun", "1"], "optimizer: SGD", "Did you mean momentum?"),
    kind("without init_args", ["fit", "--config", "beside.yaml"], "scenario.partition", "stand under init_args"),
    kind("required init_arg", [*FIT, "--scenario.dataset", "Arrays"], "scenario.dataset: path must be given"),
    # Types
    kind("wrong type", [*FIT, "--rounds", "many"], "rounds: got 'many', expected int"),
    kind("wrong type in YAML", ["fit", "--config", "type.yaml"], "batch_size: got 'large', expected int"),
    kind("part of a round", [*FIT, "--rounds", "1.5"], "rounds: got '1.5', expected int"),
    kind("null for a number", [*FIT, "--rounds", "null"], "rounds: got 'None', expected int"),
    kind("null in YAML", ["fit", "--config", "null.yaml"], "rounds: null", "leave it out to get 10"),
    kind(
        "unknown choice",
        [*FIT, "--on_client_failure", "ignore"],
        "on_client_failure: got 'ignore', expected raise | drop",
    ),
    kind("wrong init_arg type", [*FIT, "--algorithm.tau", "hot"], "algorithm.tau: got 'hot', expected float"),
    kind(
        "unknown init_arg choice", [*FIT, "--algorithm.preset", "x"], "algorithm.preset: got 'x', expected paper | ref"
    ),
    kind("wrong optimizer type", [*FIT, "--optimizer.lr", "quick"], "optimizer.lr: got 'quick', expected float"),
    kind("bad precision", [*FIT, "--trainer.precision", "17"], "trainer.precision: got '17', expected 64 | 32 | 16 | "),
    kind(
        "one target, no list",
        [*FIT, "--evaluation.target_accuracies", "0.5"],
        "evaluation.target_accuracies: got '0.5', expected list",
    ),
    # Classes
    kind("unknown module", [*FIT, "--algorithm", "nowhere.FedFoo"], "algorithm: ", "No module named 'nowhere'"),
    kind(
        "unknown class path", [*FIT, "--model", "own_module.Other"], "model: ", "'own_module' has no attribute 'Other'"
    ),
    kind(
        "unknown class", [*FIT, "--algorithm", "FedFoo"], "algorithm: class 'FedFoo' not found", "Did you mean FedFomo?"
    ),
    kind("unknown optimizer", [*FIT, "--optimizer", "SGDD"], "optimizer: class 'SGDD' not found", "mean SGD?"),
    kind(
        "unknown logger",
        [*FIT, "--logger", "Paper"],
        "logger: class 'Paper' not found",
        "CSVLogger, MLFlowLogger, TensorBoardLogger, WandbRoundLogger",
    ),
    kind("unknown callback", [*FIT, "--callbacks", "[Foo]"], "callbacks: class 'Foo' not found", "EarlyStopping"),
    kind("unknown loss term", [*FIT, "--algorithm.loss_terms", "[Foo]"], "algorithm.loss_terms: class 'Foo' not found"),
    kind(
        "a model for an algorithm", [*FIT, "--algorithm", "fl_lightning.models.MLP"], "algorithm: ", "is no Algorithm"
    ),
    kind(
        "no backbone",
        [*FIT, "--model", "own_module.NoBackbone"],
        "model: own_module.NoBackbone is no Backbone",
        "FromModule",
    ),
    # Values
    kind("no rounds", [*FIT, "--rounds", "0"], "rounds: 0 is below 1"),
    kind("no batch", [*FIT, "--batch_size", "0"], "batch_size: 0 is below 1"),
    kind("negative seed", [*FIT, "--seed", "-1"], "seed: -1 is below 0"),
    kind(
        "more participants than clients",
        [*FIT, "--clients_per_round", "5"],
        "clients_per_round: 5",
        "1 and scenario.cl",
    ),
    kind("no clients", [*FIT, "--scenario.clients", "0"], "scenario.clients: 0 is below 1"),
    kind("local_test", [*FIT, "--scenario.local_test", "1"], "scenario.local_test: 1.0 is outside [0, 1)"),
    kind(
        "no checkpoints",
        [*FIT, "--callbacks+=Checkpointing", "--callbacks.every=0"],
        "callbacks: Checkpointing.every: 0 is below 1",
    ),
    kind(
        "percent",
        [*FIT, "--evaluation.target_accuracies", "[80]"],
        "evaluation.target_accuracies: 80.0",
        "(0, 1]",
        "not a percentage",
    ),
    kind("tau 0", [*FIT, "--algorithm.tau", "0"], "algorithm.tau: 0.0 is not above 0", "0.08"),
    kind("beta", [*FIT, "--algorithm.beta", "1.5"], "algorithm.beta: 1.5 is outside [0, 1]", "0.95"),
    kind("bad lr", [*FIT, "--optimizer.lr", "-1"], "optimizer: Invalid learning rate: -1"),
    kind(
        "no patience", [*FIT, "--callbacks", "[{class_path: EarlyStopping, init_args: {patience: 0}}]"], "patience: 0"
    ),
    kind("unknown accelerator", [*FIT, "--trainer.accelerator", "abacus"], "trainer: ", "'abacus'", "cpu"),
    kind("absent accelerator", [*FIT, "--trainer.accelerator", "tpu"], "trainer: ", "torch_xla", "pip install"),
    # Who holds what
    kind(
        "alpha 0",
        [*PARTITION, "Dirichlet", "--scenario.partition.alpha", "0"],
        "scenario.partition.alpha: 0.0",
        "outside (0, 1e6]",
    ),
    kind(
        "min_samples",
        [*FIT, "--scenario.partition.min_samples", "400"],
        "scenario.partition.min_samples",
        "Lower min_s",
    ),
    kind(
        "too many classes",
        [*PARTITION, "Pathological", "--scenario.partition.classes_per_client", "11"],
        "scenario.partition.classes_per_client: 11, but the dataset has 10 classes",
    ),
    kind(
        "empty client",
        [*PARTITION, "IID", "--scenario.clients", "2000"],
        "scenario.clients: 2000 is above the 1437 training samples",
        "Each client needs one",
    ),
    # Data
    kind("missing npz", [*ARRAYS, "nowhere.npz"], "scenario.dataset.path: nowhere.npz: no such file"),
    kind("corrupt npz", [*ARRAYS, "corrupt.npz"], "scenario.dataset.path: corrupt.npz", "Write it with numpy.savez"),
    kind("cut npz", [*ARRAYS, "cut.npz"], "scenario.dataset.path: cut.npz", "Write it with numpy.savez"),
    kind("no npz", [*ARRAYS, "tiny.yaml"], "scenario.dataset.path: tiny.yaml", "Write it with numpy.savez"),
    kind("npz without a key", [*ARRAYS, "part.npz"], "part.npz: has no x_test, y_test", "It needs x_train, y_train"),
    kind("negative label", [*ARRAYS, "negative.npz"], "y_train holds label -1", "Labels count from 0"),
    kind("label no whole number", [*ARRAYS, "float.npz"], "y_test needs float32 numbers like the other labels"),
    kind("label too large", [*ARRAYS, "good.npz", "--scenario.dataset.num_classes", "3"], "label 3", "num_classes 3"),
    kind("inputs with NaN", [*ARRAYS, "nan.npz"], "scenario.dataset.path: nan.npz", "x_train holds NaN or Inf"),
    kind("more labels than inputs", [*ARRAYS, "uneven.npz"], "x_train has 39 rows and y_train 40", "need equally many"),
    kind(
        "missing files",
        [*FIT, "--scenario.dataset", "CIFAR10"],
        "scenario.dataset: CIFAR10: files not found",
        "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}",
        "scenario.dataset.download true",
    ),
    # Model and data
    kind(
        "output size", [*FIT, "--model", "own_module.TwoOutputs"], "model: ", "(2,)", "10 classes", "one number a class"
    ),
    kind(
        "image model on flat data",
        [*ARRAYS, "good.npz", "--model", "CNN"],
        "model: ",
        "needs images",
        "(8,)",
        "use MLP",
    ),
    kind("no width", [*FIT, "--model.hidden", "[]"], "model.hidden needs at least one width"),
    # Folders
    kind("unwritable run folder", [*FIT, "--run_dir", "tiny.yaml/run"], "tiny.yaml/run cannot be written to"),
    kind("run_dir holds a run", [*FIT, "--run_dir", "done"], "run_dir: done holds a run already", "Resume it"),
    kind(
        "unwritable --out",
        ["partition", "--config", "tiny.yaml", "--out", "tiny.yaml/x"],
        "--out: tiny.yaml/x cannot be",
    ),
    kind("resume of nothing", ["fit", "--resume", "nowhere"], "nowhere: folder not found"),
    kind("resume of a file", ["fit", "--resume", "tiny.yaml"], "tiny.yaml is no run"),
    kind("resume without a name", ["fit", "--resume"], "--resume", "expected one argument"),
    kind("resume of a run with no config", ["fit", "--resume", "bare", "--config", "tiny.yaml"], "bare is no run"),
    kind(
        "changed key",
        ["fit", "--resume", "done", "--batch_size", "7"],
        "the config differs from the run's",
        "batch_size (16 -> 7)",
        "start a new run",
    ),
    kind(
        "changed init_arg",
        ["fit", "--resume", "done", "--algorithm.tau", "1"],
        "the config differs",
        "algorithm.tau (0.08 -> 1.0)",
    ),
    kind(
        "changed precision",
        ["fit", "--resume=done", "--trainer.precision=bf16-mixed"],
        "trainer.precision (None -> bf16",
    ),
    kind(
        "changed class",
        ["fit", "--resume", "done", "--algorithm", "FedAvg"],
        "the config differs from the run's: algorithm (fl_lightning.FedSKC -> fl_lightning.FedAvg). Set these",
    ),
    kind(
        "resume with another config",
        ["fit", "--resume", "done", "--config", "digits_fedavg.yaml"],
        "the config differs",
    ),
    kind("resume of a broken config", ["fit", "--resume", "broken"], "config.yaml is no readable YAML: line 1"),
    kind(
        "every checkpoint damaged",
        ["fit", "--resume", "damaged", "--rounds", "9"],
        "round-000003 is damaged: state.pt does not match its checksum",
        "start the run again",
    ),
    kind(
        "metrics.csv cut off",
        ["fit", "--resume", "cut"],
        "metrics.csv holds 1 of rounds 1 to 3",
        "No earlier checkpoint is valid either",
        "Restore",
    ),
    kind("test of nothing", ["test", "nowhere"], "nowhere: folder not found"),
    kind("test without a run", ["test"], "run: "),
    kind("test without a checkpoint", ["test", "bare-config"], "bare-config holds a run", "but no checkpoint"),
    kind(
        "test of a round without",
        ["test", "done", "--checkpoint", "9"],
        "--checkpoint",
        "'9'",
        "last, best and rounds 3",
    ),
    kind(
        "best of no rounds", ["test", "bare-config", "--checkpoint", "best"], "--checkpoint", "no round is the best yet"
    ),
]


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A folder with a finished run, what else a run can come to, and files that are bad in many ways."""
    folder = tmp_path_factory.mktemp("example")
    tiny(folder / "done")
    (folder / "done.yaml").rename(folder / "tiny.yaml")
    for name in ("damaged", "cut", "broken", "bare", "bare-config"):
        shutil.copytree(folder / "done", folder / name)
    for path in (folder / "damaged" / "checkpoints").glob("*/state.pt"):
        path.write_bytes(path.read_bytes()[:-1])
    lines = (folder / "cut" / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "cut" / "metrics.csv").write_text("".join(lines[:2]))
    (folder / "broken" / "config.yaml").write_text("rounds: [")
    (folder / "bare" / "config.yaml").unlink()
    shutil.rmtree(folder / "bare-config" / "checkpoints")

    texts = {
        "syntax": "rounds: [1, 2\nmodel: {\n",
        "tab": "rounds:\n\t- 1\n",
        "list": "- rounds\n- model\n",
        "word": "rounds\n",
        "empty": "",
        "key": TINY.replace("rounds:", "round:"),
        "nested": TINY.replace("max_epochs: 1", "precisions: 16-mixed"),
        "null": TINY.replace("rounds: 3", "rounds: null"),
        "type": TINY.replace("batch_size: 16", "batch_size: large"),
        "beside": TINY.replace("init_args: {alpha: 0.5, min_samples: 20}", "alpha: 0.5"),
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "own_module.py").write_text(OWN_MODULE)

    x, y = np.linspace(0, 1, 320, dtype=np.float32).reshape(40, 8), np.arange(40) % 4
    good = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    np.savez(folder / "good.npz", **good)
    np.savez(folder / "part.npz", x_train=x, y_train=y)
    np.savez(folder / "negative.npz", **good | {"y_train": y - 1})
    np.savez(folder / "float.npz", **good | {"y_train": y * 1.0})
    np.savez(folder / "nan.npz", **good | {"x_train": np.full_like(x, np.nan)})
    np.savez(folder / "uneven.npz", **good | {"x_train": x[1:]})
    (folder / "corrupt.npz").write_bytes(b"PK\x03\x04 and then nothing of the kind")
    (folder / "cut.npz").write_bytes((folder / "good.npz").read_bytes()[:-100])
    return folder


@pytest.mark.fast_cases(15)
@pytest.mark.parametrize(("words", "told"), KINDS)
def test_one_line_says_what_is_wrong_and_nothing_is_lost(words, told, example, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    shutil.copytree(example, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    before = contents(folder)

    code, out, err = run(*words)

    lines = [line for line in err.splitlines() if not line.startswith("fl-lightning: warning: checkpoint ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("fl-lightning: error: ")
    for fragment in told:
        assert fragment in lines[0]
    assert "Traceback" not in out + err
    assert code == 2
    assert contents(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def test_there_are_kinds_enough():
    assert len(KINDS) >= 30
    assert len({param.id for param in KINDS}) == len(KINDS)


@pytest.mark.thorough
def test_the_folder_is_good_but_for_the_bad_input(example, tmp_path, monkeypatch):
    """Each message above is about the one thing that is wrong: without it the same commands work."""
    folder = Path(shutil.copytree(example, tmp_path / "here"))
    monkeypatch.chdir(folder)
    for words in (FIT, [*ARRAYS, "good.npz"], [*PARTITION, "IID"], ["fit", "--resume", "done"], ["test", "done"]):
        outcome = run(*words)
        assert (outcome.code, outcome.err) == (0, "")
