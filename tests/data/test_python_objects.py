"""Objects of other libraries, given from Python in the place of ours: they work, or the message says what works."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import check_refused, refusal
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

from fl_lightning import FedAvg, FederatedOrchestrator, LocalTraining
from fl_lightning.client.optimizers import LRScales
from fl_lightning.data import IID, Arrays, ByClient, Dataset, LoadedData, Scenario
from fl_lightning.data.transforms import Normalize
from fl_lightning.models import MLP
from fl_lightning.models.wrapped import build_network

PAIRS = TensorDataset(torch.zeros(4, 2), torch.zeros(4))


class Own(Dataset):
    """Ten samples of two classes; the options replace fields of `LoadedData`."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def load(self) -> LoadedData:
        x, y = torch.rand(10, 1, 4, 4), torch.arange(10) % 2
        given: dict[str, Any] = {"prepare": Normalize()} | self.fields
        return LoadedData(x, y, x, y, 2, **given)


def experiment(**given: Any) -> FederatedOrchestrator:
    options: dict[str, Any] = {"scenario": Scenario(Own(), IID(), 2), "model": MLP, "algorithm": FedAvg(), "rounds": 1}
    return FederatedOrchestrator(**options | given)


OBJECTS: dict[str, tuple[Callable[[], object], str]] = {
    "list of datasets": (lambda: experiment(scenario=[(PAIRS, PAIRS)]), "scenario: got an object of type list"),
    "dataset as scenario": (lambda: experiment(scenario=Own()), "scenario: got an object of type Own"),
    "method as class": (lambda: experiment(algorithm=FedAvg), "algorithm: got the class FedAvg"),
    "torch dataset": (lambda: Scenario(PAIRS, IID()), "scenario.dataset: got an object of type TensorDataset"),
    "data frame": (lambda: Scenario(pd.DataFrame(), IID()), "scenario.dataset: got an object of type DataFrame"),
    "dataset as class": (lambda: Scenario(Own, IID()), "scenario.dataset: got the class Own"),
    "partition as text": (lambda: Scenario(Own(), "IID"), "scenario.partition: got an object of type str"),
    "partition as class": (lambda: Scenario(Own(), IID), "scenario.partition: got the class IID"),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_other_objects_are_refused_with_what_works(case: str) -> None:
    make, expected = OBJECTS[case]
    assert refusal(make).startswith(f"{expected}, ")


# --- Clients of samples ---

USERS = ["ann", "bob"] * 5
IDS: dict[str, Any] = {
    "object array": np.array(USERS, dtype=object),
    "column": pd.Series(USERS),
    "column of objects": pd.Series(USERS, dtype=object),
    "categories": pd.Series(USERS).astype("category"),
    "list": USERS,
    "tensor": torch.arange(10) % 2,
    "objects of integers": np.array([0, 1] * 5, dtype=object),
    "nullable integers": pd.Series([0, 1] * 5, dtype="Int64"),
}


@pytest.mark.parametrize("case", IDS)
def test_client_ids_can_be_columns_lists_and_arrays_of_objects(case: str) -> None:
    built = Scenario(Own(client_train=IDS[case], client_test=IDS[case]), ByClient()).build(0)
    assert built.client_ids == [0, 1] if "int" in case or case == "tensor" else ["ann", "bob"]
    assert [len(shard.train) for shard in built.shards] == [5, 5]


@pytest.mark.parametrize(
    "ids", [["ann", None] * 5, [0, "0"] * 5, [0.5] * 10, [(0, 1)] * 10, pd.Series([1.0, None] * 5)]
)
def test_other_client_ids_are_refused(ids: Any) -> None:
    check_refused(Own(client_train=ids), "dataset", "client_train")


@pytest.mark.parametrize("name", ["y_train", "client_train"])
def test_object_arrays_in_a_file_are_refused_with_the_fix(name: str, tmp_path: Any) -> None:
    arrays: dict[str, Any] = {f"x_{split}": np.zeros((4, 2)) for split in ("train", "test")}
    arrays |= {f"y_{split}": np.arange(4) % 2 for split in ("train", "test")}
    np.savez(tmp_path / "a.npz", **arrays | {name: np.array(["a", "b"] * 2, dtype=object)})
    check_refused(Arrays(str(tmp_path / "a.npz")), "dataset.path", "astype(str) or astype(int)")
    np.savez(tmp_path / "a.npz", **arrays | {"y_train": np.array(["a", "b"] * 2)})
    check_refused(Arrays(str(tmp_path / "a.npz")), "dataset.path", "y_train holds text")
    np.savez(tmp_path / "a.npz", **arrays | {"y_train": np.array([True, False] * 2)})
    assert Arrays(str(tmp_path / "a.npz")).checked().y_train.tolist() == [1, 0, 1, 0]


# --- Augmentation ---


@pytest.mark.parametrize(
    "augment",
    [
        v2.MixUp(num_classes=2),
        v2.RandomChoice([v2.CutMix(num_classes=2), v2.MixUp(num_classes=2)]),
        lambda x, y: (x, y),
        lambda x: (x, x),
        lambda x: None,
        lambda x: x[:1],
        lambda x: x.numpy(),
    ],
)
def test_an_augmentation_of_inputs_and_labels_is_refused_with_what_works(augment: Any) -> None:
    check_refused(Own(augment=augment), "dataset: Own", ": augment ", "training_step")
    assert Own(augment=v2.RandomHorizontalFlip()).checked()


def test_a_preparation_that_returns_no_batch_is_refused() -> None:
    check_refused(Own(prepare=lambda x: None), "dataset: Own", ": prepare ", "NoneType")


# --- Models ---


def small(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))


