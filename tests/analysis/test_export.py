"""`fl-lightning export`: a file of each format, loaded by its own program, gives the outputs of the run's module."""

import logging
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torchvision
from commands import TINY, contents, run, tiny
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import ClientModule, open_run
from fl_lightning.analysis.export import FORMATS, Format, Network, network_of, same_outputs, write_network
from fl_lightning.client.exported import rebuilt
from fl_lightning.core.config import read_config
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.objectives import Classification, Regression
from fl_lightning.models import MLP, BiLSTM

NORMED = TINY.replace("class_path: MLP, init_args: {hidden: [8]}", "class_path: own_export.Normed").replace(
    "algorithm: FedSKC", "algorithm: {class_path: FedAvg, init_args: {buffers: local}}"
)
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
OWN = """
import torch
from torch import nn
from fl_lightning import Backbone, Dataset, LoadedData, Normalize

class Coloured(Dataset):
    def load(self):
        x = torch.randint(256, (60, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        prepare = Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.1])
        return LoadedData(x[:45], torch.arange(45) % 3, x[45:], torch.arange(15) % 3, 3, prepare)

class Normed(Backbone):
    def __init__(self, in_shape, num_classes):
        encoder = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout(0.5))
        super().__init__(encoder, nn.Linear(64, num_classes), 64)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of runs: of a shipped model, of a user's own, and of a method without a global model."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "own_export.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        every = ("--callbacks+=Checkpointing", "--callbacks.every=1")
        tiny(folder / "run", *every, "--model.head", "{projection: 12, hidden: [9], classifier: cosine}")
        tiny(folder / "normed", "--rounds", "1", text=NORMED)
        tiny(folder / "local", "--algorithm", "Local", "--rounds", "1")
        yield folder


@pytest.fixture(autouse=True)
def _in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def outputs_of_file(path, x):
    """Return the outputs of an exported file for a batch."""
    if path.suffix == ".onnx":
        runtime = pytest.importorskip("onnxruntime")
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (source,), (target,) = session.get_inputs(), session.get_outputs()
        assert isinstance(source.shape[0], str)  # any number of samples
        assert isinstance(target.shape[0], str)
        return torch.from_numpy(session.run(None, {source.name: x.numpy()})[0])
    if path.suffix == ".ts":
        return torch.jit.load(str(path))(x)
    if path.suffix == ".ckpt":
        return ClientModule.load_from_checkpoint(path).eval()(x)
    backbone = open_run("run").worker.modules.build().backbone
    backbone.load_state_dict(torch.load(path, weights_only=True))
    return backbone.eval()(x)


def skip_without_packages(suffix):
    if suffix == ".onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)


def export(tmp_path, suffix, *words, name="run"):
    skip_without_packages(suffix)
    path = tmp_path / f"model{suffix}"
    outcome = run("export", name, "-o", path, *words)
    assert outcome.code == 0, outcome.err
    assert not outcome.err
    assert list(tmp_path.iterdir()) == [path]
    return path, outcome.out


def batch(n=7):
    return torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(n))


def assert_close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("client", [None, 2])
def test_an_exported_network_gives_the_outputs_of_the_module(suffix, client, tmp_path):
    path, out = export(tmp_path, suffix, *(() if client is None else ("--client", str(client))))
    original = open_run("run")
    module = (
        original.worker.modules.build_shared(original.state["model"])
        if client is None
        else original.client_module(client)
    )
    with torch.no_grad():
        for n in (1, 7):  # not the number that was traced
            assert_close(outputs_of_file(path, batch(n)), module.eval()(batch(n)))
    whose = "the global model" if client is None else "the model of client 2, with this method the global model,"
    size = f"{path.stat().st_size / 1e6:.2f} MB"
    written, takes = out.splitlines()
    assert written == f"wrote {path} ({FORMATS[suffix].name}, {size}): {whose} after round 3"
    assert re.search(r"scenario\.dataset .*float32 \(batch, 1, 8, 8\), .*float32 \(batch, 10\)$", takes)


def test_a_personal_model_is_not_called_the_global_one(tmp_path):
    _, out = export(tmp_path, ".pt", "--client", "2", name="local")
    assert "): the model of client 2 after round 1\n" in out


def test_the_state_dict_is_that_of_the_run(tmp_path):
    path, _ = export(tmp_path, ".pt")
    exported, final = (torch.load(each, weights_only=True) for each in (path, Path("run/final/model.pt")))
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], final[name]) for name in exported)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("suffix", [".ts", ".onnx"])
def test_a_file_has_the_clients_batchnorm_statistics_and_dropout_is_off(suffix, tmp_path):
    path, _ = export(tmp_path, suffix, "--client", "1", name="normed")
    module = open_run("normed").client_module(1).eval()
    assert not torch.equal(module.backbone.encoder[1].running_mean, torch.zeros(64))
    with torch.no_grad():
        assert_close(outputs_of_file(path, batch()), module(batch()))


@pytest.mark.thorough
def test_the_network_of_another_round_is_exported(tmp_path):
    path, out = export(tmp_path, ".pt", "--checkpoint", "2")
    assert "after round 2" in out
    weights, state = torch.load(path, weights_only=True), open_run("run", "2").state["model"]
    assert all(torch.equal(weights[name], state[name]) for name in state)
    assert not all(torch.equal(weights[name], value) for name, value in open_run("run").state["model"].items())


@pytest.mark.thorough
def test_a_lightning_trainer_continues_from_the_checkpoint(tmp_path):
    path, _ = export(tmp_path, ".ckpt")
    module = ClientModule.load_from_checkpoint(path)
    assert isinstance(module.backbone, MLP)
    x, y = batch(16), torch.arange(16) % 10
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(max_epochs=1, enable_model_summary=False, **QUIET)
        before = module.backbone.head[0].weight.clone()
        trainer.fit(module, loader)
        assert not torch.equal(before, module.backbone.head[0].weight)
        untrained = ClientModule(rebuilt(torch.load(path, weights_only=True)["hyper_parameters"]["backbone"]))
        metrics = trainer.test(untrained, loader, ckpt_path=path, verbose=False, weights_only=True)[0]
    with torch.no_grad():
        logits = ClientModule.load_from_checkpoint(path).eval()(x)
    assert metrics["test_acc"] == pytest.approx(float((logits.argmax(dim=1) == y).float().mean()))


def test_a_clients_module_is_ready_to_be_trained():
    """The module is in train mode: a `Trainer` updates its BatchNorm statistics, and Dropout is on."""
    module = open_run("normed").client_module(1)
    assert all(part.training for part in module.modules())
    before = module.backbone.encoder[1].running_mean.clone()
    loader = DataLoader(TensorDataset(batch(16), torch.arange(16) % 10), batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        L.Trainer(max_epochs=1, enable_model_summary=False, **QUIET).fit(module, loader)
    assert not torch.equal(before, module.backbone.encoder[1].running_mean)


# --- Loading a checkpoint does not run code of its author ---


def test_a_users_own_network_has_to_be_given_on_loading(tmp_path):
    path, _ = export(tmp_path, ".ckpt", name="normed")
    message = r"backbone: own_export.Normed is not allowed .*load_from_checkpoint\(..., backbone"
    with pytest.raises(ConfigError, match=message):
        ClientModule.load_from_checkpoint(path)
    from own_export import Normed

    module = ClientModule.load_from_checkpoint(path, backbone=Normed((1, 8, 8), 10)).eval()
    original = open_run("normed")
    assert_close(module(batch()), original.worker.modules.build_shared(original.state["model"]).eval()(batch()))


@pytest.mark.parametrize(
    "described",
    [
        {"class_path": "planted_export.Net"},
        {"class_path": "fl_lightning.models.FromModule", "init_args": {"module": "os.system", "head": "fc"}},
    ],
)
def test_code_that_a_checkpoint_names_is_not_run(described, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "planted_export.py").write_text("raise SystemExit('run')")
    described |= {"in_shape": [1, 8, 8], "num_classes": 10}
    torch.save({"pytorch-lightning_version": "2.6.4", "state_dict": {}, "hyper_parameters": {"backbone": described}},
               tmp_path / "bad.ckpt")  # fmt: skip
    with pytest.raises(ConfigError, match="is not allowed in a file"):
        ClientModule.load_from_checkpoint(tmp_path / "bad.ckpt")


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (None, r"it needs a network \(an nn.Module\), got"),
        ({"class_path": "MLP"}, "the checkpoint does not contain the arguments of MLP"),
    ],
)
def test_a_value_that_is_no_network_is_refused(described, why):
    with pytest.raises(ConfigError, match=f"backbone: {why}"):
        ClientModule(described)


def test_a_network_of_torchvision_is_rebuilt():
    described = {
        "class_path": "FromModule",
        "init_args": {"module": "torchvision.models.squeezenet1_1", "head": "classifier.1", "module_args": {}},
    }
    with pytest.raises(ConfigError, match="holds no linear layer"):  # squeezenet was built, and is refused
        rebuilt(described | {"in_shape": [3, 32, 32], "num_classes": 10})
    described["init_args"] |= {"module": "torchvision.models.resnet18", "head": "fc", "module_args": {"num_classes": 4}}
    network = rebuilt(described | {"in_shape": [3, 32, 32], "num_classes": 4})
    assert isinstance(network, torchvision.models.ResNet)  # unwrapped, because the checkpoint has its keys
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 4)


# --- Preparation, precision, layout ---


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", [".onnx", ".ts"])
def test_a_file_with_preparation_normalises_stored_samples(suffix, tmp_path, folder):
    if not (folder / "stored").exists():
        text = TINY.replace("dataset: Digits", "dataset: own_export.Coloured")
        tiny(folder / "stored", "--rounds", "1", "--scenario.partition.min_samples", "2", text=text)
    path, out = export(tmp_path, suffix, "--prepare", name="stored")
    assert re.search(r"stored, uint8 \(batch, 3, 8, 8\), .*float32 \(batch, 3\)$", out, re.M)
    original = open_run("stored")
    x = original.data.data.x_test[:6]
    assert x.dtype == torch.uint8
    mean, std = torch.tensor([[0.4, 0.5, 0.6], [0.2, 0.3, 0.1]])[:, :, None, None]
    normalised = (x.float() / 255 - mean) / std
    with torch.no_grad():
        network = original.worker.modules.build_shared(original.state["model"]).eval()
        assert_close(outputs_of_file(path, x), network(normalised))


def test_other_precisions_are_written_in_float32(tmp_path):
    model = {"class_path": "fl_lightning.models.MLP", "init_args": {"hidden": [4]}}
    network = Network(MLP((3,), 2, hidden=(4,)).bfloat16(), model, (3,), 2, torch.rand(2, 3, dtype=torch.bfloat16))
    write_network(network, tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_a_compiled_network_is_exported_uncompiled(monkeypatch):
    original = open_run("run")
    original.worker.modules.compile = True
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: pytest.fail("compiled"))
    network_of(original, read_config(Path("run/config.yaml"))["model"])


# --- Messages ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "-o: which file? Its ending says the format: .pt, .onnx, .ts, .ckpt"),
        (["run", "-o", "m.h5"], "-o: m.h5 does not end in one of .pt (state dict), .onnx (ONNX), .ts (TorchScript), "
         ".ckpt (Lightning checkpoint)"),
        (["run", "-o", "taken.pt"], "-o: taken.pt already exists. Name another file, or remove it"),
        (["run", "-o", "taken.pt/m.pt"], "-o: taken.pt/m.pt cannot be written: "),
        (["local", "-o", "m.pt"], "client: Local has no global model. Choose a client with --client, 0 to 3"),
        (["local", "-o", "m.pt", "--client", "4"], "client: client 4 not found. Clients are 0 to 3."),
        (["run", "-o", "m.pt", "--client", "x"], "--client: got 'x', expected int"),
        (["run", "-o", "m.pt", "--checkpoint", "9"], "--checkpoint: checkpoint '9' not found. Available: last, best"),
        (["nowhere", "-o", "m.pt"], "nowhere"),
        (["run", "-o", "m.pt", "--prepare"], "--prepare: a state dict holds only weights. Use .onnx or .ts"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)  # fmt: skip
def test_a_refusal_is_one_line(words, message, folder):
    Path("taken.pt").write_text("mine")
    before = contents(folder)
    outcome = run("export", *words)
    assert outcome.code == 2
    assert outcome.err.startswith(f"fl-lightning: error: {message}"), outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert contents(folder) == before


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    outcome = run("export", "run", "-o", tmp_path / "m.onnx")
    assert outcome.code == 2
    assert outcome.err.startswith("fl-lightning: error: -o: an .onnx file needs onnx (")
    assert outcome.err.endswith(". Run: pip install 'fl-lightning[onnx]'\n")
    assert not list(tmp_path.iterdir())


class Branching(nn.Module):
    """Its output depends on a branch, so a trace is wrong for other inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) if x[-1].sum() > 0 else -self.layer(x)


