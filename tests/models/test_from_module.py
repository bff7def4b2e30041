"""`FromModule` computes, trains and exports the user's module unchanged, or refuses it."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from commands import TINY, run, tiny
from experiments import ONE_EPOCH, experiment, in_float64, same_bytes, weights_after
from torch import nn
from torch.nn import functional as F

from fl_lightning import ClientModule, open_run
from fl_lightning.algorithms import FedAvg, FedBABU, FedPer, FedProto, FedRep, FedUV
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message
from fl_lightning.core.seeding import Stream, seed_everything
from fl_lightning.core.state_dicts import RunningMean
from fl_lightning.data import IID, Arrays, Scenario
from fl_lightning.engines import StackedEngine, Task
from fl_lightning.models import FromModule, TextCNN, with_encoder


class Plain(nn.Module):
    """A network that ends with its head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 36, 10)

    def features(self, x):
        return F.relu(self.norm(self.conv(x))).flatten(1)

    def forward(self, x):
        return self.fc(self.features(x))


class Softmax(Plain):
    """Takes the logarithm of the softmax after its head."""

    def forward(self, x):
        return F.log_softmax(super().forward(x), dim=1)


class Skip(Plain):
    """Adds a connection around its head."""

    def forward(self, x):
        features = self.features(x)
        return self.fc(features) + features[:, :10]


class DropsAfter(Plain):
    """Differs from `Plain` only in train mode."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class ClampsAfter(Plain):
    """Differs from `Plain` only for large outputs."""

    def forward(self, x):
        return super().forward(x).clamp(-100, 100)


class RectifiesInPlace(Plain):
    """Changes its head's output in place."""

    def forward(self, x):
        return super().forward(x).relu_()


class UsesWeights(Plain):
    """Never calls its head."""

    def forward(self, x):
        return F.linear(self.features(x), self.fc.weight, self.fc.bias)


NOT_ENDING_WITH_HEAD = [Softmax, Skip, DropsAfter, ClampsAfter, RectifiesInPlace]


def wrapped(kind):
    """Return the network as a backbone, from a fixed seed."""
    torch.manual_seed(0)
    return FromModule((1, 8, 8), 10, f"{__name__}.{kind.__name__}", "fc")


def original(kind):
    torch.manual_seed(0)
    return kind()


def batch(n=6):
    x = torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(n))
    return x, torch.arange(n) % 10


@pytest.mark.parametrize("kind", [Plain, *NOT_ENDING_WITH_HEAD])
@pytest.mark.parametrize("training", [True, False])
def test_a_wrapped_module_computes_the_same(kind, training):
    backbone, net = wrapped(kind).train(training), original(kind).train(training)
    x, y = batch()
    torch.manual_seed(1)
    expected = net(x)
    torch.manual_seed(1)
    assert torch.equal(backbone(x), expected)
    module = ClientModule(wrapped(kind)).train(training)
    torch.manual_seed(1)
    step = module.step((x, y))
    assert torch.equal(step.logits, expected)
    assert torch.equal(step.features, original(kind).train(training).features(x))


def test_building_it_draws_no_random_numbers():
    original(Plain)
    expected = torch.rand(1)
    wrapped(Plain)
    assert torch.equal(torch.rand(1), expected)


