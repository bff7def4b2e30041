"""Client state in memory and on disk, the background writer, and kills while writing."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from experiments import NormMLP, experiment, same_bytes, untimed
from test_checkpoint import files_no_larger_than, flatten

from fl_lightning.algorithms import UAPDFL, CwFedAvg, FedAvg, FedDW, FedSiamDA, FedSKC, PeerAlgorithm
from fl_lightning.callbacks import Checkpointing, RoundCallback
from fl_lightning.core.errors import CheckpointError, ConfigError
from fl_lightning.evaluation.round_metrics import RoundMetrics
from fl_lightning.models import MLP, Head
from fl_lightning.runs.background_writer import MAX_JOBS, Writer
from fl_lightning.runs.checkpoint import CheckpointFolder
from fl_lightning.runs.client_store import ClientStore

PLACES = ["memory", "disk"]
MEMORY = {
    "model": {
        "w": torch.tensor([[0.1, float("nan")], [-0.0, float("inf")]]),
        "steps": torch.tensor(7),
        "half": torch.tensor([0.3], dtype=torch.bfloat16),
        "double": torch.tensor([0.1], dtype=torch.float64),
        "on": torch.tensor([True, False]),
        "none": torch.zeros(0, 3),
        "a/b": torch.arange(3),
    },
    "term_x": {"w": torch.ones(2)},
}


def sorted_state(memory):
    return flatten({name: dict(sorted(tensors.items())) for name, tensors in sorted(memory.items())})


def new_store(folder, where):
    return ClientStore(folder, where, Writer())


def write_all(kept):
    """Write all states, and return the files as a checkpoint names them."""
    kept.writer.wait()
    return kept.write(kept.snapshot())


def store_of_clients(folder, where, clients=4):
    kept = new_store(folder, where)
    for client in range(clients):
        kept.put(client, 1, {"own": {"w": torch.full((3,), float(client))}})
    kept.end_round()
    kept.writer.wait()
    return kept


# --- Storing and reading ---


def test_memory_and_disk_write_the_same_files_and_restore_them_bit_for_bit(tmp_path):
    files = []
    for where in PLACES:
        kept, again = (new_store(tmp_path / where, where) for _ in range(2))
        kept.put(3, 12, MEMORY)
        kept.end_round()
        kept.writer.wait()
        assert sorted_state(kept[3]) == flatten(kept[3]) == sorted_state(MEMORY)
        files.append(write_all(kept))
        again.load(files[-1])
        assert flatten(again[3]) == flatten(kept[3])
        assert list(again) == [3]
    assert files[0] == files[1]
    ((file, checksum),) = files[0].items()
    assert file == "clients/client-000003-round-000012.safetensors"
    content = (tmp_path / "disk" / file).read_bytes()
    assert checksum == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert (tmp_path / "memory" / file).read_bytes() == content


@pytest.mark.parametrize("where", PLACES)
def test_put_stores_a_copy_that_is_visible_after_the_round(tmp_path, where):
    kept, tensor = new_store(tmp_path, where), torch.zeros(2, 3).t()
    kept.put(0, 1, {"own": {"w": tensor, "same": tensor}})
    assert len(kept) == 0
    kept.end_round()
    tensor += 1
    kept.put(0, 2, {"own": {"w": tensor}})
    kept.writer.wait()
    assert kept[0]["own"]["w"].tolist() == [[0, 0]] * 3
    assert kept[0]["own"]["w"].is_contiguous()
    kept.end_round()
    assert kept[0]["own"]["w"].tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("nothing", [{}, {"own": {}}])
def test_empty_client_state_has_no_file(tmp_path, where, nothing):
    kept = new_store(tmp_path, where)
    kept.put(0, 1, nothing)
    kept.end_round()
    assert len(kept) == 0
    assert write_all(kept) == {}
    assert os.listdir(tmp_path) == []
    kept.put(0, 2, {"own": {"w": torch.ones(1)}})
    kept.end_round()
    assert list(kept) == [0]
    kept.put(0, 3, nothing)
    kept.end_round()
    assert 0 not in kept


def test_disk_store_keeps_nothing_in_memory(tmp_path):
    kept = store_of_clients(tmp_path, "disk")
    assert all(one.memory is None for one in kept.snapshot())
    value = kept[2]["own"]["w"]
    assert f"{tmp_path}/clients/client-000002-round-000001.safetensors" in Path("/proc/self/maps").read_text()
    value += 1  # changes a page of this process, not the file
    assert reload_store(kept)[2]["own"]["w"].tolist() == [2, 2, 2]


def reload_store(kept, where="disk"):
    again = new_store(kept.run_dir, where)
    again.load(write_all(kept))
    return again


def test_section_with_a_slash_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^client state: section 'term_a/b'"):
        new_store(tmp_path, "memory").put(0, 1, {"term_a/b": {"w": torch.ones(1)}})


@pytest.mark.parametrize("where", PLACES)
def test_load_replaces_all_states(tmp_path, where):
    kept = store_of_clients(tmp_path, where, clients=3)
    assert kept[0]["own"]["w"].tolist() == [0, 0, 0]
    kept.put(1, 2, {"own": {"w": torch.full((3,), 9.0)}})
    first = {file: checksum for file, checksum in write_all(kept).items() if "client-000001" in file}
    again = new_store(tmp_path, "memory")  # the run done again: the same names
    again.put(0, 1, {"own": {"w": torch.full((3,), 7.0)}})
    again.end_round()
    kept.load(write_all(again) | first)
    kept.end_round()
    assert {client: memory["own"]["w"].tolist() for client, memory in kept.items()} == {0: [7] * 3, 1: [1] * 3}


@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_missing_client_file_is_named(tmp_path, harm):
    kept = store_of_clients(tmp_path, "disk")
    damage(tmp_path / "clients" / "client-000002-round-000001.safetensors", harm)
    with pytest.raises(CheckpointError, match=r"^cannot read .*client-000002-round-000001.safetensors: ") as caught:
        kept[2]
    assert "\n" not in str(caught.value)


# --- States that peers may read ---


@pytest.mark.parametrize("where", PLACES)
def test_peers_see_only_the_public_section(tmp_path, where):
    run = experiment(tmp_path, UAPDFL(n_com=2), rounds=1, client_store=where)
    run.fit()
    seen = run.server.visible_state
    assert same_bytes(seen.peer(3), run.memory[3]["laid_out"])
    assert len(run.memory[3]) > 1
    assert seen.keys() == run.state.keys()
    assert type(seen | {}) is dict  # the next state gives no access


def test_without_a_public_section_peers_see_the_shared_state_only(tmp_path):
    run = experiment(tmp_path, FedAvg(), rounds=1)
    run.fit()
    assert run.server.visible_state is run.state


def test_shared_state_does_not_contain_public_sections(tmp_path):
    run = experiment(tmp_path, UAPDFL(n_com=2), rounds=1)
    run.fit()
    assert set(run.state) == {"model", "links", "published", "unit", "untrained", "sums", "samples"}
    for client, memory in run.memory.items():  # clients that have not trained hold no model either
        assert any(name.startswith("model/") for name in memory["laid_out"]) == (client in run.server.participants(1))


# --- The writer ---


def test_writer_runs_jobs_in_order_in_one_thread():
    writer, done = Writer(), []
    for number in range(20):
        writer.submit(lambda number=number: done.append((number, threading.get_ident())))
    writer.wait()
    assert [number for number, _ in done] == list(range(20))
    assert len({thread for _, thread in done} | {threading.get_ident()}) == 2
    writer.close()
    writer.submit(lambda: done.append(None))
    writer.close()
    assert done[-1] is None


def fail():
    raise CheckpointError("the disk is full")


@pytest.mark.parametrize("call", [Writer.wait, Writer.check, lambda writer: writer.submit(int)])
def test_error_in_a_job_is_raised_once_in_the_callers_thread(call):
    writer, gate, done = Writer(), threading.Event(), threading.Event()
    writer.submit(lambda: gate.wait(60) and fail())
    writer.submit(done.set)
    gate.set()
    assert done.wait(60)
    with pytest.raises(CheckpointError, match="the disk is full"):
        call(writer)
    call(writer)
    writer.submit(fail)
    writer.close()
    writer.check()


def test_submit_waits_if_too_many_jobs_are_pending():
    writer, gate, begun = Writer(), threading.Event(), []
    for _ in range(MAX_JOBS):
        writer.submit(gate.wait)
    late = threading.Thread(target=lambda: (writer.submit(int), begun.append(True)))
    late.start()
    late.join(0.1)
    assert not begun
    gate.set()
    late.join(60)
    assert begun


@pytest.mark.thorough
def test_run_is_at_most_one_checkpoint_ahead(tmp_path):
    run, ahead = experiment(tmp_path, rounds=6), []
    write = run.checkpoints.write

    def slow(round, *args):
        while 0 < round < 6 and run.round == round:  # until the run has gone on
            time.sleep(0.01)
        time.sleep(0.3)  # a run that did not wait would be further on by now
        ahead.append(run.round - round)
        write(round, *args)

    run.checkpoints.write = slow
    run.fit()
    assert ahead == [0, 1, 1, 1, 1, 1, 0]  # that of the start is waited for
    assert run.checkpoints.rounds()[0] == 6


@pytest.mark.parametrize("bad", [2, 3])
def test_failed_checkpoint_ends_the_run(tmp_path, bad):
    run = experiment(tmp_path, rounds=3)
    write = run.checkpoints.write
    run.checkpoints.write = lambda round, *args: fail() if round == bad else write(round, *args)
    with pytest.raises(CheckpointError, match="the disk is full"):
        run.fit()
    assert bad not in run.checkpoints.rounds()
    assert not (tmp_path / "final").exists()


def test_best_checkpoint_is_kept_until_a_better_one_is_on_disk():
    class Run:
        round, is_over = 0, False
        keeps: ClassVar[list] = []

        def save_checkpoint(self, keep):
            self.keeps.append(keep)

    run, checkpointing = Run(), Checkpointing(every=1, keep_last=1, monitor="global/acc", mode="max")
    for run.round, acc in enumerate([0.5, 0.4, 0.6], start=1):
        checkpointing.on_round_end(run, RoundMetrics({"global/acc": acc}))
    assert [keep([9, 8]) for keep in run.keeps] == [{9, 1}, {9, 1}, {9, 3}]


# --- Runs ---

METHODS = {
    "ua_pdfl": partial(UAPDFL, n_com=2, preset="reference"),
    "gossip": partial(PeerAlgorithm, n_com=2, buffers="local"),
    "fedsiam_da": FedSiamDA,
    "local": partial(FedAvg, buffers="local"),
}


def small_run(folder, method="ua_pdfl", **options):
    model = partial(MLP, hidden=(16,), head=Head(projection=16, prediction=16)) if method == "fedsiam_da" else NormMLP
    settings = {"model": model, "trainer": {"accelerator": "cpu", "max_epochs": 1}, "clients_per_round": 3}
    return experiment(folder, METHODS[method](), **settings | options)


def same_run(one, other):
    return (
        untimed(one.csv.rows) == untimed(other.csv.rows)
        and flatten({k: one.memory[k] for k in sorted(one.memory)})
        == flatten({k: other.memory[k] for k in sorted(other.memory)})
        and sorted_state(one.state) == sorted_state(other.state)
    )


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("method", METHODS)
def test_memory_and_disk_give_the_same_run_and_resume_each_other(tmp_path, method):
    runs = [small_run(tmp_path / where, method, client_store=where) for where in PLACES]
    for run in runs:
        run.fit()
    assert len(runs[0].memory) > 0
    assert same_run(*runs)
    for rounds, where in enumerate(["memory", "disk", "memory"], start=1):
        part = small_run(tmp_path / "parts", method, client_store=where, rounds=rounds)
        part.fit(resume=rounds > 1)
    assert same_run(part, runs[0])


def test_checkpoint_writes_only_the_states_of_its_participants(tmp_path):
    class Files(RoundCallback):
        def __init__(self):
            self.seen = []

        def on_round_start(self, run, participants):
            run.record.writer.wait()
            self.seen.append({path.name: path.stat().st_ino for path in (tmp_path / "clients").glob("*")})

    files = Files()
    run = small_run(tmp_path, rounds=5, callbacks=[files], keep_checkpoints=1)
    run.fit()
    for round in (2, 3, 4):
        before, after = files.seen[round - 1 : round + 1]
        assert {name for name in after if name not in before} == {
            f"client-{client:06d}-round-{round:06d}.safetensors" for client in run.server.participants(round)
        }
        assert all(before[name] == after[name] for name in before if name in after)  # none is written again


def test_client_files_are_those_named_by_checkpoints(tmp_path):
    run = small_run(tmp_path, rounds=6)
    run.fit()
    files = {f"clients/{name}" for name in os.listdir(tmp_path / "clients")}
    named = set().union(*(run.checkpoints.files(r) for r in run.checkpoints.rounds()))
    assert files == named == run.checkpoints.named_files()
    latest = {k: max(r for r in range(7) if r == 0 or k in run.server.participants(r)) for k in range(6)}
    names = {f"clients/client-{k:06d}-round-{r:06d}.safetensors" for k, r in latest.items()}
    assert set(run.checkpoints.files(6)) == names


@pytest.mark.thorough
def test_state_tensors_are_never_changed_in_place(tmp_path):
    class Versions(RoundCallback):
        def on_round_end(self, run, metrics):
            seen.append([(tensor, tensor.clone()) for part in run.state.values() for tensor in part.values()])

    methods = [FedSKC, FedDW, FedSiamDA, CwFedAvg, METHODS["ua_pdfl"], METHODS["local"]]
    for number, method in enumerate(methods):
        seen = []
        model = partial(MLP, hidden=(16,), head=Head(projection=16, prediction=16))
        experiment(tmp_path / str(number), method(), rounds=2, model=model, callbacks=[Versions()]).fit()
        assert all(same_bytes({"": tensor}, {"": before}) for tensors in seen for tensor, before in tensors)


# --- Damage ---


def damage(path, harm):
    if harm == "missing":
        path.unlink()
    elif harm == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("harm", ["changed", "missing", "cut"])
def test_damaged_client_file_damages_the_checkpoints_that_name_it(tmp_path, where, harm):
    run = small_run(tmp_path, client_store=where)
    run.fit()
    new_files = sorted(set(run.checkpoints.files(3)) - set(run.checkpoints.files(2)))
    for file in new_files:
        content = (tmp_path / file).read_bytes()
        damage(tmp_path / file, harm)
        again = small_run(tmp_path, client_store=where)
        with pytest.warns(UserWarning, match=rf"round-000003 is damaged: .*{Path(file).name}.*; resuming from round 2"):
            again.load()
        assert again.round == 2
        (tmp_path / file).write_bytes(content)
    damage(tmp_path / new_files[0], harm)
    again = small_run(tmp_path, client_store=where)
    with pytest.warns(UserWarning, match="damaged"):
        again.fit(resume=True)
    assert same_run(run, again)
    assert again.checkpoints.read(3).round == 3  # whole again


def test_prune_removes_only_unnamed_client_files(tmp_path):
    kept = store_of_clients(tmp_path, "disk")
    names = sorted(write_all(kept))
    for stray in ("notes.txt", ".client-000009-round-000001.safetensors.writing", ".client-000002-round.writing"):
        (tmp_path / "clients" / stray).touch()
    kept.prune(lambda: set(names[1:3]))
    assert sorted(os.listdir(tmp_path / "clients")) == [*(Path(name).name for name in names[1:3]), "notes.txt"]
    new_store(tmp_path / "none", "disk").prune(set)


# --- A full disk ---


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("where", PLACES)
def test_full_disk_gives_one_line_and_loses_nothing(tmp_path, where):
    class Full(RoundCallback):
        def on_round_start(self, run, participants):
            run.record.writer.wait()
            if run.round == 2:
                limit.__enter__()

    limit = files_no_larger_than(3000)
    run = small_run(tmp_path, client_store=where, callbacks=[Full()])
    try:
        with pytest.raises(CheckpointError, match=r"^cannot write .*: \[Errno 27\] File too large") as caught:
            run.fit()
    finally:
        limit.__exit__(None, None, None)
    assert "\n" not in str(caught.value)
    rest, whole = small_run(tmp_path, client_store=where), small_run(tmp_path / "whole")
    rest.load()
    assert rest.round == 2
    rest.fit(resume=True)
    whole.fit()
    assert same_run(rest, whole)


# --- Kills ---


KILLED_AT_EVERY_STEP = """
import os, signal, sys
from pathlib import Path
from typing import ClassVar
import torch
from fl_lightning.runs.checkpoint import CheckpointFolder
from fl_lightning.runs.client_store import ClientStore