def test_a_trace_that_gives_other_outputs_is_not_written(tmp_path):
    x = torch.ones(5, 4)
    x[-1] = -1
    with pytest.raises(ConfigError, match=r"^-o: Branching .*\.pt, \.onnx"):
        write_network(Network(Branching(), {"class_path": "a.Branching"}, (4,), 2, x), tmp_path / "m.ts")
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_a_network_that_a_format_cannot_hold_is_refused(tmp_path):
    """The message is one line, without torch's own report."""
    skip_without_packages(".onnx")
    ids = torch.randint(1, 50, (4, 12))
    network = Network(BiLSTM((12,), 3, vocab_size=50), {"class_path": "fl_lightning.models.BiLSTM"}, (12,), 3, ids)
    with pytest.raises(ConfigError, match=r"^-o: BiLSTM .*\(\w+; .*\)\. .*\.pt, \.ts"):
        write_network(network, tmp_path / "m.onnx")
    write_network(network, tmp_path / "m.ts")
    ids[2, 3:] = 0
    assert_close(outputs_of_file(tmp_path / "m.ts", ids), network.backbone(ids))


def test_outputs_are_equal_up_to_rounding():
    one = torch.tensor([[1.0, -2.0]])
    assert same_outputs(one, one + 1e-4)
    assert not same_outputs(one, one + 1e-2)
    assert not same_outputs(one, one * float("nan"))
    assert not same_outputs(one * float("nan"), one)
    assert not same_outputs(one, torch.cat([one, one]))


