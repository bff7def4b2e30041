"""Several processes: the same bytes, lost processes, and nothing left behind."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import TEST_FOLDERS
from experiments import experiment
from killed_runs import FIRST_ROUND, command_line, survive_kills
from methods import FEW_QUICK, METHODS, assert_same_run
from running import alive, gone
from worker_processes import Busy, Deadly, Harmless, Slow, Witness

from fl_lightning.algorithms import FedAvg, FedSKC, PeerAlgorithm
from fl_lightning.callbacks import RoundCallback
from fl_lightning.client.local_training import LocalTraining
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.errors import ClientFailure, ConfigError, Interrupted
from fl_lightning.core.round_progress import listen
from fl_lightning.engines import ProcessesEngine, pool, processes
from fl_lightning.engines.pool import RemoteTraceback
from fl_lightning.models import MLP

pytestmark = pytest.mark.usefixtures("one_thread")


class Lasting(ProcessesEngine):
    """Its processes outlast a run: they take long to start."""

    def close(self):
        pass


@pytest.fixture(scope="module")
def engine():
    lasting = Lasting(workers=2)
    yield lasting
    ProcessesEngine.close(lasting)


@pytest.mark.slow
def test_the_steps_of_long_clients_arrive(tmp_path, engine):
    events = []
    listener = types.SimpleNamespace(
        on_steps=lambda *steps: events.append(steps), on_waiting=lambda: None, on_client=lambda: None
    )
    run = experiment(tmp_path, FedAvg(loss_terms=[Slow(0.6)]), engine=engine, rounds=1)
    with listen(listener):
        run.fit()
    assert events
    assert all(clients <= 2 and 1 < done <= total for done, total, clients in events)


class WorkerPids(RoundCallback):
    """Note the ids of the worker processes that start in a run."""

    def __init__(self):
        self.before, self.pids = multiprocessing.active_children(), set()

    def on_round_end(self, run, metrics):
        self.pids |= {child.pid for child in multiprocessing.active_children() if child not in self.before}


def shared_memory():
    """The names torch and multiprocessing have in shared memory now, those of other tests' processes too."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "psm_", "sem.mp-"))}


def left_behind(before, patience=120.0):
    """Return the new names in shared memory that stay. Names of tests that run beside this one disappear."""
    left, deadline = shared_memory() - before, time.monotonic() + patience
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= shared_memory()
    return left


def both(tmp_path, engine, method=FedAvg, **options):
    """One experiment, one client after another and with an engine."""
    alone = experiment(tmp_path / "alone", method(), **options)
    shared = experiment(tmp_path / "shared", method(), engine=engine, **options)
    alone.fit()
    shared.fit()
    return alone, shared


# --- The same bytes ---

ONE_EPOCH = {"accelerator": "cpu", "max_epochs": 1}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FEW_QUICK)
def test_every_method_gives_the_bytes_of_one_client_after_another(tmp_path, engine, name):
    method, options = METHODS[name]
    assert_same_run(*both(tmp_path, engine, method, rounds=2, trainer=ONE_EPOCH, **options))


@pytest.mark.thorough
@pytest.mark.parametrize("threads", [1, 2])
def test_a_process_has_its_threads_and_the_settings_of_this_one(tmp_path, threads):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        run = experiment(
            tmp_path, FedAvg(loss_terms=[Witness()]), rounds=1, engine=ProcessesEngine(1, threads), clients_per_round=1
        )
        run.fit()
    finally:
        torch.set_float32_matmul_precision(before)
    assert run.csv.rows[0]["client/train_witness"] == 1110 + threads


# --- Failures and warnings are as in one process ---


