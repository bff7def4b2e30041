"""A client's weights are copied only if they can still be changed or read."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from experiments import experiment, publish, same_bytes, task_of_round
from methods import FEW_QUICK, METHODS
from torch import Tensor, nn

from fl_lightning.algorithms import Algorithm, FedAvg, FedPer
from fl_lightning.client.knowledge import SharedKnowledge
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import detached, loads_plainly, to_cpu
from fl_lightning.core.message import Message
from fl_lightning.engines import Task, module_copier
from fl_lightning.engines.module_copier import ModuleCopier, empty_copy
from fl_lightning.engines.worker import Worker
from fl_lightning.models import MLP, ResNet8


@pytest.fixture(autouse=True)
def _fill_empty_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill empty copies with NaN, so that a test fails if a value is used."""

    def filled(tensor: Tensor) -> Tensor:
        made = empty_copy(tensor)
        with torch.no_grad():
            return made.fill_(float("nan") if made.is_floating_point() else -7)

    monkeypatch.setattr(module_copier, "empty_copy", filled)


def worker_and_task(tmp_path: Any, algorithm: Any = None, **options: Any) -> tuple[Worker, Task]:
    """Return a worker, and a client's task of round 1."""
    run = experiment(tmp_path, algorithm, **options)
    run.check()
    if not run.algorithm.server:
        publish(run)
    return run.worker, task_of_round(run, 1, run.server.participants(1)[0])


def run_and_get_module(worker: Worker, task: Task, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ClientModule]:
    """Return the result of a task, and the module that was trained."""
    modules: list[ClientModule] = []
    plain = Worker.finish

    def noted(self: Worker, task: Task, module: ClientModule, *rest: Any) -> Any:
        modules.append(module)
        return plain(self, task, module, *rest)

    monkeypatch.setattr(Worker, "finish", noted)
    return worker.run(task), modules[0]


def shared_with(module: ClientModule, upload: Message) -> int:
    """Return how many tensors of an upload share memory with the module."""
    own = {value.data_ptr() for value in module.state_dict().values()}
    return sum(value.data_ptr() in own for value in upload.tensors.values())


# --- Results do not change ---


@pytest.mark.parametrize("name", FEW_QUICK)
def test_results_equal_those_with_all_copies(tmp_path: Any, name: str) -> None:
    method, options = METHODS[name]

    def outcome(algorithm: Algorithm) -> list[dict[str, Tensor]]:
        worker, task = worker_and_task(tmp_path, algorithm, **options)
        start, result = worker.modules.receive(task).state_dict(), worker.run(task)
        return [start, result.upload.tensors, *(result.memory[key] for key in sorted(result.memory))]

    with_copies = method()
    with_copies.plain_exchange = False
    for one, other in zip(outcome(method()), outcome(with_copies), strict=True):
        assert same_bytes(one, other)


# --- What a client starts from ---


def test_initial_weights_that_are_overwritten_are_not_copied(tmp_path: Any) -> None:
    worker, task = worker_and_task(tmp_path)
    empty_copy = worker.modules.build(task.download.section("model")).backbone.state_dict()
    assert all(value.isnan().all() for value in empty_copy.values())
    assert not any(value.isnan().any() for value in worker.modules.receive(task).backbone.state_dict().values())


def test_personal_parts_start_from_the_initial_weights(tmp_path: Any) -> None:
    worker, task = worker_and_task(tmp_path, FedPer())
    start, initial = worker.modules.receive(task).backbone, worker.modules.build().backbone
    assert same_bytes(start.head.state_dict(), initial.head.state_dict())


class LoadsHalfway(MLP):
    """Loading sets the mean of the current and the loaded weights."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_load_state_dict_pre_hook(self._half)

    def _half(self, module: nn.Module, weights: dict[str, Tensor], *rest: Any) -> None:
        own = self.state_dict()
        weights |= {name: (value + own[name]) / 2 for name, value in weights.items()}


class OverridesLoadOfLayer(nn.Linear):
    """A layer that overrides how it loads its entries."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


class OverridesLoadStateDict(nn.Sequential):
    """A module that overrides `load_state_dict`."""

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return super().load_state_dict(*args, **options)


def test_a_network_whose_loading_reads_its_weights_gets_the_initial_ones(tmp_path: Any) -> None:
    worker, task = worker_and_task(tmp_path, model=LoadsHalfway)
    expected = worker.modules.build().backbone
    expected.load_state_dict({name: 3 * value for name, value in expected.state_dict().items()})
    tripled = Message({name: 3 * value for name, value in task.download.tensors.items()})
    start = worker.modules.receive(replace(task, download=tripled)).backbone
    assert same_bytes(start.state_dict(), expected.state_dict())


def hooked_after() -> nn.Module:
    module = nn.Linear(1, 1)
    module.register_load_state_dict_post_hook(lambda *args: None)
    return module


@pytest.mark.parametrize(
    ("network", "plain"),
    [
        (lambda: ResNet8(in_shape=(3, 8, 8), num_classes=2), True),
        (lambda: nn.BatchNorm1d(2), True),
        (lambda: LoadsHalfway(in_shape=(1,), num_classes=2), False),
        (lambda: nn.Sequential(nn.Sequential(OverridesLoadOfLayer(1, 1))), False),
        (lambda: OverridesLoadStateDict(nn.Linear(1, 1)), False),
        (lambda: nn.Sequential(hooked_after()), False),
        (lambda: nn.LazyLinear(2), False),
    ],
)
def test_modules_with_default_loading(network: Any, plain: bool) -> None:
    assert loads_plainly(network()) == plain


