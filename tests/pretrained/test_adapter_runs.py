"""Runs with pretrained models and peft's adapters: compared with a loop by hand, exact means, resumes, processes."""

import copy
from functools import partial

import numpy as np
import pytest

pytest.importorskip("peft")

import torch
from experiments import experiment, finished, in_two_parts, local_batches, record_rounds, same_bytes, untimed
from methods import ADAPTERS, assert_same_run
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from tiny_models import TARGETS, TASKS, text_options
from torch import nn
from torch.nn import functional as F

from fl_lightning import algorithms
from fl_lightning.algorithms import FedExLoRA, FedIT, FlexLoRA, FLoRA
from fl_lightning.engines import ProcessesEngine

DOUBLE = {"trainer": {"accelerator": "cpu", "max_epochs": 1, "precision": "64-true"}}


def average(states, sizes):
    return {
        key: sum(size * state[key] for size, state in zip(sizes, states, strict=True)) / sum(sizes) for key in states[0]
    }


def start_of(run, name):
    """Return peft's own model of a user with the initial weights of a run."""
    base = TASKS["sequence_classification"].from_pretrained(run.worker.model.keywords["base"].keywords["path"])
    config = LoraConfig(
        task_type="SEQ_CLS", r=3, lora_alpha=6, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2"
    )
    model = get_peft_model(base.double(), config)
    start = run.worker.template.backbone.state_dict()
    head = "score" if name == "gpt2" else "classifier"
    new = {key: value for key, value in start.items() if "lora" in key or key.startswith("head.")}
    names = {
        key: key.replace("head.", f"{head}.").removeprefix("encoder.network.").replace(".default", "") for key in new
    }
    result = set_peft_model_state_dict(model, {f"base_model.model.{names[key]}": value for key, value in new.items()})
    assert not result.unexpected_keys
    return model.train()


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_three_rounds_equal_a_loop_by_hand_with_peft(tmp_path, name):
    """A FedAvg loop as a user of peft writes it, without this package."""
    options = text_options(tmp_path, name) | DOUBLE
    run = experiment(tmp_path / "run", FedIT(), **options)
    run.load()
    model = start_of(run, name)
    for round in (1, 2, 3):
        start, states, sizes = copy.deepcopy(get_peft_model_state_dict(model)), [], []
        for client in run.server.participants(round):
            set_peft_model_state_dict(model, start)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in (batch for epoch in local_batches(run, round, client) for batch in epoch):
                optimizer.zero_grad()
                F.cross_entropy(model(**x.tensors).logits, y).backward()
                optimizer.step()
            states.append(copy.deepcopy(get_peft_model_state_dict(model)))
            sizes.append(len(run.data.shards[client].train))
        set_peft_model_state_dict(model, average(states, sizes))
    run.fit()
    ours = run.evaluator.global_module(3).backbone.double().eval()
    x = run.data.data.x_test
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model.eval()(**x.tensors).logits, rtol=1e-6, atol=1e-6)
    end = get_peft_model_state_dict(model)
    for key, value in run.state["model"].items():
        name_there = key.replace("head.", "score." if name == "gpt2" else "classifier.").removeprefix(
            "encoder.network."
        )
        expected = end[f"base_model.model.{name_there.replace('.default', '')}"]
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


def merged_weights(network, state):
    """Return the weights of a network's adapted layers with peft's own product, by name."""
    network.load_state_dict(state, strict=False)
    layers = {name: layer for name, layer in network.named_modules() if hasattr(layer, "get_delta_weight")}
    return {
        name: (layer.base_layer.weight + layer.get_delta_weight("default")).detach().clone()
        for name, layer in layers.items()
    }


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("method", [FedExLoRA, FLoRA, partial(FLoRA, ranks=[3, 1])], ids=["FedEx", "FLoRA", "ranks"])
def test_the_global_model_is_the_mean_of_the_clients_merged_models(tmp_path, name, method):
    """With linear layers and with `Conv1D`, whose weights are stored the other way round."""
    run = experiment(tmp_path / "run", method(), **text_options(tmp_path, name) | DOUBLE)
    rounds = record_rounds(run)
    run.fit()
    network = run.worker.modules.build().backbone
    for before, uploads, after in rounds:
        clients, sizes = [], [upload.n_samples for upload in uploads]
        for upload in uploads:
            sent = upload.message.section("model")
            whole = {key: torch.zeros_like(before["model"][key], dtype=torch.float64) for key in sent}
            for key, value in sent.items():
                whole[key][tuple(map(slice, value.shape))] = value
            clients.append(merged_weights(network, before["model"] | whole))
        exact, got = average(clients, sizes), merged_weights(network, after["model"])
        assert len(exact) >= 4
        for key, value in exact.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-12)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_run_resumes_to_the_same_bytes_without_the_network(tmp_path, name, no_network):
    method, options = getattr(algorithms, name), text_options(tmp_path, dropout=0.2)
    assert_same_run(*in_two_parts(tmp_path, method, 2, **options))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["FedExLoRA", "FedSALoRA", "FlexLoRA", "RoLoRA"])
def test_processes_give_the_bytes_of_the_sequential_engine(tmp_path, name):
    method = getattr(algorithms, name)
    one, other = (
        finished(tmp_path / str(engine), method(), engine=engine, **text_options(tmp_path))
        for engine in ("sequential", ProcessesEngine(2))
    )
    assert_same_run(one, other)


def test_the_bytes_of_a_round_are_those_of_the_factors_and_the_head(tmp_path):
    run = finished(tmp_path / "run", FlexLoRA(ranks=[3, 1]), **text_options(tmp_path) | {"clients_per_round": 4})
    layers, head = 4, 16 * 2 + 2  # query and value of two layers of width 16
    floats = sum(layers * rank * (16 + 16) + head for rank in (3, 1, 3, 1))
    assert [row["comm/up_bytes"] for row in run.csv.rows] == [4 * floats + 4 * 8] * 3
    assert [row["comm/down_bytes"] for row in run.csv.rows] == [4 * floats] * 3


class Own(nn.Module):
    """A user's own network, with peft inside and without this package."""

    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.out = nn.Linear(16, num_classes)
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["1", "3"]), self.body)
        self.out.requires_grad_(True)

    def forward(self, x):
        return self.out(self.body(x))


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_users_own_module_with_peft_inside_can_be_trained(tmp_path, name):
    run = finished(tmp_path, getattr(algorithms, name)(), model=Own, optimizer=partial(torch.optim.SGD, lr=0.02))
    final = run.client_module(0).backbone.state_dict()
    start = run.worker.template.backbone.state_dict()
    moved = {key for key, value in final.items() if not torch.equal(value, start[key])}
    assert {"body.1.lora_B.default.weight", "out.weight"} <= moved or name in ("FLoRA", "FedSALoRA")
    assert np.isfinite([row["client/acc_mean"] for row in run.csv.rows]).all()


def test_fedit_is_fedavg_bit_for_bit(tmp_path):
    one, other = (
        finished(tmp_path / kind.__name__, kind(), **text_options(tmp_path)) for kind in (FedIT, algorithms.FedAvg)
    )
    assert same_bytes(one.state["model"], other.state["model"])
    assert untimed(one.csv.rows) == untimed(other.csv.rows)
