"""FedNH's prototypes against brute force, its identities, and a round by hand (baselines: A7)."""

import copy

import pytest
import torch
from aggregation import finish
from experiments import UNEQUAL, NormMLP, descend, finished, full_batch, in_float64, same_bytes, samples_of
from hypothesis import given
from hypothesis import strategies as st
from loops import assert_equals_loop
from peers import mean_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import FedAvg, FedNH, PrototypeAveraging
from fl_lightning.algorithms.global_model.fednh import class_prototypes, uniform_prototypes
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Upload
from fl_lightning.models import MLP, Head
from fl_lightning.models.heads import CosineLinear

pytestmark = pytest.mark.numeric

C, D = 4, 6


def unit_vectors(*shape):
    return F.normalize(torch.randn(*shape), dim=-1)


def upload(client, values, counts, weight):
    sections = {"model": {"w": torch.tensor(weight)}, "prototypes": {"values": values, "counts": counts}}
    return Upload(client, Message.pack(sections, n_samples=int(counts.sum())))


# --- The prototypes ---


def test_initial_prototypes_are_unit_vectors_and_orthogonal_if_possible():
    few = uniform_prototypes(4, 6)
    torch.testing.assert_close(few @ few.T, torch.eye(4), atol=1e-6, rtol=1e-5)
    many = uniform_prototypes(6, 4)
    torch.testing.assert_close(many.norm(dim=1), torch.ones(6))
    assert not torch.equal(uniform_prototypes(4, 6), few)


def test_a_clients_prototypes_are_the_normalised_means_of_its_classes():
    z, y = unit_vectors(12, D), torch.randint(0, C - 1, (12,))  # no sample of class C - 1
    sums = torch.stack([sum((z[i] for i in range(12) if y[i] == c), torch.zeros(D)) for c in range(C)])
    counts = torch.tensor([float(sum(y == c)) for c in range(C)])
    own = class_prototypes(sums, counts)
    for c in range(C - 1):
        if counts[c]:
            mean = torch.stack([z[i] for i in range(12) if y[i] == c]).mean(dim=0)
            torch.testing.assert_close(own[c], mean / mean.norm())
    assert not own[C - 1].any()


@given(st.integers(1, 4), st.floats(0, 0.99), st.data())
def test_aggregation_equals_a_loop_over_classes_and_clients(clients, rho, data):
    counts = [
        torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=C, max_size=C))).float() for _ in range(clients)
    ]
    values = [unit_vectors(C, D) * (n > 0)[:, None] for n in counts]
    before = {"model": {"w": torch.tensor(0.0), "head.weight": unit_vectors(C, D)}}
    weights = [float(k) for k in range(clients)]
    aggregator = PrototypeAveraging(rho)
    uploads = [upload(k, v, n, w) for k, (v, n, w) in enumerate(zip(values, counts, weights, strict=True))]
    kept = before["model"]["head.weight"].clone()
    after = finish(aggregator, uploads, before)["model"]
    assert torch.equal(before["model"]["head.weight"], kept)
    assert after["w"].item() == pytest.approx(sum(weights) / clients)  # a plain mean, whatever the samples
    for c in range(C):
        total = sum(float(n[c]) for n in counts)
        if not total:
            assert torch.equal(after["head.weight"][c], kept[c])
            continue
        mean = sum(n[c] * v[c] for v, n in zip(values, counts, strict=True)) / total
        moved = rho * kept[c] + (1 - rho) * mean / mean.norm()
        torch.testing.assert_close(after["head.weight"][c], moved / moved.norm(), rtol=1e-4, atol=1e-5)


# --- The layer ---


@pytest.mark.parametrize("head", [{}, {"classifier": "bias_free"}, {"classifier": "cosine"}, {"mapping": (5, 9)}])
def test_the_classification_layer_is_replaced_by_untrained_prototypes(head):
    backbone = FedNH(scale=3.0).client_module(MLP((4,), C, hidden=(8,), head=Head(**head))).backbone
    layer = backbone.classifier
    assert isinstance(layer, CosineLinear)
    assert not layer.weight.requires_grad
    assert layer.scale.item() == 3.0
    assert layer.scale.requires_grad
    torch.testing.assert_close(layer.weight @ layer.weight.T, torch.eye(C), atol=1e-6, rtol=1e-5)
    x = torch.randn(5, 4)
    z = backbone.encoder(x)
    for part in backbone.head[:-1] if head.get("mapping") else []:
        z = part(z)
    torch.testing.assert_close(backbone(x), 3.0 * (z / z.norm(dim=1)[:, None]) @ layer.weight.T)
    fixed = FedNH(learn_scale=False).client_module(MLP((4,), C)).backbone.classifier
    assert not fixed.scale.requires_grad