class Troubled(LossTerm):
    """Fails, or warns, in round 2."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.round = kind, 0

    def begin(self, module):
        self.round = module.context.round

    def forward(self, step):
        if self.round == 2:
            if self.kind == "error":
                raise RuntimeError("the disk is on fire")
            warnings.warn("smoke is seen", UserWarning, stacklevel=1)
        return step.logits.sum() * 0


@pytest.mark.thorough
def test_an_error_names_client_and_round_and_has_its_traceback(tmp_path, engine):
    run = experiment(tmp_path, FedAvg(loss_terms=[Troubled("error")]), engine=engine)
    with pytest.raises(ClientFailure, match=r"client \d, round 2: RuntimeError: the disk is on fire$") as caught:
        run.fit()
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "test_processes.py" in str(caught.value.__cause__)
    assert run.checkpoints.rounds() == [1, 0]


@pytest.mark.thorough
def test_a_warning_is_shown_once_a_run_and_filtered_as_here(tmp_path, engine):
    def run(name):
        experiment(tmp_path / name, FedAvg(loss_terms=[Troubled("warning")]), engine=engine, rounds=2).fit()

    for action, times in (("always", 1), ("ignore", 0)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.filterwarnings(action, message="smoke")
            run(action)
        assert [(str(one.message), one.filename) for one in seen] == [("smoke is seen", __file__)] * times
    with pytest.raises(ClientFailure, match="round 2: UserWarning: smoke is seen"):
        run("raised")


# --- Killed processes ---


@pytest.mark.thorough
def test_the_processor_time_of_a_round_has_that_of_its_worker_processes(tmp_path, engine):
    alone, shared = both(tmp_path, engine, partial(FedAvg, loss_terms=[Busy()]), rounds=1)
    for run in (alone, shared):
        assert 4 * 0.2 <= run.csv.rows[0]["time/processor_s"] < 20


@pytest.mark.thorough
def test_a_process_killed_in_mid_round_changes_nothing(tmp_path, engine):
    before = shared_memory()
    alone = experiment(tmp_path / "alone", FedSKC(loss_terms=[Harmless()]))
    killed = experiment(tmp_path / "killed", FedSKC(loss_terms=[Deadly(tmp_path, 1)]), engine=engine)
    alone.fit()
    killed.fit()
    assert (tmp_path / "kill-0").exists()
    assert_same_run(alone, killed)
    assert not left_behind(before)


@pytest.mark.thorough
def test_a_client_that_always_kills_its_process_fails_by_name(tmp_path, engine):
    run = experiment(tmp_path, engine=engine, clients_per_round=None, rounds=2)
    run.check()
    victim = max(range(6), key=lambda client: len(run.data.shards[client].train))
    run.algorithm = FedAvg(loss_terms=[Deadly(tmp_path, 9, len(run.data.shards[victim].train))])
    words = rf"client {victim}, round 2: 3 worker processes died running it, the last of them by SIGKILL \(likely out"
    with pytest.raises(ClientFailure, match=words):
        run.fit()
    assert len(list(tmp_path.glob("kill-*"))) == 3
    assert run.checkpoints.rounds() == [1, 0]


class Hangs(LossTerm):
    """Never returns, in a client with this number of samples."""

    def __init__(self, samples):
        super().__init__()
        self.samples, self.leader = samples, os.getpid()

    def begin(self, module):
        if os.getpid() != self.leader and int(module.context.class_counts.sum()) == self.samples:
            threading.Event().wait()

    def forward(self, step):
        return step.logits.sum() * 0


@pytest.mark.thorough
def test_a_client_that_hangs_is_dropped_by_name(tmp_path):
    """The limit leaves time for the other clients on a busy machine. Retries are tested with a simulated clock."""
    engine = ProcessesEngine(2, timeout=10, retries=0)
    run = experiment(tmp_path, engine=engine, clients_per_round=None, rounds=1, on_client_failure="drop")
    run.check()
    sizes = [len(shard.train) for shard in run.data.shards]
    run.algorithm = FedAvg(loss_terms=[Hangs(max(sizes))])
    words = rf"client {sizes.index(max(sizes))}, round 1: .* after 10 seconds .* \(engine.timeout\)"
    with pytest.warns(UserWarning, match=words):
        run.fit()
    assert run.csv.rows[0]["client/failed"] == 1


class Stops(LossTerm):
    """Stops its own process once, at its first step in round 2, as SIGSTOP of another program would."""

    name = Harmless.name

    def __init__(self, folder):
        super().__init__()
        self.folder, self.leader, self.due = str(folder), os.getpid(), False

    def begin(self, module):
        self.due = module.context.round == 2

    def forward(self, step):
        if self.due and os.getpid() != self.leader:
            try:
                (Path(self.folder) / "sigstop").touch(exist_ok=False)
            except FileExistsError:
                return step.logits.sum() * 0
            os.kill(os.getpid(), signal.SIGSTOP)
        return step.logits.sum() * 0


@pytest.mark.thorough
def test_a_stopped_process_is_reported_and_replaced(tmp_path, engine, monkeypatch, capsys):
    monkeypatch.setattr(pool, "SILENT", 0.5)
    monkeypatch.setattr(pool, "SLOWER", 0.0)
    monkeypatch.setattr(engine, "timeout", 3.0)
    alone = experiment(tmp_path / "alone", FedSKC(loss_terms=[Harmless()]))
    stopped = experiment(tmp_path / "stopped", FedSKC(loss_terms=[Stops(tmp_path)]), engine=engine)
    alone.fit()
    stopped.fit()
    assert (tmp_path / "sigstop").exists()
    line = next(line for line in capsys.readouterr().err.splitlines() if ", stopped)" in line)
    assert re.search(r"^engine: worker \d \(process \d+, stopped\) .* client \d, round 2\.", line)
    assert_same_run(alone, stopped)


def test_only_a_stopped_process_is_found_to_be_stopped():
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert not processes.is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert processes.is_stopped(process.pid)
        finally:
            process.kill()
    assert not processes.is_stopped(process.pid)


# --- Signals, and what is left ---


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_run_ends_it_and_it_goes_on_from_there(tmp_path, signum):
    options = {"rounds": 3, "checkpoint_every": 10}
    alone = experiment(tmp_path / "alone", FedSKC(loss_terms=[Harmless()]), **options)
    alone.fit()
    started = WorkerPids()
    method = FedSKC(loss_terms=[Deadly(tmp_path, 1, to="leader", signum=signum)])
    stopped = experiment(tmp_path / "parts", method, engine=ProcessesEngine(2), callbacks=[started], **options)
    with pytest.raises(Interrupted, match=f"stopped by {signum.name} after round 1 of 3"):
        stopped.fit()
    assert stopped.checkpoints.rounds() == [1, 0]
    assert len(started.pids) == 2
    assert gone(started.pids)
    rest = experiment(tmp_path / "parts", FedSKC(loss_terms=[Harmless()]), **options)
    rest.fit(resume=True)
    assert_same_run(alone, rest)


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
import torch
import multiprocessing
from experiments import experiment
from fl_lightning.callbacks import RoundCallback
from fl_lightning.engines import ProcessesEngine
from fl_lightning.core.errors import Interrupted

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path({folder!r})
    class Print(RoundCallback):
        def on_round_end(self, run, metrics):
            if run.round == 2:
                print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    options = {{"rounds": 10_000, "engine": ProcessesEngine(2), "checkpoint_every": 1000}}
    run = experiment(folder / "run", callbacks=[Print()], **options)
    try:
        run.fit()
    except Interrupted as end:
        sys.exit(end.exit_code)
"""