armed, left, fsync = False, 0, os.fsync

def count_down(event, args=()):
    global left
    if armed and event in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fsync"}:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

def flushed(handle):
    fsync(handle)
    count_down("fsync")

os.fsync = flushed
sys.addaudithook(count_down)

class Now:  # a writer without a thread: the step at which it dies is then the same each time
    submit = staticmethod(lambda job: job())

def memory(client, round):
    return {"own": {"w": torch.full((5,), 100.0 * client + round)}}

def save(store, checkpoints, round, clients):
    for client in clients:
        store.put(client, round, memory(client, round))
    store.end_round()
    checkpoints.write(round, {"round": round}, store.write(store.snapshot()))
    checkpoints.prune({round, round - 1})
    store.prune(checkpoints.named_files)

def survives(folder, where, step):
    global armed, left
    store, checkpoints = ClientStore(folder, where, Now), CheckpointFolder(folder / "checkpoints")
    save(store, checkpoints, 1, (0, 1, 2))
    save(store, checkpoints, 2, (0, 1))
    child = os.fork()
    if child == 0:
        armed, left = True, step
        save(store, checkpoints, 3, (1, 2))
        checkpoints.write(3, {"round": 3}, store.write(store.snapshot()))  # replaces the first one
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

for where in ("memory", "disk"):
    step = 0
    while not survives(Path(sys.argv[1]) / f"{where}-{step:03d}", where, step):
        step += 1
