"""What is laid out for a GPU changes how fast a round is, not what comes of it."""

from functools import partial

import pytest
import torch
from experiments import experiment, in_float64, same_bytes, task_of_round
from torch import nn
from torch._dynamo.utils import counters

from fl_lightning.algorithms import FedSKC
from fl_lightning.data import Digits
from fl_lightning.engines.device import resident
from fl_lightning.models import CNN

ELSEWHERE = torch.device("meta")


def test_data_move_to_the_device_that_trains_if_there_is_room():
    data = Digits().load()
    size = sum(t.numel() * t.element_size() for t in (data.x_train, data.y_train, data.x_test, data.y_test))
    assert resident(data, torch.device("cpu")) is data
    assert resident(data, ELSEWHERE, room=size - 1) is data
    moved = resident(data, ELSEWHERE, room=size)
    assert {t.device for t in (moved.x_train, moved.y_train, moved.x_test, moved.y_test)} == {ELSEWHERE}
    assert moved.num_classes == data.num_classes


@in_float64
def test_channels_last_trains_the_same_and_uploads_plain_tensors(tmp_path):
    seen = []

    class Watched(CNN):
        def forward(self, x):
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return super().forward(x)

    plain, laid_out = (
        experiment(tmp_path / str(channels_last), FedSKC(), model=model, channels_last=channels_last)
        for channels_last, model in ((False, CNN), (True, Watched))
    )
    for run in (plain, laid_out):
        run._build()
    convolution = next(
        m for m in laid_out.worker.modules.build().modules() if isinstance(m, nn.Conv2d) and m.in_channels > 1
    )
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    one, other = (run.worker.run(task_of_round(run, 1, 0)) for run in (plain, laid_out))
    assert seen
    assert all(seen)
    for name, value in one.upload.tensors.items():
        torch.testing.assert_close(other.upload.tensors[name], value, rtol=1e-9, atol=1e-9)
        assert other.upload.tensors[name].is_contiguous()


def run_compiled(tmp_path, name, compile):
    run = experiment(tmp_path / name, FedSKC(), model=partial(CNN), compile=compile, rounds=1)
    run.fit()
    return run


@pytest.mark.thorough
def test_one_compilation_serves_all_clients_and_rounds(tmp_path, monkeypatch):
    plain = run_compiled(tmp_path, "plain", False)
    torch._dynamo.reset()
    counters.clear()
    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile(module, backend="eager"))
    compiled = run_compiled(tmp_path, "compiled", True)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    assert same_bytes(plain.state["model"], compiled.state["model"])
    for client in range(6):  # other sizes of batch among them
        assert compiled.worker.run(task_of_round(compiled, 2, client)).failure is None
    assert counters["stats"]["unique_graphs"] <= graphs + 2
    torch._dynamo.reset()


@pytest.mark.slow
@in_float64
def test_compiled_training_is_close_to_plain(tmp_path):
    plain, compiled = (run_compiled(tmp_path, str(compile), compile) for compile in (False, True))
    for name, value in plain.state["model"].items():
        torch.testing.assert_close(compiled.state["model"][name], value, rtol=1e-9, atol=1e-9)
