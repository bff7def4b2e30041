"""Runs on a simulated device: the same bytes as on the CPU, and no needless transfers."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import experiment, same_bytes, task_of_round
from far_device import FAR, FarAccelerator, FarDevice, FarTensor
from lightning.pytorch.strategies import SingleDeviceStrategy
from methods import METHODS, assert_same_run
from task_runners import run_tasks
from torch import nn

import fl_lightning.callbacks as figures
from fl_lightning.algorithms import (
    CFL,
    Ditto,
    FedAvg,
    FedDW,
    FedProx,
    FedSKC,
    GlobalPeriodReview,
    HeteroFL,
    LGFedAvg,
    WeightedMean,
)
from fl_lightning.algorithms.base import Aggregation
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.state_dicts import RunningMean, first_non_finite
from fl_lightning.data import loaders
from fl_lightning.engines import SequentialEngine, StackedEngine, client_data, device, unread_result
from fl_lightning.engines.client_data import ClientData
from fl_lightning.engines.serialization import SerializedValue, deserialize
from fl_lightning.engines.task_server import Request, run_task
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP, Mixed


@pytest.fixture(autouse=True)
def plugged_in(monkeypatch: Any) -> None:
    """Lightning finds the device, which has room for all data and is scored in the CPU's batches."""
    home, autocast, is_enabled = SingleDeviceStrategy.root_device, torch.autocast.__init__, torch.is_autocast_enabled
    monkeypatch.setattr(
        SingleDeviceStrategy,
        "root_device",
        property(lambda own: FAR if isinstance(own.accelerator, FarAccelerator) else home.fget(own)),
    )
    monkeypatch.setattr(
        torch.autocast,
        "__init__",
        lambda own, kind, *args, **options: autocast(own, "cpu" if kind == FAR.type else kind, *args, **options),
    )
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: is_enabled("cpu" if kind == FAR.type else kind))
    monkeypatch.setattr(device, "free_memory", lambda device: 1 << 40)
    monkeypatch.setattr(ClientData, "eval_batch_size", 128)


def prepared(run_dir: Path, algorithm: Any, far: bool = True, **options: Any) -> Any:
    """A short experiment on either device."""
    trainer = {"accelerator": "cpu", "max_epochs": 1} | options.pop("trainer", {})
    trainer |= {"accelerator": FarAccelerator()} if far else {}
    return experiment(run_dir, algorithm, **{"rounds": 2, "clients_per_round": 3} | options, trainer=trainer)


def both(tmp_path: Path, method: Any, **options: Any) -> tuple[Any, Any, FarDevice]:
    """A run on the CPU, the same on the device, and the device."""
    near, far = (prepared(tmp_path / str(far), method(), far, **deepcopy(options)) for far in (False, True))
    near.fit()
    with FarDevice() as there:
        far.fit()
    return near, far, there


# --- The device ---


def test_the_simulated_device_refuses_what_a_gpu_refuses():
    one, other = torch.ones(2), torch.ones(2)
    with FarDevice() as there:
        far = one.to(FAR)
        assert far.device == FAR
        assert (far + 1).device == (far * torch.tensor(2.0)).device == FAR
        with pytest.raises(RuntimeError, match=r"add: tensors on two devices, \(2,\) on lazy:0, \(2,\) on cpu"):
            far + other
        with pytest.raises(RuntimeError, match="numpy"):
            far.numpy()
        assert not there.fetched
        assert far.sum().item() == 2.0
        assert same_bytes({"x": (far + 1).cpu()}, {"x": one + 1})
    assert sum(there.fetched.values()) == 3
    assert sum(there.sent.values()) == 2
    with pytest.raises(RuntimeError, match="outside FarDevice"):
        far + 1


# --- Runs ---


QUICK = ("FedSKC", "UAPDFL", "SCAFFOLD")  # a module made there, peers, a way of its own to take in what is sent


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_a_run_is_the_same_to_the_byte(tmp_path: Path, name: str) -> None:
    method, options = METHODS[name]
    near, far, _ = both(tmp_path, method, **options)
    assert far.worker.device == FAR
    assert_same_run(near, far)