@pytest.mark.parametrize("mapping", [(), (5, 6)])
def test_an_upload_contains_the_clients_prototypes_and_not_the_received_ones(mapping):
    method = FedNH()
    backbone = MLP((4,), C, hidden=(8,), head=Head(mapping=mapping))
    module = method.client_module(backbone).eval()
    x, y = torch.randn(9, 4), torch.tensor([0, 0, 1, 1, 1, 2, 2, 0, 1])
    with torch.no_grad():
        message = method.upload(module, [(x[:5], y[:5]), (x[5:], y[5:])], 9, C)
        z = backbone.encoder(x)
        for part in backbone.head[:-1] if mapping else []:
            z = part(z)
    own = message.section("prototypes")
    assert own["counts"].tolist() == [3, 4, 2, 0]
    for c in range(3):
        mean = (z[y == c] / z[y == c].norm(dim=1)[:, None]).mean(dim=0)
        torch.testing.assert_close(own["values"][c], mean / mean.norm())
    assert not own["values"][3].any()
    name = "head.3.weight" if mapping else "head.weight"
    assert message.section("model").keys() == backbone.state_dict().keys() - {name}
    assert message.numbers == {"n_samples": 9}


# --- The method ---


@pytest.mark.thorough
def test_with_rho_one_it_is_fedavg_with_a_fixed_layer_bit_for_bit(tmp_path):
    class UnderPrototypes(FedAvg):
        def client_module(self, backbone, optimizer=None, lr_scheduler=None):
            replaced = FedNH().client_module(backbone).backbone
            return super().client_module(replaced, optimizer, lr_scheduler)

    one = finished(tmp_path / "nh", FedNH(rho=1.0), rounds=2)
    other = finished(tmp_path / "avg", UnderPrototypes(weighting="uniform"), rounds=2)
    assert same_bytes(one.state["model"], other.state["model"])
    assert torch.equal(one.state["model"]["head.weight"], one.worker.template.backbone.head.weight)


class WithoutDropout(NormMLP):
    def __init__(self, in_shape, num_classes):
        super().__init__(in_shape, num_classes)
        self.encoder[4].p = 0.0


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """With full-batch steps of clients that miss classes."""
    rho, lr = 0.6, 0.5
    run = finished(tmp_path, FedNH(rho=rho), model=WithoutDropout, **UNEQUAL | full_batch(lr, weight_decay=0.1))
    net = copy.deepcopy(run.worker.template.backbone)
    shared = {k: v.clone() for k, v in net.state_dict().items()}
    for round in (1, 2, 3):
        ends, sums, counts = [], torch.zeros(10, 16), torch.zeros(10)
        for client in run.server.participants(round):
            x, y = samples_of(run, client)
            net.load_state_dict(shared)
            net.train()
            for _ in range(2):
                descend(net, F.cross_entropy(net(x), y), lr, 0.1)
            assert torch.equal(net.head.weight, shared["head.weight"])
            net.eval()
            with torch.no_grad():
                z = F.normalize(net.encoder(x), dim=1)
            for c in y.unique().tolist():
                sums[c] += (y == c).sum() * F.normalize(z[y == c].mean(dim=0), dim=0)
                counts[c] += (y == c).sum()
            ends.append({k: v.clone() for k, v in net.state_dict().items()})
        target = F.normalize(sums / counts.clamp(min=1)[:, None], dim=1)
        moved = F.normalize(rho * shared["head.weight"] + (1 - rho) * target, dim=1)
        prototypes = torch.where((counts > 0)[:, None], moved, shared["head.weight"])
        shared = mean_by_hand(ends, [1] * 3) | {"head.weight": prototypes}
    assert_equals_loop(run, run.state["model"], shared)


def test_a_model_that_ends_with_no_linear_layer_is_refused():
    net = MLP((4,), 3)
    net.head = torch.nn.Sequential(torch.nn.Linear(64, 3), torch.nn.ReLU())
    with pytest.raises(ConfigError, match=r"^model: FedNH .* ReLU"):
        FedNH().client_module(net)
    assert isinstance(FedNH().client_module(MLP((4,), 3)), ClientModule)
