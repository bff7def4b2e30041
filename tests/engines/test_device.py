"""What is laid out for a GPU changes how fast a round is, not what comes of it."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from experiments import experiment, in_float64, same_bytes, task_of_round
from torch import nn

from fl_lightning.algorithms import FedSKC
from fl_lightning.callbacks import RoundCallback
from fl_lightning.callbacks.run_summary import describe_device
from fl_lightning.data import Digits
from fl_lightning.engines import device, worker_parts
from fl_lightning.engines.checks import warn_of_emulation
from fl_lightning.engines.device import prefers_channels_last, resident
from fl_lightning.models import CNN, MLP

ELSEWHERE = torch.device("meta")


def test_data_move_to_the_device_that_trains_if_there_is_room(monkeypatch):
    data = Digits().load()
    size = sum(t.numel() * t.element_size() for t in (data.x_train, data.y_train, data.x_test, data.y_test))
    assert resident(data, torch.device("cpu")) is data
    monkeypatch.setattr(device, "free_memory", lambda _: 2 * size - 1)
    assert resident(data, ELSEWHERE) is data
    monkeypatch.setattr(device, "free_memory", lambda _: 2 * size)
    moved = resident(data, ELSEWHERE)
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
        run.check()
    one, other = (run.worker.run(task_of_round(run, 1, 0)) for run in (plain, laid_out))
    assert seen
    assert all(seen)
    for name, value in one.upload.tensors.items():
        torch.testing.assert_close(other.upload.tensors[name], value, rtol=1e-9, atol=1e-9)
        assert other.upload.tensors[name].is_contiguous()


@pytest.mark.parametrize(
    ("network", "kind", "precision", "expected"),
    [
        (CNN, "cuda", "bf16-mixed", True),
        (CNN, "cuda", "16-true", True),
        (CNN, "cuda", "32-true", False),
        (CNN, "cpu", "bf16-mixed", False),
        (MLP, "cuda", "bf16-mixed", False),
    ],
)
def test_images_are_channels_last_where_convolutions_are_faster(network, kind, precision, expected):
    assert prefers_channels_last(network((1, 8, 8), 10), torch.device(kind), precision) is expected


def test_the_format_of_images_is_chosen_once_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_parts, "prefers_channels_last", lambda network, device, precision: True)
    for chosen in (None, False, True):
        run = experiment(tmp_path / str(chosen), model=CNN, channels_last=chosen)
        run.check()
        assert run.worker.uses_channels_last is run.worker.client_data.channels_last is (chosen is not False)
        assert (", channels last," in describe_device(run)) is (chosen is not False)
    assert run.worker.modules.intact_slot() is not None  # the weights keep their format


def test_bfloat16_in_software_is_slow(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    with pytest.warns(UserWarning, match="bf16-mixed is slow, .*32-true"):
        warn_of_emulation(gpu, "bf16-mixed")
    warn_of_emulation(gpu, "32-true")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    warn_of_emulation(gpu, "bf16-mixed")


def compile_quickly(monkeypatch):
    """Compile modules with a backend that runs each graph as it is. Return the list to which it adds the graphs."""

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    graphs, compile = [], nn.Module.compile
    torch.compiler.reset()
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile(module, backend=backend))
    return graphs


def run_compiled(tmp_path, name, compile):
    run = experiment(tmp_path / name, FedSKC(), model=partial(CNN), compile=compile, rounds=1)
    run.fit()
    return run


@pytest.mark.thorough
def test_one_compilation_serves_all_clients_and_rounds(tmp_path, monkeypatch):
    plain = run_compiled(tmp_path, "plain", False)
    graphs = compile_quickly(monkeypatch)
    compiled = run_compiled(tmp_path, "compiled", True)
    before = len(graphs)
    assert before > 0
    assert same_bytes(plain.state["model"], compiled.state["model"])
    for client in range(6):  # other sizes of batch among them
        assert compiled.worker.run(task_of_round(compiled, 2, client)).failure is None
    assert len(graphs) <= before + 2
    torch.compiler.reset()


@pytest.mark.slow
@in_float64
def test_compiled_training_is_close_to_plain(tmp_path):
    plain, compiled = (run_compiled(tmp_path, str(compile), compile) for compile in (False, True))
    for name, value in plain.state["model"].items():
        torch.testing.assert_close(compiled.state["model"][name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
def test_the_module_that_is_reset_for_each_client_stays_compiled(tmp_path, monkeypatch):
    graphs, counts = compile_quickly(monkeypatch), []

    class Count(RoundCallback):
        def on_round_end(self, run, metrics):
            counts.append(len(graphs))

    run = experiment(tmp_path, model=CNN, compile=True, rounds=3, evaluate_every=3, callbacks=[Count()])
    run.fit()
    assert run.worker.modules.intact_slot() is not None
    assert counts[0] == counts[1] > 0
    torch.compiler.reset()


@pytest.mark.thorough
def test_the_benchmark_runs_on_a_cpu():
    script = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    names = ["loop", "loop, channels last", "eager", "channels last", "stacked, 8", "processes, 2"]
    command = [sys.executable, script, "--tiny", "--rounds", "1", "--only", *names]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rows = {line[:22].strip(): line[22:].split() for line in done.stdout.splitlines() if line[:22].strip() in names}
    assert list(rows) == names, done.stdout
    assert all(float(number) >= 0 for row in rows.values() for number in row), done.stdout  # none has failed
    assert "resnet8: 4 clients, 8 steps a round, 1 timed rounds, 32-true" in done.stdout
