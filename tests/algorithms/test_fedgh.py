"""FedGH: the server's training against brute force, what is sent, and a whole run by hand."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from experiments import UNEQUAL, NormMLP, descend, experiment, finished, in_float64, record_rounds, same_bytes
from loops import assert_equals_loop, steps_of
from methods import SIAMESE
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import FedGH, LGFedAvg
from fl_lightning.algorithms.personalized import fedgh as gh
from fl_lightning.core.seeding import Stream, derive
from fl_lightning.models import MLP, Head

C, WIDTH = 4, 3
SERVER = {"server_epochs": 3, "server_lr": 0.3, "server_batch_size": 4}


def test_the_training_data_are_the_means_of_the_classes_that_clients_have():
    values, known = torch.randn(2, C, WIDTH), torch.tensor([[1, 0, 0, 1], [0, 1, 0, 1]], dtype=torch.bool)
    features, classes = gh.labelled_means(values, known)
    pairs = [(k, c) for k in range(2) for c in range(C) if known[k, c]]
    assert classes.tolist() == [c for _, c in pairs]
    assert torch.equal(features, torch.stack([values[k, c] for k, c in pairs]))


@in_float64
def test_the_head_is_trained_by_gradient_steps_on_the_cross_entropy():
    head, features, classes = nn.Linear(WIDTH, C), torch.randn(5, WIDTH), torch.tensor([0, 1, 3, 3, 2])
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    gh.train_head(head, features, classes, 2, 0.3, 3, torch.Generator().manual_seed(7))
    draws = torch.Generator().manual_seed(7)
    for _ in range(2):
        order = torch.randperm(5, generator=draws).tolist()
        for chosen in (order[:3], order[3:]):
            gradients = torch.zeros_like(weight), torch.zeros_like(bias)
            for i in chosen:  # of the cross-entropy: (softmax - one-hot) times the features
                error = (weight @ features[i] + bias).exp()
                error = error / error.sum() - torch.eye(C)[classes[i]]
                gradients[0].add_(error[:, None] * features[i] / len(chosen))
                gradients[1].add_(error / len(chosen))
            weight, bias = weight - 0.3 * gradients[0], bias - 0.3 * gradients[1]
    torch.testing.assert_close(head.weight.detach(), weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head.bias.detach(), bias, rtol=1e-12, atol=1e-12)


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, FedGH(**SERVER), **UNEQUAL)
    run.load()
    initial = run.worker.template.backbone
    head, own = copy.deepcopy(initial.head), {}
    for round in (1, 2, 3):
        pairs = []
        for client in run.server.participants(round):
            model = own.setdefault(client, copy.deepcopy(initial))
            model.head.load_state_dict(head.state_dict())
            for x, y in steps_of(run, round, client):
                descend(model, F.cross_entropy(model(x), y), 0.2)
            index = run.data.shards[client].train
            x, y = run.data.data.x_train[index].double(), run.data.data.y_train[index]
            with torch.no_grad():
                features = model.encoder(x)
            pairs += [(features[y == c].mean(dim=0), c) for c in y.unique().tolist()]
        rng = np.random.default_rng(derive(0, Stream.AGGREGATION, round))
        draws = torch.Generator().manual_seed(int(rng.integers(2**62)))
        for _ in range(3):
            order = torch.randperm(len(pairs), generator=draws).tolist()
            for i in range(0, len(order), 4):
                means, classes = zip(*(pairs[j] for j in order[i : i + 4]), strict=True)
                descend(head, F.cross_entropy(head(torch.stack(means)), torch.tensor(classes)), 0.3)
    run.fit()
    assert_equals_loop(run, run.state["model"], {f"head.{name}": value for name, value in head.state_dict().items()})
    for client, model in own.items():
        expected = {name: value for name, value in model.state_dict().items() if name.startswith("encoder.")}
        assert_equals_loop(run, run.memory[client]["personal"], expected)
        received = run.client_module(client).backbone
        assert same_bytes(
            dict(received.head.state_dict()), {n.removeprefix("head."): v for n, v in run.state["model"].items()}
        )


def test_without_server_training_every_round_starts_with_the_initial_head(tmp_path):
    run = experiment(tmp_path, FedGH(server_epochs=0), model=NormMLP)
    run.load()
    initial = copy.deepcopy(run.worker.template.backbone.head.state_dict())
    run.fit()
    assert same_bytes(run.state["model"], {f"head.{name}": value for name, value in initial.items()})
    first = finished(tmp_path / "lg", LGFedAvg(), model=NormMLP, rounds=1)
    one = finished(tmp_path / "one", FedGH(), model=NormMLP, rounds=1)
    for client in one.memory:  # the clients' first round does not depend on the server
        assert same_bytes(one.memory[client]["personal"], first.memory[client]["personal"])


@pytest.mark.parametrize("model", [NormMLP, SIAMESE])
def test_only_heads_go_down_and_only_means_go_up(tmp_path, model):
    run = experiment(tmp_path, FedGH(), model=model, rounds=2)
    run.load()
    seen = record_rounds(run)
    run.fit()
    for before, uploads, after in seen:
        assert before["model"].keys() == after["model"].keys() == {"head.weight", "head.bias"}
        assert not same_bytes(before["model"], after["model"])
        for upload in uploads:
            assert upload.message.sections.keys() == {"representations"}
            assert upload.message.section("representations").keys() == {"values", "known"}
    sent = run.server.download(3, 0)
    assert sent.sections.keys() == {"model"}
    parts = {name.partition(".")[0] for name in run.worker.template.backbone.state_dict()} - {"head"}
    assert {name.partition(".")[0] for name in run.memory[run.server.participants(1)[0]]["personal"]} == parts


@pytest.mark.parametrize("head", [Head(hidden=(8,)), Head(classifier="cosine")])
def test_other_heads_are_trained_too(tmp_path, head):
    run = finished(tmp_path, FedGH(server_lr=0.5), model=partial(MLP, hidden=(16,), head=head), rounds=1)
    initial = run.worker.template.backbone.state_dict()
    assert all(not torch.equal(value, initial[name]) for name, value in run.state["model"].items())


def frozen_bias(in_shape, num_classes):
    network = MLP(in_shape, num_classes, hidden=(8,))
    network.head.bias.requires_grad_(False)
    return network


def test_a_frozen_part_of_the_head_is_used_and_not_changed(tmp_path):
    run = finished(tmp_path, FedGH(server_lr=0.5), model=frozen_bias, rounds=2)
    assert run.state["model"].keys() == {"head.weight"}
    bias = run.worker.template.backbone.head.bias
    assert torch.equal(run.algorithm.aggregator.head.bias, bias)
    assert not run.algorithm.aggregator.head.training  # no dropout
    assert torch.equal(run.client_module(0).backbone.head.bias, bias)
