"""Bad input gets one line on stderr that names the key and the fix, has exit code 2, and changes no files."""

import shlex
import shutil
import sys

import numpy as np
import pytest
from commands import TINY, contents, run, tiny

OWN_MODULE = """
from torch import nn
from fl_lightning.models import Backbone

class TwoOutputs(Backbone):
    def __init__(self, in_shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 2), 64)

class NoForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

class Narrow(nn.Sequential):
    def __init__(self, classes: int = 3):
        super().__init__(nn.Flatten(), nn.Linear(64, classes))

def function(**options) -> Narrow:
    return Narrow()

def typed(num_classes: int, hidden: int = 8) -> nn.Module:
    return Narrow(num_classes)

def untyped(optimizer, steps=2):
    return optimizer
"""

FIT = "fit --config tiny.yaml"
ARRAYS = f"{FIT} --scenario.partition IID --scenario.dataset Arrays --scenario.dataset.path"
PARTITION = f"{FIT} --scenario.partition"

LINES = {
    # The command line and the file
    "xyzzy": ["'xyzzy'", "fit, test, watch, partition"],
    "fit": ["scenario.dataset, scenario.partition, model, algorithm", "--config"],
    "fit --config nowhere.yaml": ["--config", "nowhere.yaml", "fl-lightning list configs"],
    "fit --config ./digits_fedskc.yaml": ["--config", "neither"],
    "fit --config": ["--config", "expected one argument"],
    "fit --config .": ["--config", "neither a file"],
    "fit --config good.npz": ["--config", "good.npz is no readable YAML"],
    "fit --config syntax.yaml": ["--config", "syntax.yaml is no readable YAML: line 2"],
    "fit --config tab.yaml": ["--config", "tab.yaml is no readable YAML: line 2", "'\\t'"],
    "fit --config list.yaml": ["--config", "list.yaml needs lines `key: value`", "list"],
    "fit --config word.yaml": ["--config", "word.yaml needs lines `key: value`", "str"],
    "fit --config empty.yaml": ["--config", "empty.yaml needs lines `key: value`"],
    "list metods": ["'metods'", "algorithms, loss_terms, aggregators"],
    "list configs more": ["unrecognized arguments: more"],
    # Keys
    "fit --config key.yaml": ["'round'", "Did you mean rounds?"],
    "fit --config nested.yaml": ["'trainer.precisions'", "trainer.precision?"],
    f"{FIT} --trainer.devices 2": ["trainer.devices", "one device"],
    f"{FIT} --trainer.max_epochs 0": ["trainer.max_epochs: with 0", "1 or more"],
    f"{FIT} --trainer.max_steps 0": ["trainer.max_steps: with 0", "1 or more"],
    f"{FIT} --trainer.limit_train_batches 0": ["trainer.limit_train_batches: with 0", "1 or more"],
    f"{FIT} --trainer.max_epochs -1": ["trainer.max_epochs: -1", "never ends"],
    f"{FIT} --round_lr_scheduler CosineAnnealingLR --round_lr_scheduler.T_max 0": ["round_lr_scheduler"],
    f"{FIT} --min_clients 99": ["min_clients: 99 is above"],
    f"{FIT} --scenario.client=3": ["'scenario.client'", "Did you mean --scenario.clients?"],
    f"{FIT} --algorithm.taw 1": ["algorithm: FedSKC", "'taw'", "Did you mean tau?"],
    f"{FIT} --algorithm.mu 1": ["FedSKC has no key 'mu'", "Available: tau, similar"],
    f"{FIT} --evaluation.metrics null": ["evaluation.metrics: got", "Leave it out"],
    f"{FIT} --scenario.dataset.size 1": ["Digits", "'size'"],
    f"{FIT} --optimizer.momentun 1": ["optimizer: SGD", "Did you mean momentum?"],
    "fit --config beside.yaml": ["scenario.partition", "belong under init_args"],
    f"{FIT} --scenario.dataset Arrays": ["scenario.dataset: path must be given"],
    f"{FIT} --model torch.nn.Linear": ["model: in_features, out_features"],
    # Types
    f"{FIT} --rounds many": ["rounds: got 'many', expected int"],
    "fit --config type.yaml": ["batch_size: got 'large', expected int"],
    f"{FIT} --rounds 1.5": ["rounds: got '1.5', expected int"],
    f"{FIT} --rounds null": ["rounds: got 'None', expected int"],
    "fit --config null.yaml": ["rounds: null", "leave it out to get 10"],
    f"{FIT} --on_client_failure ignore": ["on_client_failure: got 'ignore', expected raise | drop"],
    f"{FIT} --algorithm.tau hot": ["algorithm.tau: got 'hot', expected float"],
    f"{FIT} --algorithm.preset x": ["algorithm.preset: got 'x', expected paper | ref"],
    f"{FIT} --optimizer.lr quick": ["optimizer.lr: got 'quick', expected float"],
    f"{FIT} --trainer.precision 17": ["trainer.precision: got '17', expected 64 | 32 | 16 | "],
    f"{FIT} --evaluation.target_accuracies 0.5": ["evaluation.target_accuracies: got '0.5', expected list"],
    # Classes
    f"{FIT} --algorithm nowhere.FedFoo": ["algorithm: 'nowhere.FedFoo': No module named 'nowhere'", "PYTHONPATH"],
    f"{FIT} --model own_module.Other": ["model: ", "'own_module' has no attribute 'Other'"],
    f"{FIT} --logger Paper": ["logger: class 'Paper' not found", "CSVLogger, MLFlowLogger, TensorBoardLogger, Wandb"],
    f"{FIT} --algorithm fl_lightning.models.MLP": ["algorithm: ", "is no Algorithm"],
    f"{FIT} --model own_module.NoForward": ["model: Module [NoForward] is missing", "forward"],
    f"{FIT} --model torch.optim.SGD": ["model: torch.optim.SGD is no nn.Module"],
    f"{FIT} --model own_module.Narrow": ["model: forward returned (3,) outputs", "Did you mean --model.classes 10?"],
    f"{FIT} --model own_module.function": ["model: own_module.function ", "--model.module own_module.f"],
    f"{FIT} --model own_module.untyped": ["model: own_module.untyped ", "--model FromModule"],
    f"{FIT} --model own_module.typed --model.hidden 4": ["model: a function"],
    f"{FIT} --lr_scheduler own_module.untyped": ["lr_scheduler: own_module.untyped "],
    f"{FIT} --optimizer own_module.untyped": ["optimizer: own_module.untyped "],
    f"{FIT} --model torchvision.models.resnet18": ["model: ", "--model FromModule --model.module torchvision"],
    # Values
    f"{FIT} --rounds 0": ["rounds: 0 is below 1"],
    f"{FIT} --batch_size 0": ["batch_size: 0 is below 1"],
    f"{FIT} --seed -1": ["seed: -1 is below 0"],
    f"{FIT} --clients_per_round 5": ["clients_per_round: 5", "between 1 and 4, "],
    f"{FIT} --scenario.clients 0": ["scenario.clients: 0 is below 1"],
    f"{FIT} --scenario.local_test 1": ["scenario.local_test: 1.0 is outside [0, 1)"],
    f"{FIT} --callbacks+=Checkpointing --callbacks.every=0": ["callbacks: Checkpointing.every: 0 is below 1"],
    f"{FIT} --evaluation.target_accuracies [80]": ["evaluation.target_accuracies: 80.0", "(0, 1]", "not a percentage"],
    f"{FIT} --algorithm.tau 0": ["algorithm.tau: 0.0 is not above 0", "0.08"],
    f"{FIT} --algorithm.beta 1.5": ["algorithm.beta: 1.5 is outside [0, 1]", "0.95"],
    f"{FIT} --optimizer.lr -1": ["optimizer: Invalid learning rate: -1"],
    f"{FIT} --callbacks '[{{class_path: EarlyStopping, init_args: {{patience: 0}}}}]'": ["patience: 0"],
    f"{FIT} --trainer.accelerator abacus": ["trainer: ", "'abacus'", "cpu"],
    f"{FIT} --trainer.accelerator tpu": ["trainer: ", "torch_xla", "pip install"],
    # Who holds what
    f"{FIT} --scenario.partition Dirichlet --scenario.partition.alpha 0": ["scenario.partition.alpha: 0.0", "(0, 1e6]"],
    f"{FIT} --scenario.partition.min_samples 400": ["scenario.partition.min_samples", "Lower min_s"],
    f"{FIT} --scenario.partition Pathological --scenario.partition.classes_per_client 11": [
        "scenario.partition.classes_per_client: 11"
    ],
    f"{FIT} --scenario.partition IID --scenario.clients 2000": ["scenario.clients: 2000 ", "1437"],
    # Data
    f"{ARRAYS} nowhere.npz": ["scenario.dataset.path: nowhere.npz: no such file"],
    f"{ARRAYS} corrupt.npz": ["scenario.dataset.path: corrupt.npz", "Write it with numpy.savez"],
    f"{ARRAYS} cut.npz": ["scenario.dataset.path: cut.npz", "Write it with numpy.savez"],
    f"{ARRAYS} tiny.yaml": ["scenario.dataset.path: tiny.yaml", "Write it with numpy.savez"],
    f"{ARRAYS} part.npz": ["part.npz: has no x_test, y_test"],
    f"{ARRAYS} negative.npz": ["y_train holds label -1"],
    f"{ARRAYS} float.npz": ["y_test needs float32 numbers"],
    f"{ARRAYS} good.npz --scenario.dataset.num_classes 3": ["label 3", "num_classes 3"],
    f"{ARRAYS} nan.npz": ["scenario.dataset.path: nan.npz", "x_train holds NaN or Inf"],
    f"{ARRAYS} uneven.npz": ["x_train has 39 rows and y_train 40"],
    f"{FIT} --scenario.dataset CIFAR10": [
        "scenario.dataset: CIFAR10: files not found",
        "cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}",
        "scenario.dataset.download true",
    ],
    # Model and data
    f"{FIT} --model own_module.TwoOutputs": ["model: forward returned (2,)", "(10,)"],
    f"{ARRAYS} good.npz --model CNN": ["model: ", "needs images", "(8,)", "use MLP"],
    f"{FIT} --model.hidden []": ["model.hidden needs at least one width"],
    # Folders
    f"{FIT} --run_dir tiny.yaml/run": ["tiny.yaml/run cannot be written to"],
    f"{FIT} --run_dir done": ["run_dir: done holds a run already", "Resume it"],
    "partition --config tiny.yaml --out tiny.yaml/x": ["--out: tiny.yaml/x cannot be"],
    "fit --resume nowhere": ["nowhere: folder not found"],
    "fit --resume tiny.yaml": ["tiny.yaml is no run"],
    "fit --resume bare --config tiny.yaml": ["bare is no run"],
    "fit --resume done --batch_size 7": ["batch_size (16 -> 7)"],
    "fit --resume done --algorithm.tau 1": ["algorithm.tau (0.08 -> 1.0)"],
    "fit --resume=done --trainer.precision=bf16-mixed": ["trainer.precision (None -> bf16"],
    "fit --resume done --algorithm FedAvg": [": algorithm (fl_lightning.FedSKC -> fl_lightning.FedAvg). "],
    "fit --resume done --config digits_fedavg.yaml": ["the config differs"],
    "fit --resume broken": ["config.yaml is no readable YAML: line 1"],
    "fit --resume damaged --rounds 9": ["round-000003 is damaged: state.pt "],
    "fit --resume cut": ["metrics.csv holds 1 of rounds 1 to 3", "No earlier checkpoint"],
    "compare done --where seed=0 --where seed=1": ["--where: given twice"],
    "compare ''": ["runs: the name of a folder is empty"],
    "compare done --by ,": ["--by: ',' has an empty name"],
    "compare done --reference FedAvg FedProx": ["--reference: FedAvg and FedProx cannot both be the reference"],
    "plot done --by algorithm,,seed": ["--by: "],
    "report done -o page.pdf": ["-o: page.pdf does not end in .html"],
    "reproduce feddw_table1 --seeds 0 0": ["--seeds: 0 0 has a seed twice"],
    "reproduce feddw_table1 --seeds 0 --seeds 1": ["--seeds: given twice"],
    "test nowhere": ["nowhere: folder not found"],
    "test": ["run: "],
    "test bare-config": ["bare-config holds a run", "but no checkpoint"],
    "test done --checkpoint 9": ["--checkpoint", "'9'", "last, best and rounds 3"],
    "test bare-config --checkpoint best": ["--checkpoint", "no round is the best yet"],
}
"""What the line of an error contains, by the command line."""


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A folder with a finished run, damaged copies of it, and bad files."""
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


@pytest.mark.fast_cases(13)
@pytest.mark.parametrize("command", LINES)
def test_bad_input_gives_one_line_and_changes_no_files(command, example, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    shutil.copytree(example, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    before = contents(folder)

    code, out, err = run(*shlex.split(command))

    lines = [line for line in err.splitlines() if not line.startswith("fl-lightning: warning: checkpoint ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("fl-lightning: error: ")
    for fragment in LINES[command]:
        assert fragment in lines[0]
    assert "Traceback" not in out + err
    assert code == 2
    assert contents(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


@pytest.mark.thorough
def test_the_same_commands_work_without_the_bad_input(example, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(example, tmp_path / "here"))
    for command in (FIT, f"{ARRAYS} good.npz", f"{PARTITION} IID", "fit --resume done", "test done"):
        outcome = run(*command.split())
        assert (outcome.code, outcome.err) == (0, "")