class ConvNet(nn.Sequential):
    def __init__(self, in_shape, num_classes):
        convolution = nn.Conv2d(in_shape[0], 4, 3)
        super().__init__(convolution, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, num_classes))


OPTIONS = {
    "own fits": {"engine": SequentialEngine(local_loop=False)},
    "half": {"trainer": {"precision": "bf16-true"}},
    "clipped": {"trainer": {"gradient_clip_val": 0.5}},
    "channels last": {"channels_last": True, "model": ConvNet},
    "Adam kept": {"optimizer": torch.optim.Adam, "optimizer_state": "kept"},
    "stacked": {"engine": StackedEngine()},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIONS)
def test_options_give_the_same_bytes(tmp_path: Path, name: str) -> None:
    near, far, _ = both(tmp_path, FedDW if "stacked" in name else FedSKC, **OPTIONS[name])
    assert_same_run(near, far)


@pytest.mark.parametrize("method", [LGFedAvg, HeteroFL])
def test_different_networks_give_the_same_bytes_and_share_the_data(
    tmp_path: Path, method: Any, monkeypatch: Any
) -> None:
    widths = Mixed([partial(MLP, hidden=(12, 8)), partial(MLP, hidden=(6, 8))], feature_dim=8)
    stored = []
    monkeypatch.setattr(client_data, "resident", lambda *given: stored.append(device.resident(*given)) or stored[-1])
    near, far, _ = both(tmp_path, method, model=widths)
    assert_same_run(near, far)
    assert len(far.worker.groups) == 2
    assert len(stored) == 2  # one of each run


@pytest.mark.thorough
def test_stacked_clients_whose_rows_are_not_consecutive_give_the_same_bytes(tmp_path: Path) -> None:
    """Some last batches have the same size although their clients are not neighbours. No client trains alone."""
    near, far, _ = both(tmp_path, FedProx, engine=StackedEngine(), batch_size=8, clients_per_round=6)
    assert_same_run(near, far)


@pytest.mark.thorough
def test_figures_are_the_same_to_the_byte(tmp_path: Path) -> None:
    kinds = ["ClientDrift", "RowNorms", "UnitDivergence", "KnowledgeMap", "ClassRelations", "ConfusionMatrix"]
    drawn = [getattr(figures, kind)() for kind in kinds]
    near, far, _ = both(tmp_path, FedDW, callbacks=drawn, client_store="disk")
    assert_same_run(near, far)
    arrays = list(near.run_dir.rglob("*.npz"))
    assert len({path.parent for path in arrays}) == len(kinds)
    for path in arrays:
        assert path.read_bytes() == (far.run_dir / path.relative_to(near.run_dir)).read_bytes()


@pytest.mark.thorough
def test_a_resumed_run_is_the_same_to_the_byte(tmp_path: Path) -> None:
    whole = prepared(tmp_path / "whole", FedSKC(), far=False, rounds=3)
    whole.fit()
    with FarDevice():
        begun = prepared(tmp_path / "parts", FedSKC(), rounds=3)
        stop_after(begun, 2)
        resumed = prepared(tmp_path / "parts", FedSKC(), rounds=3)
        resumed.fit(resume=True)
    assert_same_run(whole, resumed)


def stop_after(run: Any, round: int) -> None:
    """Break a run off in the round that follows."""

    class Break(figures.RoundCallback):
        def on_round_start(self, run: Any, participants: Any) -> None:
            if run.round == round:
                raise OSError("broken off")

    run.callbacks.append(Break())
    with pytest.raises(OSError, match="broken off"):
        run.fit()


# --- Transfers ---


def transfers(tmp_path: Path, method: Any, **options: Any) -> tuple[int, FarDevice]:
    """How many numbers a model has, and the device after a run."""
    run = prepared(tmp_path, method(), **options)
    with FarDevice() as there:
        run.fit()
    return sum(value.numel() for value in run.state["model"].values()), there