class Bert(nn.Module):
    __module__ = "transformers.models.bert.modeling_bert"

    def __init__(self, config: Any) -> None:
        super().__init__()

    @classmethod
    def from_pretrained(cls, name: str) -> Any:
        return cls(name)


@pytest.mark.parametrize("function", [small, partial(small), lambda num_classes: small(num_classes), lambda: small(3)])
def test_a_function_can_build_the_model(function: Any) -> None:
    assert build_network(function, (1, 4, 4), 3)(torch.zeros(2, 1, 4, 4)).shape == (2, 3)


MODELS: dict[str, tuple[Any, str]] = {
    "text": ("mynet.Net", "model: got an object of type str"),
    "object": (small(3), "model: got an object of the class Sequential"),
    "nothing": (lambda: None, "model: it builds an object of type NoneType"),
    "Hugging Face": (Bert, "model: Bert is a model of Hugging Face"),
    "with a config": (partial(Bert, "config"), "model: Bert is a model of Hugging Face"),
    "pretrained": (partial(Bert.from_pretrained, "a/b"), "model: Bert.from_pretrained is a model of Hugging Face"),
}


@pytest.mark.parametrize("case", MODELS)
def test_other_models_are_refused_with_what_works(case: str) -> None:
    model, expected = MODELS[case]
    assert refusal(lambda: build_network(model, (1, 4, 4), 3)).startswith(expected)


# --- Learning-rate schedules ---


def warm_up(optimizer: torch.optim.Optimizer, steps: int = 2) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1, (epoch + 1) / steps))


def test_a_function_can_build_the_schedule() -> None:
    assert [LRScales(warm_up, 3).of(round) for round in (1, 2, 3)] == [0.5, 1, 1]
    experiment(training=LocalTraining(lr_scheduler=warm_up)).check()


@pytest.mark.parametrize(
    "schedule",
    [
        "StepLR",
        torch.optim.lr_scheduler.ExponentialLR,
        lambda epoch: 0.5,
        lambda epoch: 0.9**epoch,
        warm_up(torch.optim.SGD([torch.zeros(1)])),
    ],
)
def test_other_schedules_are_refused_with_what_works(schedule: Any) -> None:
    for key, given in (
        ("lr_scheduler", {"training": LocalTraining(lr_scheduler=schedule)}),
        ("round_lr_scheduler", {"round_lr_scheduler": schedule}),
    ):
        message = refusal(lambda given=given: experiment(**given).check())
        assert message.startswith(f"{key}: ")
        assert "partial(StepLR, step_size=10)" in message