def script(tmp_path):
    """A run in a process group of its own, in its third round or later; its process, and its workers' ids."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(tests=TEST_FOLDERS, folder=str(tmp_path)))
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    workers = [int(word) for word in process.stdout.readline().split()]
    assert len(workers) == 2, process.stderr.read()
    return process, workers


@pytest.mark.thorough
@pytest.mark.parametrize("signum", [signal.SIGINT])
def test_a_signal_to_the_process_group_ends_the_run(tmp_path, signum):
    before = shared_memory()
    process, workers = script(tmp_path)
    os.killpg(process.pid, signum)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signum
    assert (out, err) == ("", "")
    assert gone(workers)
    assert not left_behind(before)


@pytest.mark.thorough
def test_processes_do_not_outlive_the_one_that_started_them(tmp_path):
    before = shared_memory()
    process, workers = script(tmp_path)
    assert all(map(alive, workers))
    process.kill()
    assert gone(workers)
    _, err = process.communicate(timeout=300)
    assert err == ""
    assert not left_behind(before)


UNGUARDED = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from experiments import experiment
from fl_lightning.engines import ProcessesEngine, processes

experiment(Path({folder!r}) / "run", engine=ProcessesEngine(1)).fit()
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_refused(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(UNGUARDED.format(tests=TEST_FOLDERS, folder=str(tmp_path)))
    process = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300)
    assert "engine: 3 workers ended before they could begin" in process.stderr
    assert '`if __name__ == "__main__":`' in process.stderr


@pytest.mark.thorough
def test_nothing_is_left_after_a_run(tmp_path):
    engine = ProcessesEngine(2)
    experiment(tmp_path / "first", PeerAlgorithm(), engine=engine).fit()
    files, before = sorted(os.listdir("/proc/self/fd")), shared_memory()
    started = WorkerPids()
    experiment(tmp_path / "second", PeerAlgorithm(), engine=engine, rounds=6, callbacks=[started]).fit()
    assert len(started.pids) == 2
    assert gone(started.pids)
    del started
    assert sorted(os.listdir("/proc/self/fd")) == files
    assert not left_behind(before)


WITH_PROCESSES = ("--engine", "ProcessesEngine", "--engine.workers", "2")


@pytest.mark.thorough
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path):
    survive_kills(command_line("ua_pdfl", "--rounds", "3"), tmp_path, 1, *WITH_PROCESSES, begun=FIRST_ROUND)


# --- What cannot work ---


def test_a_model_that_cannot_be_sent_is_refused_before_the_first_round(tmp_path):
    run = experiment(tmp_path, model=lambda in_shape, num_classes: MLP(in_shape, num_classes), engine=ProcessesEngine())
    with pytest.raises(ConfigError, match=r"^engine: .*lambda"):
        run.fit()
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_a_class_that_a_process_cannot_find_is_named(tmp_path, engine, monkeypatch):
    ghost = types.ModuleType("ghost")
    exec("from fl_lightning.algorithms import FedAvg\nclass Mine(FedAvg): pass", ghost.__dict__)
    monkeypatch.setitem(sys.modules, "ghost", ghost)
    with pytest.raises(ConfigError, match=r"^engine: .* ModuleNotFoundError: .*'ghost'"):
        experiment(tmp_path / "ghost", ghost.Mine(), engine=engine).fit()
    experiment(tmp_path / "next", engine=engine, rounds=1).fit()  # nobody's answer to that is taken for one to this


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": 0}, "engine.workers: 0 is below 1"),
        ({"threads": -1}, "engine.threads: -1 is outside"),
        ({"timeout": 0}, "engine.timeout: 0 is not above 0"),
        ({"timeout": float("inf")}, "engine.timeout: inf is no finite number"),
        ({"devices": []}, "engine.devices: "),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        ProcessesEngine(**arguments)


def test_gpus_for_clients_that_train_on_the_cpu_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^engine.devices: .* cpu"):
        experiment(tmp_path, engine=ProcessesEngine(devices=[0])).fit()


def on_gpus(monkeypatch, number, devices=1):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    index = devices[0] if isinstance(devices, list) else 0
    training = LocalTraining(trainer={"devices": devices})
    return types.SimpleNamespace(device=torch.device("cuda", index), training=training)


@pytest.mark.parametrize(
    ("arguments", "trainer", "size", "devices"),
    [
        ({}, 1, 3, [0, 1, 2]),
        ({}, [2], 1, [2]),
        ({"workers": 5}, 1, 5, [0, 1, 2, 0, 1]),
        ({"workers": 4, "devices": [2, 0]}, 1, 4, [2, 0, 2, 0]),
        ({"workers": 2}, [1], 2, [1, 1]),
    ],
)
def test_workers_are_distributed_over_gpus(monkeypatch, arguments, trainer, size, devices):
    engine = ProcessesEngine(**arguments)
    monkeypatch.setattr("fl_lightning.engines.processes.Process", Placed)
    assert engine.size(on_gpus(monkeypatch, 3, trainer)) == size
    engine.start_workers(size)
    assert [one.device for one in engine.pool_workers] == devices
    engine.pool_workers.pop(0)  # who takes a lost one's place takes its GPU
    engine.start_workers(size)
    assert engine.pool_workers[-1].device == devices[0]
    engine.pool_workers.clear()


class Placed:
    def __init__(self, context, threads, device):
        self.device, self.pending = device, 0

    def send(self, handle, blocks):
        """It would be sent to the process."""


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"engine.devices: GPU 3 not found. Available: \[0, 1\]"):
        ProcessesEngine(devices=[0, 3]).size(on_gpus(monkeypatch, 2))


def test_there_are_as_many_processes_as_cores_for_their_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("fl_lightning.engines.processes.usable_cores", lambda: 8)
    worker = types.SimpleNamespace(device=torch.device("cpu"), training=LocalTraining())
    assert [ProcessesEngine(threads=threads).size(worker) for threads in (1, 3, 9)] == [8, 2, 1]
    assert ProcessesEngine(workers=5, threads=3).size(worker) == 5