ENGINES = {"local loop": SequentialEngine(), "own fits": SequentialEngine(local_loop=False), "stacked": StackedEngine()}

GAPS = 4 * 15  # unused elements between the entries of a flat tensor, of four entries or fewer


@pytest.mark.thorough
@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", [FedAvg, FedDW])
def test_weights_are_copied_once_a_round_for_any_number_of_clients(tmp_path: Path, method: Any, engine: str) -> None:
    options = {"engine": ENGINES[engine], "evaluate_every": 2, "rounds": 2, "model": partial(MLP, hidden=(64,))}
    crossed = []
    for clients in (2, 5):
        size, there = transfers(tmp_path / str(clients), method, clients_per_round=clients, **options)
        assert 0 <= there.fetched["state_dicts.mean"] - 2 * size <= GAPS  # the mean
        assert 0 <= there.sent["device.there"] - 2 * size <= GAPS  # what all are sent
        assert there.sent["weights.load_weights"] == 2 * size  # the model that is scored, and the final one
        del there.sent["loaders.send"]  # which samples are in each batch
        crossed.append(there.fetched.total() + there.sent.total())
    assert crossed[1] - crossed[0] < size / 2  # losses and knowledge of three more clients, in two rounds


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.fast_cases(1)
def test_a_step_copies_nothing(tmp_path: Path, engine: str) -> None:
    counts = []
    for epochs in (1, 3):
        options = {"trainer": {"max_epochs": epochs}, "engine": ENGINES[engine], "rounds": 1}
        _, there = transfers(tmp_path / str(epochs), FedDW, **options)
        losses = there.fetched.pop("losses.settle")  # those of a fit at its end
        assert there.sent.pop("loaders.send")  # the order of an epoch
        counts.append((losses / epochs, there.fetched, there.sent, +there.waits))
    assert counts[0] == counts[1]


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["local loop", "stacked"])
@pytest.mark.fast_cases(2)
def test_a_round_waits_as_often_for_any_number_of_clients(tmp_path: Path, engine: str) -> None:
    waits = []
    for clients in (2, 5):
        evaluation = Evaluation(client_model="received")  # trained models are evaluated one by one
        options = {"evaluation": evaluation, "trainer": {"max_epochs": 2}, "engine": ENGINES[engine]}
        _, there = transfers(tmp_path / str(clients), FedAvg, clients_per_round=clients, **options)
        assert there.waits["state_dicts.read_numbers"] == 2  # losses and checks of a round
        waits.append(+there.waits)
    assert waits[0] == waits[1]


@pytest.mark.thorough
@pytest.mark.parametrize("held", [1, 1 << 28])
def test_failures_are_the_same_when_results_are_read_together(tmp_path: Path, monkeypatch: Any, held: int) -> None:
    monkeypatch.setattr(unread_result, "HELD", held)
    outcomes = []
    for far in (False, True):
        run = prepared(tmp_path / str(far), FedAvg(), far, trainer={"max_epochs": 2})
        with FarDevice() as there:
            run.check()
            tasks = [task_of_round(run, 1, client) for client in range(3)]
            spoilt = {name: value * torch.nan for name, value in tasks[1].download.section("model").items()}
            tasks[1] = replace(tasks[1], download=device.Message.pack({"model": spoilt}))
            results = run_tasks(run.engine, run.worker, tasks)
        outcomes.append([(one.client, one.losses, str(one.failure)) for one in results])
        if far:
            assert there.waits["state_dicts.read_numbers"] == (3 if held == 1 else 1)
    assert outcomes[0] == outcomes[1]
    assert [bool(losses) for _, losses, _ in outcomes[1]] == [True, False, True]
    assert "loss term 'ce' is NaN or Inf" in outcomes[1][1][2]


