"""Unusual contents of a module are trained as by a loop written by hand, or refused before round 1."""

import lightning as L
import pytest
import torch
from experiments import UNEQUAL, assert_near, experiment, finished, in_float64
from loops import rounds_by_hand
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from fl_lightning.algorithms import FedAvg
from fl_lightning.core.errors import ClientFailure, ConfigError


class Net(nn.Module):
    """A network of two layers with the features in `z`, if it has such a tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.z = nn.Linear(64, 8), nn.Linear(8, 10), None

    def forward(self, x):
        features = F.relu(self.a(x.flatten(1)))
        return self.b(features if self.z is None else (features * self.z).real)


class Lazy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(10))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x):
        return self.b(self.a(x.flatten(0, 1))[0][:, -1])


class Collections(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(64, 8) / 8), nn.Parameter(torch.randn(8, 10) / 3)])
        self.biases = nn.ParameterDict({"out": nn.Parameter(torch.zeros(10))})

    def forward(self, x):
        return F.relu(x.flatten(1) @ self.weights[0]) @ self.weights[1] + self.biases["out"]


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8)
        self.d.weight = self.c.weight

    def forward(self, x):
        return self.b(self.d(F.relu(self.c(self.a(x.flatten(1))))))


class ExtraTensor(Net):
    def get_extra_state(self):
        return torch.tensor(1)

    def set_extra_state(self, state):
        self.count = int(state)


class ExtraObject(Net):
    def get_extra_state(self):
        return {"count": 1}


class LacksLayer(Net):
    def state_dict(self, *args, **options):
        return {name: value for name, value in super().state_dict(*args, **options).items() if name[:2] != "a."}


class NoGradient(Net):
    def forward(self, x):
        return super().forward(x).detach()


class Grows(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 8))

    def forward(self, x):
        features = F.relu(self.a(x.flatten(1)))
        if self.training:
            self.bank = torch.cat([self.bank, features.detach()])
        return self.b(features)


class NotANumber(Net):
    def forward(self, x):
        return super().forward(x) * torch.nan


class Probabilities(Net):
    def forward(self, x):
        return super().forward(x).softmax(dim=-1)


class AddsLayer(Net):
    def forward(self, x):
        if not hasattr(self, "late"):
            self.late = nn.Linear(10, 10)
        return self.late(super().forward(x))


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LitAddsLayer(Lit):
    def training_step(self, batch, batch_idx):
        if not hasattr(self, "late"):
            self.late = nn.Linear(10, 10)
        return F.cross_entropy(self.late(self(batch[0])), batch[1])


class LitDetached(Lit):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()


class LitFrozen(Lit):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


def changed(change):
    """Return a factory of `Net` after a change."""

    def build():
        network = Net()
        change(network)
        return network

    return build


def quantized():
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), {nn.Linear})


COMPLEX = torch.ones(8, dtype=torch.complex64)
TRAINED = {
    "weight_norm": changed(lambda net: parametrizations.weight_norm(net.a)),
    "spectral_norm": changed(lambda net: parametrizations.spectral_norm(net.a)),
    "old spectral_norm": changed(lambda net: nn.utils.spectral_norm(net.a)),
    "orthogonal": changed(lambda net: parametrizations.orthogonal(net.b)),
    "hook": changed(lambda net: net.a.register_forward_hook(lambda _layer, _inputs, output: 2 * output)),
    "absent buffer": changed(lambda net: net.register_buffer("none", None)),
    "lazy": Lazy,
    "recurrent": Recurrent,
    "collections": Collections,
    "tied": Tied,
    "extra tensor": ExtraTensor,
}
REFUSED = {
    "old weight_norm": (changed(lambda net: nn.utils.weight_norm(net.a)), "'a.weight'"),
    "pruned": (changed(lambda net: prune.l1_unstructured(net.b, "weight", 0.3)), "'b.weight'"),
    "complex parameter": (changed(lambda net: setattr(net, "y", nn.Parameter(COMPLEX))), "'y' is complex"),
    "complex buffer": (changed(lambda net: net.register_buffer("y", COMPLEX)), "'y' is complex"),
    "meta": (changed(lambda net: setattr(net, "b", nn.Linear(8, 10, device="meta"))), "'b.weight'"),
    "sparse": (changed(lambda net: net.register_buffer("y", torch.eye(2).to_sparse())), "'y'"),
    "expanded": (changed(lambda net: net.register_buffer("y", torch.ones(1).expand(3))), "'y'"),
    "extra object": (ExtraObject, "'_extra_state'"),
    "state dict without a layer": (LacksLayer, "lacks the parameter 'a.weight'"),
    "float8": (changed(lambda net: net.register_buffer("y", torch.zeros(2).to(torch.float8_e4m3fn))), "'y' is of"),
    "script inside": (changed(lambda net: setattr(net, "a", torch.jit.script(net.a))), "a is compiled by torch.jit"),
    "quantized": (quantized, "quantized layer, which cannot be trained"),
    "frozen": (changed(lambda net: net.requires_grad_(False)), "Net has no trainable parameter"),
    "no parameter": (nn.Flatten, "Flatten has no trainable parameter"),
    "script": (lambda: torch.jit.trace(Net(), torch.zeros(2, 1, 8, 8)), "torch.jit"),
    "no gradient": (NoGradient, "NoGradient"),
    "NaN": (NotANumber, "forward returned NaN or Inf before any training"),
    "added layer": (AddsLayer, "'late.bias'"),
    "lit added layer": (LitAddsLayer, "'late.bias'"),
    "lit detached": (LitDetached, "LitDetached"),
    "lit frozen": (LitFrozen, "LitFrozen has no trainable parameter"),
}


@in_float64
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*(deprecated|Lazy modules).*")
@pytest.mark.parametrize("name", TRAINED)
def test_it_is_trained_as_by_a_loop(tmp_path, name):
    run = finished(tmp_path, FedAvg(), **UNEQUAL | {"model": TRAINED[name], "rounds": 2})
    assert_near(run.state["model"], rounds_by_hand(run)[0])


@pytest.mark.filterwarnings("ignore:.*(deprecated|torch.jit|reduce_range).*")
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_round_1_by_name(name):
    model, what = REFUSED[name]
    options = {"optimizer": None} if name.startswith("lit") else {}
    with pytest.raises(ConfigError, match=f"^model: .*{what}") as refusal:
        experiment(None, model=model, **options).load()
    assert "\n" not in str(refusal.value)


def test_a_buffer_that_changes_its_shape_is_refused_by_name():
    run = experiment(None, model=Grows)
    with pytest.raises(ClientFailure, match=r"^client \d, round 1: model: 'bank' has \(.*persistent=False"):
        run.fit()


def test_probabilities_are_warned_of_once():
    with pytest.warns(UserWarning, match=r"^model: .* logits") as seen:
        experiment(None, model=Probabilities).load()
    assert len(seen) == 1


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_run_inside_a_context_of_torch_that_changes_the_training_is_refused(context):
    run = experiment(None)
    with context(), pytest.raises(ConfigError, match=r"^trainer: .*inside torch"):
        run.load()