"""
AFTER = {2: {0: 2, 1: 2, 2: 1}, 3: {0: 2, 1: 3, 2: 3}}  # the round of each client's state after a round


@pytest.mark.thorough
def test_kill_at_each_step_leaves_a_complete_checkpoint(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED_AT_EVERY_STEP, str(tmp_path)], check=True)
    littered = 0
    for where in PLACES:
        folders = sorted(tmp_path.glob(f"{where}-*"))
        assert len(folders) > 25
        seen = set()
        for folder in folders:
            checkpoints, kept = CheckpointFolder(folder / "checkpoints"), new_store(folder, where)
            newest = checkpoints.read_newest(report=pytest.fail)
            assert newest is not None
            round = newest.round
            seen.add(round)
            kept.load(checkpoints.files(round))
            assert {k: float(kept[k]["own"]["w"][0]) for k in kept} == {k: 100 * k + r for k, r in AFTER[round].items()}
            for other in checkpoints.rounds():
                checkpoints.read(other)
            littered += any(name.startswith(".") for name in os.listdir(folder / "clients"))
            checkpoints.prune({2, 3})
            kept.prune(checkpoints.named_files)
            assert {f"clients/{name}" for name in os.listdir(folder / "clients")} == checkpoints.named_files()
            assert {"round-000002"} <= set(os.listdir(folder / "checkpoints")) <= {"round-000002", "round-000003"}
        assert seen == {2, 3}
    assert littered