def test_a_copy_to_a_gpu_is_pinned_and_does_not_block(monkeypatch: Any) -> None:
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda own: calls.append("pinned") or own)
    monkeypatch.setattr(torch.Tensor, "to", lambda own, *args, **options: calls.append((args, options)))
    loaders.send(torch.ones(2), torch.device("cuda"))
    loaders.send(torch.ones(2), torch.device("cpu"))
    gpu = (torch.device("cuda"),)
    assert calls == ["pinned", (gpu, {"non_blocking": True})]
    calls.clear()
    loaders.send(Inputs((torch.ones(2), torch.ones(2))), torch.device("cuda"))
    assert calls == ["pinned", "pinned", (gpu, {"non_blocking": True}), (gpu, {"non_blocking": True})]


# --- Devices of what overridden methods get ---


class Seen:
    """Devices of the weights that parts of a method were handed."""

    def __init__(self) -> None:
        self.at: dict[str, set[torch.device]] = {}

    def look(self, where: str, weights: dict[str, torch.Tensor]) -> None:
        self.at.setdefault(where, set()).update(value.device for value in weights.values())


class OwnFold(WeightedMean):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def fold(self, folded, upload):
        self.seen.look("fold", upload.message.section("model"))
        super().fold(folded, upload)


class OwnReview(GlobalPeriodReview):
    def fold(self, folded, upload):
        super().fold(folded, upload)


class Watching(FedAvg):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen


class OwnUpload(Watching):
    def upload(self, module, *data):
        message = super().upload(module, *data)
        self.seen.look("upload", message.section("model"))
        return message


class OwnMemory(Watching):
    def remember(self, module, upload):
        self.seen.look("remember", upload.section("model"))
        return super().remember(module, upload) | {"own": dict(module.backbone.state_dict())}


class OwnAggregate(Watching):
    def aggregation(self, round):
        return LookingAggregation(self, round)


class LookingAggregation(Aggregation):
    def add(self, upload):
        self.algorithm.seen.look("aggregate", upload.message.section("model"))
        super().add(upload)


class OwnStart(Watching):
    def receive(self, module, download, memory):
        self.seen.look("receive", download.section("model"))
        self.seen.look("module", module.backbone.state_dict())
        super().receive(module, download, memory)


OWN_PARTS = {
    "fold": lambda seen: FedAvg(aggregator=OwnFold(seen)),
    "upload": OwnUpload,
    "remember": OwnMemory,
    "aggregate": OwnAggregate,
    "receive": OwnStart,
}


@pytest.mark.thorough
@pytest.mark.parametrize("part", OWN_PARTS)
@pytest.mark.fast_cases(1)
def test_overridden_methods_get_tensors_on_the_cpu(tmp_path: Path, part: str) -> None:
    seen = Seen()
    run = prepared(tmp_path, OWN_PARTS[part](seen))
    with FarDevice():
        run.fit()
    assert set(seen.at) == ({"receive", "module"} if part == "receive" else {part})
    assert set().union(*seen.at.values()) == {torch.device("cpu")}
    for memory in run.memory.values():
        assert all(not isinstance(value, FarTensor) for section in memory.values() for value in section.values())


@pytest.mark.parametrize(
    ("method", "averages"),
    [
        (FedAvg, True),
        (FedSKC, False),  # it needs all of them at once
        (partial(FedSKC, gda=False), True),
        (partial(FedSKC, aggregator=GlobalPeriodReview(OwnFold(Seen()))), False),
        (partial(FedSKC, aggregator=OwnReview()), False),
        (FedDW, True),
        (CFL, False),
        (Ditto, False),
        (lambda: FedAvg(aggregator=OwnFold(Seen())), False),
        (lambda: OwnUpload(Seen()), False),
    ],
)
def test_only_averages(method: Any, averages: bool) -> None:
    assert method().only_averages == averages


# --- The parts ---


def test_answers_to_other_processes_are_on_the_cpu(tmp_path: Path) -> None:
    run = prepared(tmp_path, FedAvg())
    with FarDevice():
        run.check()
        task = task_of_round(run, 1, 0)
        here = run.worker.run(task)
        assert {type(value) for value in here.upload.tensors.values()} == {FarTensor}
        request = Request(SerializedValue(task).parts, None)
        answer = deserialize(run_task(SequentialEngine(), run.worker, request, []).parts)
        assert {type(value) for value in answer.result.upload.tensors.values()} == {torch.Tensor}
        assert same_bytes(answer.result.upload.tensors, here.upload.on_cpu().tensors)


