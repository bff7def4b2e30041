"""Loss terms in a LightningModule that is not a `ClientModule`."""

import inspect
from functools import partial

import lightning as L
import pytest
import torch
from experiments import same_bytes
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import algorithms
from fl_lightning.algorithms import BalancedSoftmax, CalibratedLoss, FedProx, Proximal, WeightDistribution
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.models import MLP

ONLY_CHECKS = {
    *("DistillingWeights", "FeatureAlignment", "LocalContrastive", "PrototypeAlignment"),
    *("TrainedPrototypeAlignment", "UnitAlignment"),
}
"""Terms that need no `begin`: they are zero until they get shared knowledge."""
NEEDS_TENSORS = {"HypersphericalUniformity", "RelaxedContrastive"}
"""Terms that fail without features or taps, in every mode."""
TERMS = [
    term
    for name in sorted(set(dir(algorithms)) - ONLY_CHECKS - NEEDS_TENSORS)
    if inspect.isclass(term := getattr(algorithms, name))
    and issubclass(term, LossTerm)
    and term.begin is not LossTerm.begin
]
plain_lightning = pytest.mark.filterwarnings("ignore:.*(many workers|val_dataloader|LeafSpec).*")
STEP = Step(torch.zeros(2, 3), torch.tensor([0, 1]))


def test_terms_that_need_begin_are_found():
    assert len(TERMS) >= 12


@pytest.mark.parametrize("kind", TERMS)
def test_a_term_that_never_began_is_refused_in_training(kind):
    term = kind()
    with pytest.raises(ConfigError, match=rf"^{kind.__name__}: begin was not called .* Call begin\("):
        term(STEP)
    value = term.eval()(STEP)
    assert value == (F.cross_entropy(STEP.logits, STEP.targets) if term.objective_weight == 0 else 0)


def test_a_term_that_is_off_is_zero_without_begin():
    assert Proximal(mu=0.0)(STEP) == 0


@pytest.mark.parametrize("term", [BalancedSoftmax, CalibratedLoss, WeightDistribution])
def test_a_term_of_class_counts_needs_them(term):
    with pytest.raises(ConfigError, match=rf"^{term.__name__}: class_counts "):
        term().begin(ClientModule(MLP((4,), 3)))


def test_a_term_that_misses_the_network_is_refused_in_training():
    term = Proximal()
    term.begin(ClientModule(MLP(in_shape=(4,), num_classes=3)))
    with pytest.raises(ConfigError, match=r"^Proximal: .* Step "):
        term(STEP)


class Stranger(L.LightningModule):
    """A user's LightningModule with FedProx's term."""

    def __init__(self, net, begins=True):
        super().__init__()
        self.net, self.begins, self.proximal = net, begins, Proximal(mu=5.0)

    def on_fit_start(self):
        if self.begins:
            self.proximal.begin(ClientModule(self.net))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        return F.cross_entropy(logits, y) + self.proximal(Step(logits, y, backbone=self.net))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def client(mu, net):
    """Return FedProx's client."""
    return FedProx(mu=mu).client_module(net, partial(torch.optim.SGD, lr=0.1))


def fitted(build):
    """Return the weights of a network after a plain fit."""
    torch.manual_seed(0)
    net = MLP(in_shape=(4,), num_classes=3)
    module, generator = build(net), torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 4, generator=generator), torch.arange(24) % 3
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8))
    return net.state_dict()


@plain_lightning
def test_fedprox_in_a_strangers_module_equals_a_client():
    ours = fitted(Stranger)
    assert same_bytes(ours, fitted(partial(client, 5.0)))
    assert not same_bytes(ours, fitted(partial(client, 0.0)))


@plain_lightning
def test_a_strangers_module_without_begin_does_not_train():
    with pytest.raises(ConfigError, match=r"^Proximal: begin was not called"):
        fitted(partial(Stranger, begins=False))
