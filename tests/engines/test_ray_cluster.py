"""Programs on a Ray cluster of two nodes, started with `ray start` in different working folders."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import untimed_rows
from killed_runs import results_of
from ray_nodes import environment, start, two_nodes, wait_for

pytest.importorskip("ray")
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_thread")]

MODULE = """
import os
from pathlib import Path
from fl_lightning.client.loss_term import LossTerm

class Where(LossTerm):
    '''Adds nothing to the loss, and writes where this module was found.'''

    def __init__(self, folder: str):
        super().__init__()
        self.folder = folder

    def begin(self, module):
        Path(self.folder, str(os.getpid())).write_text(f"{__file__}\\n{os.environ.get('STAGED', '')}")

    def forward(self, step):
        return step.logits.sum() * 0
"""
CONFIG = """
scenario:
  dataset: {class_path: Arrays, init_args: {path: own.npz}}
  partition: {class_path: Dirichlet, init_args: {alpha: 0.5, min_samples: 5}}
  clients: 6
model: {class_path: MLP, init_args: {hidden: [16]}}
algorithm:
  class_path: FedSKC
  init_args: {loss_terms: [{class_path: mine.Where, init_args: {folder: FOLDER}}]}
rounds: 12
clients_per_round: 4
batch_size: 16
optimizer: {class_path: SGD, init_args: {lr: 0.1}}
trainer: {accelerator: cpu, max_epochs: 1}
callbacks: [{class_path: Checkpointing, init_args: {every: 1}}]
logger: null
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A user's project: a module, a dataset, a config, and the run of the sequential engine."""
    folder = tmp_path_factory.mktemp("project")
    rng = np.random.default_rng(0)
    inputs = {f"x_{part}": rng.normal(size=(n, 8)).astype(np.float32) for part, n in (("train", 300), ("test", 50))}
    labels = {name.replace("x", "y"): rng.integers(0, 4, len(x)) for name, x in inputs.items()}
    staged = tmp_path_factory.mktemp("staged")
    for place in (folder, staged):
        np.savez(place / "own.npz", **inputs, **labels)
    (folder / "mine.py").write_text(MODULE)
    seen = tmp_path_factory.mktemp("seen")
    (folder / "own.yaml").write_text(CONFIG.replace("FOLDER", str(seen)))
    done = subprocess.run([*FIT, "--run_dir", "sequential"], cwd=folder, env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    for path in seen.iterdir():
        path.unlink()
    return folder, seen, staged


FIT = [sys.executable, "-m", "fl_lightning", "fit", "--config", "own.yaml"]


@pytest.fixture(scope="module")
def address(project, tmp_path_factory):
    with two_nodes(tmp_path_factory.mktemp("nodes"), {"STAGED": str(project[2])}) as place:
        yield place


def engine_of(address: str) -> list[str]:
    environment = "{working_dir: ., excludes: [sequential, first, second, third]}"
    options = {"address": address, "runtime_env": environment, "data_dir": "$STAGED"}
    return ["--engine=RayEngine", *(f"--engine.{key}={value}" for key, value in options.items())]


def assert_same_folders(one: Path, other: Path) -> None:
    assert results_of(one) == results_of(other)
    assert untimed_rows(one) == untimed_rows(other)


def test_a_users_module_travels_and_a_node_opens_its_own_files(project, address):
    folder, seen, staged = project
    process = start([*FIT, "--run_dir", "first", *engine_of(address)], folder / "log", environment())
    assert process.wait() == 0, (folder / "log").read_text()
    assert_same_folders(folder / "first", folder / "sequential")
    places = [path.read_text().split("\n") for path in seen.iterdir()]
    assert {variable for file, variable in places if "working_dir_files" in file} == {str(staged)}
    assert "receives the dataset" not in (folder / "log").read_text()


def test_two_runs_share_a_cluster_and_a_killed_one_is_resumed(project, address):
    folder = project[0]
    engine = [*engine_of(address), "--engine.workers=1"]
    log = folder / "log"
    second, third = (start([*FIT, "--run_dir", name, *engine], log, environment()) for name in ("second", "third"))
    wait_for(folder / "second" / "checkpoints" / "round-000002", second)
    second.send_signal(signal.SIGKILL)
    second.wait()
    resumed = start([*FIT[:4], "--resume", "second", *engine], log, environment())
    assert [resumed.wait(), third.wait()] == [0, 0], log.read_text()
    for name in ("second", "third"):
        assert_same_folders(folder / name, folder / "sequential")


def test_cluster_check_names_each_problem(project, address):
    folder = project[0]
    words = [*FIT[:3], "cluster-check", "--config=own.yaml", *engine_of(address)]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    (problem,) = (line for line in done.stderr.splitlines() if "problem:" in line)
    assert "$STAGED/own.npz" in problem  # the first node has no such folder
    assert "same values" in done.stdout
    assert "dry run passed" in done.stdout