def test_a_mean_is_computed_on_the_device_and_copied_once():
    generator = torch.Generator().manual_seed(1)
    states = [{"w": torch.randn(300, 700, generator=generator), "n": torch.tensor([k])} for k in range(4)]
    near = RunningMean()
    for k, state in enumerate(states):
        near.add(state, k + 1)
    with FarDevice() as there:
        far = RunningMean()
        for k, state in enumerate(states):
            moved = {name: value.to(FAR) for name, value in state.items()}
            far.add(state if k == 2 else moved, k + 1)  # one that comes from another process
        assert not there.fetched
        value = far.value()
        assert there.fetched.total() == 300 * 700 + 1
    assert same_bytes(value, near.value())


def test_the_search_for_nan_waits_once():
    fine = {"a": torch.ones(3), "n": torch.tensor(1), "b": torch.ones(2, 2), "near": torch.ones(2)}
    with FarDevice() as there:
        moved = {name: value if name == "near" else value.to(FAR) for name, value in fine.items()}
        assert first_non_finite(moved) is None
        assert there.fetched == {"state_dicts.read_numbers": 2}  # one number for each tensor
        assert there.waits["state_dicts.read_numbers"] == 1
        moved["b"][1, 1] = torch.inf
        assert first_non_finite(moved) == "b"
        moved["a"][0] = torch.nan
        assert first_non_finite(moved) == "a"
        assert first_non_finite(moved | {"near": torch.tensor([torch.nan, 1.0])}) == "a"


def test_tensors_that_downloads_share_are_copied_once():
    with FarDevice() as there:
        sent = device.DeviceCopies(FAR)
        shared, own = torch.ones(10), [torch.ones(3), torch.ones(3)]
        message = [device.Message.pack({"model": {"w": shared, "v": v}, "other": {"x": v}}, n=1) for v in own]
        one, other = map(sent, message)
        assert there.sent.total() == 10 + 3 + 3
        assert one.section("model")["w"] is other.section("model")["w"]
        assert one.section("model")["v"].device == FAR
        assert one.section("other")["x"] is own[0]  # knowledge is small
        assert one.numbers == {"n": 1}
        sent(device.Message.pack({"model": {"v": own[1]}}))  # no more is held than the last one's
        sent(message[0])
    assert there.sent.total() == 10 + 3 + 3 + 10 + 3


def test_changed_tensors_are_copied_again():
    """A method may fill one tensor with each client's weights in turn."""
    with FarDevice():
        sent, filled = device.DeviceCopies(FAR), torch.zeros(3)
        arrived = [sent(device.Message.pack({"model": {"w": filled.fill_(k)}})).section("model")["w"] for k in (1, 2)]
        assert [value.cpu().tolist() for value in arrived] == [[1.0] * 3, [2.0] * 3]


def test_inference_tensors_are_always_copied():
    with torch.inference_mode():
        made = torch.ones(3)
    with FarDevice():
        sent = device.DeviceCopies(FAR)
        there = sent(device.Message.pack({"model": {"w": made}})).section("model")["w"]
        assert there.device == FAR
        assert there.cpu().tolist() == [1.0] * 3
        with torch.inference_mode():
            made.fill_(2)
        again = sent(device.Message.pack({"model": {"w": made}})).section("model")["w"]
        assert again.cpu().tolist() == [2.0] * 3


def test_without_float64_weights_are_averaged_on_the_cpu(tmp_path: Path, monkeypatch: Any) -> None:
    assert not device.has_doubles(torch.device("mps"))
    monkeypatch.setattr("fl_lightning.engines.module_factory.has_doubles", lambda device: device.type != FAR.type)
    run = prepared(tmp_path, FedAvg())
    with FarDevice():
        run.check()
        result = run.worker.run(task_of_round(run, 1, 0))
    assert {type(value) for value in result.upload.tensors.values()} == {torch.Tensor}