class NotesInitialWeights(FedAvg):
    """Records the weights before the download is loaded."""

    def receive(self, module: ClientModule, download: Message, memory: Any) -> None:
        before = next(module.parameters()).clone()
        super().receive(module, download, memory)
        module.notes["before"] = {"first": before}


def test_a_method_that_overrides_receive_gets_the_initial_weights(tmp_path: Any) -> None:
    worker, task = worker_and_task(tmp_path, NotesInitialWeights())
    before = worker.modules.receive(task).notes["before"]["first"]
    assert torch.equal(before, next(worker.modules.build().parameters()))


class ParameterSubclass(nn.Parameter):
    """A subclass of Parameter."""


class SpecialEntries(nn.Module):
    """A frozen and transposed parameter with two names, a buffer, and a parameter of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3).t(), requires_grad=False)
        self.same = self.weight
        self.register_buffer("count", torch.tensor([1, 2]))
        self.kind = ParameterSubclass(torch.ones(2))
        self.left = nn.Parameter(torch.ones(2))


def test_an_empty_copy_keeps_everything_except_the_values() -> None:
    module = SpecialEntries()
    built = ModuleCopier(module).build(["weight", "same", "count", "nobody's"])
    assert type(built.weight) is nn.Parameter
    assert not built.weight.requires_grad
    assert built.weight.stride() == module.weight.stride()
    assert built.weight is built.same
    assert built.weight.isnan().all()
    assert built.count.tolist() == [-7, -7]
    assert built.count.dtype == torch.int64
    assert built.left.tolist() == [1, 1]


def test_a_parameter_of_a_subclass_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_copier, "empty_copy", empty_copy)
    copied = ModuleCopier(SpecialEntries()).build(["kind"]).kind
    assert type(copied) is ParameterSubclass
    assert copied.tolist() == [1, 1]


# --- What a client sends ---


def test_weights_of_a_module_that_is_not_used_again_are_sent_without_a_copy(tmp_path: Any, monkeypatch: Any) -> None:
    worker, task = worker_and_task(tmp_path)
    result, module = run_and_get_module(worker, task, monkeypatch)
    assert shared_with(module, result.upload) == len(result.upload.tensors)
    assert not any(value.requires_grad for value in result.upload.tensors.values())


@pytest.mark.parametrize("wanted", ["evaluate", "evaluate_globally"])
def test_weights_that_are_evaluated_later_are_copied(tmp_path: Any, wanted: str, monkeypatch: Any) -> None:
    worker, task = worker_and_task(tmp_path)
    result, module = run_and_get_module(worker, replace(task, **{wanted: True}), monkeypatch)
    assert shared_with(module, result.upload) == 0


class ZeroesUpload(FedAvg):
    """Sets the uploaded tensors to zero in `upload`."""

    def upload(self, *args: Any) -> Message:
        message = super().upload(*args)
        for value in message.tensors.values():
            value.zero_()
        return message


class ZeroesUploadLater(FedAvg):
    """Sets the uploaded tensors to zero in `remember`, and keeps the trained weights."""

    def remember(self, module: ClientModule, upload: Message) -> Any:
        for value in upload.tensors.values():
            value.zero_()
        return {"trained": {name: value.clone() for name, value in module.backbone.state_dict().items()}}


@pytest.mark.parametrize("method", [ZeroesUpload, ZeroesUploadLater])
def test_a_method_can_modify_the_uploaded_tensors(tmp_path: Any, method: Any, monkeypatch: Any) -> None:
    worker, task = worker_and_task(tmp_path, method())
    result, module = run_and_get_module(worker, task, monkeypatch)
    assert not any(value.any() for value in result.upload.tensors.values())
    assert all(value.any() for value in module.backbone.state_dict().values())
    assert shared_with(module, result.upload) == 0


class Echo(SharedKnowledge):
    """Knowledge that a client sends back unchanged."""

    name = "echo"

    def initial(self, num_classes: int) -> dict[str, Tensor]:
        return {"values": torch.ones(num_classes)}

    def summarize(self, *args: Any) -> dict[str, Tensor]:
        return {"values": self.values}


class NeedsEcho(LossTerm):
    """A term that needs this knowledge and adds nothing."""

    active = False

    @property
    def knowledge(self) -> tuple[SharedKnowledge, ...]:
        return (Echo(),)


def test_knowledge_is_always_copied(tmp_path: Any) -> None:
    worker, task = worker_and_task(tmp_path, FedAvg(loss_terms=[NeedsEcho()]))
    sent, upload = task.download.section("echo")["values"], worker.run(task).upload.section("echo")["values"]
    assert torch.equal(sent, upload)
    assert sent.data_ptr() != upload.data_ptr()


def test_tensors_with_shared_memory_are_copied() -> None:
    whole, tied = torch.arange(6.0), torch.ones(2)
    half = torch.ones(2, dtype=torch.bfloat16)
    sections = {"model": {"alone": torch.ones(3), "view": whole[:2], "one": tied, "other": tied, "half": half}}
    sections["model"]["turned"] = torch.arange(6.0).view(2, 3).t()
    own, made = sections["model"], detached(sections, None, copy=False)["model"]
    same = {name for name in own if made[name].data_ptr() == own[name].data_ptr()}
    assert same == {"alone", "one"}
    assert all(torch.equal(made[name], own[name].float()) for name in own)
    assert all(value.is_contiguous() for value in made.values())
    assert made["half"].dtype == torch.float32


def test_everything_is_copied_by_default() -> None:
    own = {"a": torch.ones(2), "b": torch.ones(2, 3).t()}
    made = to_cpu({"model": own})["model"]
    assert not any(made[name].data_ptr() == own[name].data_ptr() for name in own)
    assert all(value.is_contiguous() for value in made.values())