def test_a_lightning_checkpoint_keeps_the_objective(tmp_path):
    for objective in (Regression("huber"), Classification(label_smoothing=0.1)):
        model = {"class_path": "fl_lightning.models.MLP", "init_args": {"hidden": [4]}}
        network = Network(MLP((3,), 2, hidden=(4,)), model, (3,), 2, torch.zeros(2, 3), objective)
        path = tmp_path / f"{type(objective).__name__}.ckpt"
        write_network(network, path)
        assert ClientModule.load_from_checkpoint(path).objective == objective


def test_exporters_print_nothing(monkeypatch, tmp_path, capsys, caplog):
    """Such as torch's warning that torchvision is not installed."""

    def chatty(network):
        print("[torch.onnx] Obtain model graph ...")
        print("progress", file=sys.stderr)
        logging.getLogger("torch.onnx.exporter").warning("torchvision is not installed")
        logging.getLogger("onnxscript").warning("Applied 3 rewrite rules")
        warnings.warn("deprecated", stacklevel=2)
        return b"content"

    network = SimpleNamespace(model={"class_path": "a.Model"}, samples=None, outputs=torch.ones(2), schema=None)
    monkeypatch.setitem(FORMATS, ".onnx", Format("ONNX", chatty, lambda content, network: lambda x: torch.ones(2)))
    write_network(network, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == b"content"
    assert (*capsys.readouterr(), caplog.text) == ("", "", "")
    logging.getLogger("onnxscript").warning("shown again")
    assert "shown again" in caplog.text