def test_building_it_does_not_change_batchnorm_statistics():
    for kind in (Plain, Softmax):
        pairs = zip(wrapped(kind).state_dict().values(), original(kind).state_dict().values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_only_a_network_that_ends_with_its_head_is_cut():
    assert {name.partition(".")[0] for name in wrapped(Plain).state_dict()} == {"encoder", "head"}
    for kind in NOT_ENDING_WITH_HEAD:
        assert {name.partition(".")[0] for name in wrapped(kind).state_dict()} == {"module"}


def test_a_head_that_is_never_called_is_refused():
    with pytest.raises(ConfigError, match=r"^model.head: .*UsesWeights .*'fc'"):
        wrapped(UsesWeights)


REFUSED = r"^model.head: .*Softmax .*'fc'"


@pytest.mark.parametrize("method", [FedPer(), FedRep(), FedBABU()])
def test_methods_that_separate_encoder_and_head_refuse_a_whole_module(method):
    with pytest.raises(ConfigError, match=REFUSED):
        method.client_module(wrapped(Softmax))
    assert method.client_module(wrapped(Plain))


def test_reading_a_missing_part_raises_a_clear_error():
    backbone = wrapped(Softmax)
    for ask in (with_encoder, lambda net: net.encoder, lambda net: net.head, lambda net: net.classifier):
        with pytest.raises(ConfigError, match=REFUSED):
            ask(copy.deepcopy(backbone))


# --- Runs, against a loop by hand ---


def model(kind):
    return partial(FromModule, module=f"{__name__}.{kind.__name__}", head="fc")


def by_hand(run, kind):
    """Return the weights after FedAvg of the original module, in plain PyTorch."""
    worker = run.worker
    seed_everything(run.seed, Stream.INITIAL_WEIGHTS)
    weights = kind().state_dict()
    for round in range(1, run.rounds + 1):
        mean = RunningMean()
        for client in range(len(run.data.shards)):
            net = kind()
            net.load_state_dict(weights)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            for x, y in worker.client_data.batches(Task(round, client, Message(), {})):
                optimizer.zero_grad()
                F.cross_entropy(net(worker.client_data.prepare(x)), y).backward()
                optimizer.step()
            mean.add(net.state_dict(), worker.client_data.sample_count(client))
        weights = mean.value()
    return weights


@pytest.mark.parametrize("kind", [Plain, Softmax, Skip])
@pytest.mark.fast_cases(1)
def test_a_run_equals_training_of_the_original_module_bit_for_bit(kind, tmp_path):
    run = experiment(tmp_path, model=model(kind), trainer=ONE_EPOCH, clients_per_round=6, rounds=2)
    run.fit()
    expected = by_hand(run, kind)
    assert same_bytes(run.worker.modules.build_shared(run.state["model"]).backbone.original().state_dict(), expected)


@in_float64
@pytest.mark.parametrize("kind", [Softmax, Skip])
@pytest.mark.parametrize("method", [FedAvg, FedUV, partial(FedProto, lam=1.0)])
@pytest.mark.thorough
def test_stacked_clients_equal_sequential_ones(kind, method, tmp_path):
    uploads = []
    for engine in ("sequential", StackedEngine()):
        run = experiment(tmp_path / str(len(uploads)), method(), model=model(kind), engine=engine, trainer=ONE_EPOCH)
        run.rounds = 1
        run.fit()
        uploads.append(run.client_module(0).backbone.state_dict())
    for name, value in uploads[0].items():
        torch.testing.assert_close(value, uploads[1][name], rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
def test_terms_on_features_train_a_whole_module(tmp_path):
    """FedUV reads only the features, so it also works with a module that computes something after its head."""
    weights = [
        weights_after(tmp_path / str(mu), FedUV(mu=mu), model=model(Softmax), trainer=ONE_EPOCH, rounds=1)
        for mu in (0.0, 5.0)
    ]
    assert not same_bytes(*weights)


def test_compile_refuses_a_whole_module(tmp_path):
    with pytest.raises(ConfigError, match=REFUSED):
        experiment(tmp_path, model=model(Softmax), compile=True).fit()
    assert not list(tmp_path.glob("checkpoints/*"))


# --- Exported ---


@pytest.fixture(scope="module", params=[Plain, Softmax, Skip])
def trained(request, tmp_path_factory):
    """Return a network, the folder of a finished run with it, and the trained module."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param.__name__)
    settings = yaml.safe_load(TINY) | {"algorithm": "FedAvg"}
    init_args = {"module": f"{__name__}.{kind.__name__}", "head": "fc"}
    settings["model"] = {"class_path": "FromModule", "init_args": init_args}
    tiny(folder / "run", "--rounds", "1", text=yaml.safe_dump(settings))
    opened = open_run(folder / "run")
    return kind, folder / "run", opened.worker.modules.build_shared(opened.state["model"]).eval()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".ts", ".onnx"])
def test_the_exported_file_gives_the_outputs_of_the_original_module(trained, suffix, tmp_path):
    kind, folder, module = trained
    path, (x, _) = tmp_path / f"model{suffix}", batch()
    outcome = run("export", folder, "-o", path)
    assert outcome.code == 0, outcome.err
    with torch.no_grad():
        expected = module(x)
        if suffix == ".pt":
            net = kind()
            net.load_state_dict(torch.load(path, weights_only=True))
            assert torch.equal(net.eval()(x), expected)
        elif suffix == ".ckpt":
            opened = ClientModule.load_from_checkpoint(path, backbone=kind())
            assert torch.equal(opened.eval()(x), expected)
        elif suffix == ".ts":
            torch.testing.assert_close(torch.jit.load(str(path))(x), expected)
        else:
            session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
            (output,) = session.run(None, {"input": x.numpy()})
            torch.testing.assert_close(torch.from_numpy(output), expected, rtol=1e-4, atol=1e-5)


# --- A network without FromModule ---


class Sized(nn.Sequential):
    """Takes the number of classes, and an argument of its own."""

    def __init__(self, num_classes: int, hidden: int = 5) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))


@pytest.mark.parametrize("kind", [Plain, Sized, partial(Sized, hidden=4)])
@pytest.mark.fast_cases(2)
def test_a_class_of_a_network_is_a_model_as_it_is(kind, tmp_path):
    run = experiment(tmp_path, model=kind, trainer=ONE_EPOCH, clients_per_round=6, rounds=1)
    run.fit()
    build = partial(kind, num_classes=10) if kind is not Plain else Plain
    assert same_bytes(run.state["model"], by_hand(run, build))


@pytest.mark.thorough
def test_a_network_is_a_model_in_a_config(tmp_path):
    settings = yaml.safe_load(TINY) | {"algorithm": "FedAvg"}
    settings["model"] = {"class_path": f"{__name__}.Sized", "init_args": {"hidden": 3}}
    tiny(tmp_path / "run", "--rounds", "1", text=yaml.safe_dump(settings))
    assert open_run(tmp_path / "run").state["model"]["1.weight"].shape == (3, 64)
    assert run("export", tmp_path / "run", "-o", tmp_path / "net.ckpt").code == 0


def test_from_module_passes_the_number_of_classes_to_a_module_that_takes_it():
    assert FromModule((1, 8, 8), 7, f"{__name__}.Sized", "3").head.out_features == 7
    assert FromModule((1, 8, 8), 7, f"{__name__}.Sized", "3", {"num_classes": 9}).head.out_features == 9


def test_a_built_network_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^model: .* Plain\."):
        experiment(tmp_path, model=Plain()).fit()


class Narrow(Sized):
    """Has three outputs by default, under another name."""

    def __init__(self, n_classes: int = 3) -> None:
        super().__init__(n_classes)


@pytest.mark.parametrize(
    ("model", "fix"),
    [
        (Narrow, r"Did you mean --model.n_classes 10\?"),
        (
            partial(FromModule, module=f"{__name__}.Sized", head="3", module_args={"num_classes": 3}),
            r"Did you mean --model.module_args.num_classes 10\?",
        ),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), r"Give its last layer 10 outputs\."),
    ],
)
def test_a_wrong_number_of_outputs_is_refused_with_the_option(model, fix, tmp_path):
    with pytest.raises(ConfigError, match=rf"^model: forward returned \(3,\) outputs a sample, .* \(10,\)\. {fix}$"):
        experiment(tmp_path, model=model).fit()


class Named(Sized):
    """Returns a dict, like the networks of Hugging Face."""

    def forward(self, x):
        return {"logits": super().forward(x)}


def test_outputs_that_are_no_tensor_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^model: forward returned dict\."):
        experiment(tmp_path, model=Named).fit()


def test_integer_inputs_need_an_embedding(tmp_path):
    x = np.random.default_rng(0).integers(0, 50, (40, 8))
    np.savez(tmp_path / "a.npz", x_train=x[:30], y_train=x[:30, 0] % 3, x_test=x[30:], y_test=x[30:, 0] % 3)
    data = Scenario(Arrays(str(tmp_path / "a.npz")), IID(), 2)
    with pytest.raises(ConfigError, match=r"^model: .* int64 .*TextCNN"):
        experiment(tmp_path / "refused", scenario=data, clients_per_round=2, model=Sized).fit()
    experiment(tmp_path / "run", scenario=data, clients_per_round=2, rounds=1, model=partial(TextCNN, channels=2)).fit()
