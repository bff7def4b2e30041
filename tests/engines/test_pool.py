"""Engines with several workers: serialization, shared tensors, distribution of tasks, and lost workers."""

import csv
import gc
import math
import sys
import warnings
import weakref
from collections import deque
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from experiments import digits, experiment, same_bytes, task_of_round, untimed
from hypothesis import given
from hypothesis import strategies as st
from task_runners import run_tasks, tasks_in

from fl_lightning.algorithms import FedAvg, PeerAlgorithm
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.errors import ConfigError, Interrupted
from fl_lightning.core.message import Message
from fl_lightning.core.round_progress import listen
from fl_lightning.core.task import Result, Tasks
from fl_lightning.engines import Task, pool, processes, ray_actor, task_server
from fl_lightning.engines.client_order import ClientOrder
from fl_lightning.engines.pool import FETCHED, QUEUED, PoolEngine, ResultWindow
from fl_lightning.engines.pool_worker import PoolWorker, WorkerLost
from fl_lightning.engines.processes import ALIGNMENT, MemoryFile
from fl_lightning.engines.serialization import SerializedValue, SharedTensorStore, deserialize
from fl_lightning.engines.task_server import Request, Steps, TaskServer
from fl_lightning.engines.worker import Worker
from fl_lightning.models import MLP


@pytest.fixture(autouse=True)
def _unfrozen():
    """A server keeps the collector off what a process starts with; here that is the tests' own."""
    yield
    gc.unfreeze()


# --- Serialization ---


def arrived(value, **options):
    return deserialize(SerializedValue(value).parts, **options)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "permuted", "sliced", "expanded"]),
    st.booleans(),
)
def test_tensors_keep_their_bits_and_strides(shape, dtype, form, copy):
    tensor = torch.randint(0, 2, shape).to(dtype)
    if form == "permuted":
        tensor = tensor.permute(list(reversed(range(tensor.ndim))))
    elif form == "sliced" and shape:
        tensor = torch.cat([tensor, tensor])[1 : 1 + len(tensor)]
    elif form == "expanded":
        tensor = tensor.expand(3, *shape)
    other = arrived(tensor, copy=copy)
    assert (other.dtype, other.shape) == (dtype, tensor.shape)
    assert torch.equal(other, tensor)
    if form != "expanded" and tensor.numel():
        assert other.stride() == tensor.stride()
    if tensor.numel():  # a deep copy would take the whole storage of a slice
        assert other.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_a_repeated_tensor_stays_one_object_and_equal_tensors_stay_two():
    one, equal = torch.ones(3), torch.ones(3)
    a, b, c = arrived([one, one, equal])
    assert a is b
    assert a is not c


def test_parts_in_a_memory_file_are_aligned_and_copied_on_request():
    place = MemoryFile().append(SerializedValue([torch.ones(size, dtype=torch.uint8) for size in (3, 64, 65, 1)]))
    parts = place.file.read(place.spans)
    views, copies = deserialize(parts), deserialize(parts, copy=True)
    assert [tensor.data_ptr() % ALIGNMENT for tensor in (*views, *copies)] == [0] * 8
    assert [int(tensor.sum()) for tensor in views] == [3, 64, 65, 1]
    for part in parts[1:]:
        part[:] = 0
    assert [int(tensor.sum()) for tensor in (*views, *copies)] == [0, 0, 0, 0, 3, 64, 65, 1]
    parts[1].flags.writeable = False  # as in Ray's object store
    assert deserialize(parts)[0].sum() == 0


def test_parameters_and_special_tensors_are_serialized_by_torch():
    parameter, leaf = torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    conjugate, sparse = torch.tensor([1 + 2j]).conj(), torch.eye(2).to_sparse()
    others = arrived([parameter, leaf, conjugate, sparse])
    assert isinstance(others[0], torch.nn.Parameter)
    assert others[1].requires_grad
    assert torch.equal(others[2], torch.tensor([1 - 2j]))
    assert torch.equal(others[3].to_dense(), torch.eye(2))


# --- The store ---


def task(client, memory=None, **tensors):
    return Task(1, client, Message.pack({"model": tensors}), memory or {})


def test_tensors_of_several_tasks_are_stored_once():
    put, shared, own = [], torch.randn(1000), [torch.randn(500) for _ in range(3)]
    store = SharedTensorStore(lambda serialized: put.append(serialized.parts) or len(put) - 1)
    tasks = [task(k, w=shared, v=own[k]) for k in range(3)]
    for one in tasks:
        store.add(one)
    assert len(put) == len(store.handles) == 1
    for k, one in enumerate(tasks):
        serialized = SerializedValue(one, store)
        assert serialized.blocks == {0}
        assert sum(map(len, serialized.parts)) < 4000
        other = deserialize(serialized.parts, lambda block: deserialize(put[block]))
        assert torch.equal(other.download.section("model")["w"], shared)
        assert torch.equal(other.download.section("model")["v"], own[k])


def test_tensors_of_one_task_are_neither_stored_nor_kept_alive():
    tensor = torch.ones(3)
    store = SharedTensorStore(lambda serialized: pytest.fail("nothing is shared"))
    store.add(task(0, {"m": {"w": tensor}}, w=tensor))
    store.add(task(1, w=torch.ones(3)))
    kept = weakref.ref(tensor)
    del tensor
    assert kept() is None


def test_client_state_is_shared_too_and_later_tasks_add_blocks():
    first, second = torch.ones(3), torch.zeros(3)
    store = SharedTensorStore(lambda serialized: None)
    store.add(task(0, {"m": {"a": first}}))
    store.add(task(1, a=first, b=second))
    store.add(task(2, {"m": {"b": second}}))
    assert len(store.handles) == 2
    assert store.positions == {id(first): (0, 0), id(second): (1, 0)}


# --- The engine ---


def served(server, requests):
    """What a server answers to requests."""
    waiting, answers = deque(requests), []
    with pytest.raises(IndexError):
        server.serve(waiting.popleft, lambda serialized: answers.append(deserialize(serialized.parts, copy=True)))
    assert not waiting
    return answers


class LocalWorker(PoolWorker):
    """A worker in this process. It works when it is asked for an answer, and is lost at some clients."""

    def __init__(self, pool):
        super().__init__()
        self.pool, self.server, self.inbox = pool, TaskServer({}), deque()

    def send(self, handle, blocks=None):
        self.inbox.append(Request(handle, None if blocks is None else lambda block: deserialize(blocks[block])))

    def answer(self):
        request = self.inbox.popleft()
        if self.overdue:
            raise WorkerLost("killed")
        if not request.block:
            if self.pool.lost_at_start:
                self.pool.lost_at_start -= 1
                raise WorkerLost("young", self.pool.exited)
        else:
            client = self.tasks[0].client
            self.pool.order.append(client)
            if client in self.pool.lost_at:
                self.pool.lost_at.remove(client)
                raise WorkerLost("by a test")
        (answer,) = served(self.server, [request])
        return answer

    def end(self):
        self.pool.ended += 1

    def kill(self):
        self.pool.killed.append(self.tasks[0].client if self.tasks else None)


class LocalPool(PoolEngine):
    def __init__(self, workers, lost_at=(), lost_at_start=0, **options):
        super().__init__(**options)
        self.killed = []
        self.workers, self.lost_at, self.lost_at_start = workers, list(lost_at), lost_at_start
        self.order, self.storages, self.started, self.ended, self.exited = [], [], 0, 0, False

    def size(self, worker):
        return self.workers

    def _start_worker(self):
        self.started += 1
        return LocalWorker(self)

    def _new_storage(self):
        self.storages.append(stored := [])
        return lambda serialized: stored.append(serialized) or serialized.parts

    def _wait(self, seconds):
        return [worker for worker in self.pool_workers if worker.inbox][-1:]


def same(one, other):
    assert one.state.keys() == other.state.keys()
    assert all(same_bytes(one.state[name], other.state[name]) for name in one.state)
    assert untimed(one.csv.rows) == untimed(other.csv.rows)


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("workers", "method"), [(2, PeerAlgorithm), (1, FedAvg), (3, FedAvg)])
def test_the_number_of_workers_does_not_change_results(tmp_path, workers, method):
    alone = experiment(tmp_path / "1", method())
    shared = experiment(tmp_path / "n", method(), engine=LocalPool(workers))
    alone.fit()
    shared.fit()
    same(alone, shared)


def started(tmp_path, engine, **options):
    """A run that is about to begin, and the tasks of its first round."""
    run = experiment(tmp_path, engine=engine, clients_per_round=None, **options)
    run.check()
    clients = range(run.scenario.clients)
    return run, [run.server.task(1, k, d) for k, d in zip(clients, run.server.downloads(1, clients), strict=True)]


class SilentPool(LocalPool):
    def _wait(self, seconds):
        return []


def interrupt():
    raise Interrupted(2, "stopped")


def test_a_signal_ends_the_wait_for_workers_that_do_not_answer(tmp_path):
    engine = SilentPool(1)
    run, tasks = started(tmp_path, engine)

    engine.check_interrupt = interrupt
    with pytest.raises(Interrupted):
        run_tasks(engine, run.worker, tasks)
    with pytest.raises(Interrupted):
        engine.start(run.worker)


@pytest.mark.thorough
def test_the_largest_of_the_tasks_taken_goes_first(tmp_path):
    engine = LocalPool(1)
    run, tasks = started(tmp_path, engine)
    work = [len(shard.train) for shard in run.data.shards]
    assert len(set(work)) == len(work)
    assert [result.client for result in run_tasks(engine, run.worker, tasks)] == list(range(6))
    assert engine.order != sorted(engine.order)
    # taken in twos; the next two are taken when the last of these is given away, one having been answered by then
    assert sorted(engine.order[:FETCHED]) == [0, 1]
    assert work[engine.order[0]] > work[engine.order[1]]
    assert sorted(engine.order) == list(range(6))


@pytest.mark.thorough
def test_tasks_are_taken_only_when_there_is_room(tmp_path):
    engine, taken, arrived = LocalPool(2, held_megabytes=0), 0, 0
    run, tasks = started(tmp_path, engine, scenario=digits(30, alpha=10))

    def watched():
        nonlocal taken
        for one in tasks:
            taken += 1
            yield one

    def done(result):
        nonlocal arrived
        arrived += 1
        assert taken - arrived < (QUEUED + FETCHED) * 2

    clients = [task.client for task in tasks]
    engine.run(run.worker, Tasks(clients, watched()), ClientOrder(clients, done))
    assert arrived == taken == 30


@pytest.mark.thorough
def test_shared_tensors_are_stored_once_a_round_and_the_worker_object_once(tmp_path):
    engine = LocalPool(30)
    run = experiment(tmp_path, engine=engine, clients_per_round=None)
    run.fit()
    (worker_object,), *rest = [stored for stored in engine.storages if stored]
    blocks = [stored for (stored,) in rest if not stored.blocks]  # the others are tasks, which need a block
    assert isinstance(deserialize(worker_object.parts)[0], Worker)
    assert len(blocks) == run.rounds
    assert engine.started == engine.ended == 6  # no more than tasks


@pytest.mark.thorough
def test_start_starts_all_workers(tmp_path):
    engine = LocalPool(30, lost_at_start=1)
    run, tasks = started(tmp_path, engine)
    for _ in range(2):
        engine.start(run.worker)
        assert [worker.ready for worker in engine.pool_workers] == [True] * 6  # no more than clients
    assert len(run_tasks(engine, run.worker, tasks)) == 6
    assert engine.started == 7
    with pytest.raises(WorkerLost, match="3 workers ended before they could begin"):
        LocalPool(2, lost_at_start=9).start(run.worker)


@pytest.mark.thorough
def test_another_worker_object_is_sent_anew(tmp_path):
    engine = LocalPool(1)
    (one, tasks), (other, other_tasks) = (started(tmp_path / str(n), engine, seed=n) for n in (0, 1))
    (first,), (second,) = (run_tasks(engine, run.worker, t[:1]) for run, t in ((one, tasks), (other, other_tasks)))
    assert engine.started == 1
    assert same_bytes(first.upload.tensors, one.worker.run(tasks[0]).upload.tensors)
    assert same_bytes(second.upload.tensors, other.worker.run(other_tasks[0]).upload.tensors)


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("lost_at", [[2, 2], [0, 1, 2, 3, 4, 5]])
def test_tasks_of_a_lost_worker_are_run_again(tmp_path, lost_at):
    options = {"clients_per_round": None, "rounds": 2}
    alone, shared = (
        experiment(tmp_path / str(engine), engine=engine, **options) for engine in ("sequential", LocalPool(2, lost_at))
    )
    alone.fit()
    shared.fit()
    same(alone, shared)
    assert shared.engine.started == 2 + len(lost_at)
    assert shared.engine.ended == shared.engine.started


@pytest.mark.thorough
def test_a_client_at_which_three_workers_are_lost_has_failed(tmp_path):
    run = experiment(
        tmp_path, engine=LocalPool(2, [3, 3, 3]), clients_per_round=None, rounds=1, on_client_failure="drop"
    )
    with pytest.warns(UserWarning, match="client 3, round 1: 3 worker processes died .* by a test; dropped"):
        run.fit()
    assert run.csv.rows[0]["client/failed"] == 1
    assert run.engine.order.count(3) == 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("exited", "main", "is_shown"),
    [
        (True, SimpleNamespace(__file__="train.py", __spec__=None), True),
        (True, SimpleNamespace(__file__="bin/train", __spec__=None), True),
        (False, SimpleNamespace(__file__="train.py", __spec__=None), False),
        (True, SimpleNamespace(__file__="bin/fl-lightning", __spec__=None), False),
        (True, SimpleNamespace(__file__="__main__.py", __spec__=find_spec("fl_lightning.__main__")), False),
        (True, SimpleNamespace(), False),
    ],
)
def test_workers_that_never_begin_end_the_run(exited, main, is_shown, tmp_path, monkeypatch):
    """The main guard is named only to users whose script may need one."""
    monkeypatch.setitem(sys.modules, "__main__", main)
    engine = LocalPool(2, lost_at_start=3)
    engine.exited = exited
    run = experiment(tmp_path, engine=engine)
    with pytest.raises(WorkerLost, match=r"3 workers ended before .* young") as caught:
        run.fit()
    assert ("__main__" in str(caught.value)) == is_shown
    assert engine.started == engine.ended


@pytest.mark.thorough
def test_tasks_of_an_interrupted_round_are_dropped(tmp_path):
    engine = LocalPool(2)
    run, tasks = started(tmp_path, engine)

    def interrupt(result):
        raise Interrupted(2, "stopped")

    with pytest.raises(Interrupted):
        engine.run(run.worker, tasks_in(tasks), ClientOrder(range(6), interrupt))
    clients = [result.client for result in run_tasks(engine, run.worker, tasks[:3])]
    assert sorted(clients) == [0, 1, 2]


def test_the_worker_with_the_least_work_gets_the_next_task(tmp_path):
    """The worker with the least to do gets the next task, however many tasks the others have."""
    engine = LocalPool(2)
    _, tasks = started(tmp_path, engine)
    workers = [LocalWorker(engine), LocalWorker(engine)]
    for worker in workers:
        worker.ready = True
    engine.pool_workers = workers
    store, window = SharedTensorStore(lambda serialized: None), ResultWindow(ClientOrder(range(6), None), 1e9, 2)
    engine.assign(tasks[:4], store, lambda one: 1 if one.client else 100, window)
    assert [len(worker.tasks) for worker in workers] == [1, 2]
    assert workers[0].tasks[0].client == 0


# --- Memory of results that wait ---


class LastFirst(LocalPool):
    """Client 0 is sent first and is slow: its worker answers only when no other worker can."""

    def assign(self, waiting, store, work, window):
        super().assign(waiting, store, lambda task: 100 - task.client, window)

    def _wait(self, seconds):
        working = [worker for worker in self.pool_workers if worker.inbox]
        others = [worker for worker in working if not (worker.tasks and worker.tasks[0].client == 0)]
        return (others or working)[:1]


def finished_before_the_first(tmp_path, workers, held_megabytes):
    """Train 20 clients; the first one is slow. Return how many others have finished before, and the model."""
    engine = LastFirst(workers, held_megabytes=held_megabytes)
    run = experiment(tmp_path, engine=engine, rounds=1, clients_per_round=None, scenario=digits(20, alpha=10))
    run.fit()
    assert sorted(engine.order) == list(range(20))
    return engine.order.index(0), run


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("workers", "results", "finished"), [(2, 5.5, 3), (2, 0, 1), (3, 0, 2), (2, 100, 18)])
def test_results_that_wait_for_a_slow_client_are_limited_by_memory(tmp_path, workers, results, finished):
    alone = experiment(tmp_path / "1", rounds=1, clients_per_round=None, scenario=digits(20, alpha=10))
    alone.fit()
    size = alone.worker.run(task_of_round(alone, 1, 0)).nbytes
    count, run = finished_before_the_first(tmp_path / "n", workers, results * size / pool.MEGABYTE)
    assert count == finished
    same(alone, run)


def test_progress_counts_clients_while_a_slow_one_with_a_lower_id_trains(tmp_path):
    engine, counted = LastFirst(2), []
    run, tasks = started(tmp_path, engine)
    clients = [task.client for task in tasks]
    order = ClientOrder(clients, lambda result: counted.append(result.client), lambda: counted.append("arrived"))
    engine.run(run.worker, tasks_in(tasks), order)
    before = engine.order.index(0)
    assert before == 4  # one client is queued behind the first
    assert counted[: before + 2] == ["arrived"] * (before + 1) + [0]
    assert [each for each in counted if each != "arrived"] == clients


def result_of(client, size):
    upload = Message.pack({"model": {"w": torch.zeros(size // 2, dtype=torch.uint8)}})
    return Result(client, 0, upload, {"own": {"v": torch.zeros(size - size // 2, dtype=torch.uint8)}})


def test_a_window_counts_bytes_of_uploads_and_client_states():
    passed = []
    window = ResultWindow(ClientOrder([3, 5, 6, 7, 8], lambda result: passed.append(result.client)), 1000, 1)
    tasks = {client: task(client, w=torch.zeros(100)) for client in (3, 5, 6, 7, 8)}  # messages of 400 bytes
    assert window.has_room(tasks[3], 0, False)
    assert window.has_room(tasks[5], 1, False)  # two of 400
    assert not window.has_room(tasks[6], 2, False)
    assert window.has_room(tasks[3], 9, False)  # all others wait for it
    window.add(result_of(5, 300))
    assert window.has_room(tasks[6], 1, False)  # one of 300 is there, two more may come
    assert not window.has_room(tasks[7], 2, False)
    window.add(result_of(6, 600))
    assert not window.has_room(tasks[7], 1, False)
    assert passed == []
    window.add(result_of(3, 0))
    assert passed == [3, 5, 6]
    assert not window.has_room(tasks[8], 1, False)  # results of 600 bytes are possible
    assert window.has_room(tasks[7], 1, False)
    assert window.has_room(tasks[8], 0, False)


def test_each_worker_may_have_one_task_whatever_its_size():
    window = ResultWindow(ClientOrder([3, 5, 6, 7, 8], None), 0, 3)
    assert window.has_room(task(5), 2, True)
    assert not window.has_room(task(5, w=torch.zeros(1)), 2, False)  # a second one only if there is memory
    assert not window.has_room(task(5, w=torch.zeros(1)), 3, True)
    window.add(result_of(5, 10))
    assert window.has_room(task(6), 1, True)
    assert not window.has_room(task(6), 2, True)


def test_tasks_without_upload_have_room_until_a_result_shows_their_size():
    window = ResultWindow(ClientOrder(range(9), None), 1000, 1)
    evaluation = replace(task(5, w=torch.zeros(10_000)), upload=False)
    assert window.has_room(evaluation, 4, False)
    window.add(result_of(4, 500))
    assert not window.has_room(evaluation, 1, False)


# --- Time limits ---


class Clock:
    """Time passes only while the engine waits and no worker answers."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: self.now))


class HangingPool(LocalPool):
    """Some clients hang: their workers do not answer until they are killed."""

    def __init__(self, clock, hanging, **options):
        super().__init__(2, **options)
        self.clock, self.hanging, self.waits = clock, hanging, []

    def _wait(self, seconds):
        busy = [worker for worker in self.pool_workers if worker.inbox]
        lost = [worker for worker in busy if worker.overdue]
        answering = [worker for worker in busy if not worker.tasks or worker.tasks[0].client not in self.hanging]
        if found := lost or answering:
            return found[:1]
        self.waits.append(seconds)
        self.clock.now += seconds
        return []


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("retries", "words"), [(1, "2 worker processes died"), (0, "its worker process died")])
def test_a_client_over_the_time_limit_is_tried_again_and_then_dropped(tmp_path, monkeypatch, retries, words):
    clock = Clock(monkeypatch)
    engine = HangingPool(clock, {3}, timeout=2.5, retries=retries)
    options = {"clients_per_round": None, "rounds": 2, "on_client_failure": "drop"}
    run = experiment(tmp_path, engine=engine, **options)
    with pytest.warns(match=rf"client 3, round \d: {words} .*after 2.5 seconds .* \(engine.timeout\); dropped"):
        run.fit()
    assert engine.killed == [3] * 2 * (retries + 1)
    assert [row["client/failed"] for row in run.csv.rows] == [1, 1]
    assert clock.now == pytest.approx(2.5 * len(engine.killed))
    with (tmp_path / "clients.csv").open() as file:
        came = [row["client"] for row in csv.DictReader(file)]
    assert came == ["0", "1", "2", "4", "5"] * 2
    left = experiment(tmp_path / "left", engine=LocalPool(2, [3] * 6, retries=2), **options)
    with pytest.warns(match="client 3, round"):
        left.fit()
    assert same_bytes(left.state["model"], run.state["model"])  # of those who came


class SlowPool(LocalPool):
    """One worker, which takes some time to start and for each client, on a simulated clock."""

    def __init__(self, clock, starting, working, **options):
        super().__init__(1, **options)
        self.clock, self.starting, self.working, self.request, self.end = clock, starting, working, None, 0.0

    def _wait(self, seconds):
        (worker,) = self.pool_workers
        if worker.overdue:
            return [worker]
        if worker.inbox[0] is not self.request:
            self.request, taken = worker.inbox[0], self.working if worker.ready else self.starting
            self.end = self.clock.now + taken
        self.clock.now = min(self.end, self.clock.now + seconds)
        return [worker] if self.clock.now == self.end else []


@pytest.mark.parametrize(
    ("starting", "limit", "working", "times"),
    [
        (1000.0, math.inf, 4.0, [1012, 1116]),  # workers start as soon as they can
        (59.0, 60.0, 4.0, [71, 175]),
        (4.0, 2.0, 4.0, [16, 120]),  # the time limit of a client is larger
        (1.0, 60.0, 6.0, [18, 124]),  # each client exceeds it, and another worker starts
    ],
)
def test_the_time_limit_is_that_of_each_request(tmp_path, monkeypatch, starting, limit, working, times):
    """Between two rounds, a worker has nothing to do."""
    engine = SlowPool(Clock(monkeypatch), starting, working, timeout=5.0, retries=0)
    engine.start_seconds = limit
    run, tasks = started(tmp_path, engine)
    for chosen, end in zip((tasks[:3], tasks[3:4]), times, strict=True):
        results = run_tasks(engine, run.worker, chosen)
        assert [bool(result.failure) for result in results] == [working > 5] * len(chosen)
        assert engine.clock.now == end
        engine.clock.now += 100


def test_workers_that_do_not_start_within_their_limit_end_the_run(tmp_path, monkeypatch):
    engine = SlowPool(Clock(monkeypatch), 61.0, 4.0, timeout=5.0)
    engine.start_seconds = 60.0
    run, tasks = started(tmp_path, engine)
    with pytest.raises(WorkerLost):
        run_tasks(engine, run.worker, tasks)
    assert engine.clock.now == 180


def test_a_slow_client_among_slow_clients_is_reported_late(tmp_path, monkeypatch, capsys):
    """A client that takes 100 s is reported after a minute, the next one after five times as long as the first."""
    engine = SlowPool(Clock(monkeypatch), 0.0, 100.0)
    run, tasks = started(tmp_path, engine)
    run_tasks(engine, run.worker, tasks[:2])

    def end_after_some_minutes():
        if engine.clock.now > 900:
            interrupt()

    engine.working, engine.check_interrupt = math.inf, end_after_some_minutes
    with pytest.raises(Interrupted):
        run_tasks(engine, run.worker, tasks[2:3])
    lines = capsys.readouterr().err.splitlines()
    assert [f"client {client}," in line for client, line in zip((engine.order[0], 2), lines, strict=True)] == [True] * 2
    assert " 60 s" in lines[0]
    assert " 500 s" in lines[1]


def test_a_worker_that_does_not_answer_is_reported_with_its_client(tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    engine = HangingPool(clock, {4})
    monkeypatch.setattr(LocalWorker, "describe", lambda worker: "process 7, stopped")

    def end_after_some_minutes():
        if clock.now > 500:
            raise Interrupted(2, "stopped")

    run, tasks = started(tmp_path, engine)
    engine.check_interrupt = end_after_some_minutes
    with pytest.raises(Interrupted):
        run_tasks(engine, run.worker, tasks)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4  # after 60, 120, 240 and 480 seconds
    assert all("(process 7, stopped)" in line and "client 4, round 1." in line for line in lines)
    assert "engine.timeout" in lines[0]
    assert set(engine.waits) == {pool.POLL}


class StepsFirst(HangingPool):
    """Workers send the steps of their clients before they answer, and some never answer."""

    def _start_worker(self):
        worker = super()._start_worker()
        answer, sent = worker.answer, []

        def steps_first():
            if worker.tasks and worker.tasks[0].client not in sent:
                sent.append(worker.tasks[0].client)
                return Steps(worker.tasks[0].client, 1000)  # more than the clients of this process
            return answer()

        worker.answer = steps_first
        return worker

    def _wait(self, seconds):
        unheard = [worker for worker in self.pool_workers if worker.tasks and not worker.steps]
        return unheard[:1] or super()._wait(seconds)


def test_steps_of_workers_are_reported_together(tmp_path, monkeypatch, capsys):
    """The first client never answers. Its steps are added to those of the other worker until a signal arrives."""
    clock, seen = Clock(monkeypatch), []
    engine = StepsFirst(clock, {0})

    def end_after_a_minute():
        if clock.now > 70:
            raise Interrupted(2, "stopped")

    run, tasks = started(tmp_path, engine)
    assign = engine.assign
    engine.assign = lambda waiting, store, work, window: assign(waiting, store, lambda one: 100 - one.client, window)
    engine.check_interrupt = end_after_a_minute
    listener = SimpleNamespace(on_steps=lambda done, total, clients: seen.append((done, total, clients)))
    with listen(listener), pytest.raises(Interrupted):
        run_tasks(engine, run.worker, tasks)
    seen = [steps for steps in seen if steps[1] >= 1000]
    assert {(client, 2000, 2) for client in engine.order} & {*seen}
    assert seen[-1] == (0, 1000, 1)
    assert all(total == 1000 * clients for _, total, clients in seen)
    (line,) = capsys.readouterr().err.splitlines()
    assert "client 0, round 1, step 0/1000." in line


def test_a_message_about_steps_does_not_delay_ctrl_c(tmp_path, monkeypatch):
    engine = StepsFirst(Clock(monkeypatch), ())
    run, tasks = started(tmp_path, engine)
    engine.start(run.worker)

    engine.check_interrupt = interrupt
    with pytest.raises(Interrupted):
        run_tasks(engine, run.worker, tasks)
    assert engine.order == []


def test_the_steps_of_short_clients_are_not_sent(monkeypatch):
    now, sent = [50.0], []
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    sender = processes.StepSender(sent.append)
    for seconds in (0.3, 1.2):  # per step of two clients
        for done in range(1, 6):
            sender.on_steps(done, 5, 1)
            now[0] += seconds
    assert sent == [Steps(5, 5), *(Steps(done, 5) for done in range(2, 6))]


@pytest.mark.parametrize("options", [{"timeout": 0}, {"retries": -1}, {"held_megabytes": -1}])
def test_bad_limits_are_named(options):
    with pytest.raises(ConfigError, match=f"^engine.{next(iter(options))}: "):
        LocalPool(1, **options)


# --- The task server ---


@pytest.fixture
def events(monkeypatch):
    """When a `Trainer.fit` begins and ends, and what the collector is asked for."""
    seen = []
    fit, freeze = L.Trainer.fit, gc.freeze

    def noted(trainer, module, **rest):
        seen.append(type(module).__name__)
        try:
            fit(trainer, module, **rest)
        finally:
            seen.append("end")

    monkeypatch.setattr(L.Trainer, "fit", noted)
    lasting = SimpleNamespace(collect=lambda: seen.append("collect"), freeze=lambda: (seen.append("freeze"), freeze()))
    monkeypatch.setattr(task_server, "gc", lasting)
    return seen


LOADED = ["collect", "freeze"]
SHARED, OWN = ["RoundFit", "end"], ["RoundFit", "ClientModule", "end", "end"]


def load(run):
    return Request(pool.serialize_worker(run.worker).parts, None)


def requests_for(tasks):
    return [Request(SerializedValue(task).parts, pytest.fail) for task in tasks]


def same_result(one, other):
    assert one.client == other.client
    assert one.losses == other.losses
    return same_bytes(one.upload.tensors, other.upload.tensors)


def test_each_task_is_a_round_of_one_client(tmp_path, events):
    run, tasks = started(tmp_path, "sequential")
    loaded, *answers = served(TaskServer({}), [load(run), *requests_for(tasks[:4])])
    assert (loaded.result, loaded.refused) == (None, None)
    assert events == [*LOADED, *4 * SHARED]
    for answer, task in zip(answers, tasks, strict=False):
        assert same_result(answer.result, run.worker.run(task))


@pytest.mark.thorough
def test_each_task_is_answered_before_the_next_is_received(tmp_path):
    run, tasks = started(tmp_path, "sequential")
    waiting, log = deque([load(run), *requests_for(tasks[:3])]), []

    def receive():
        log.append("?")
        return waiting.popleft()

    with pytest.raises(IndexError):
        TaskServer({}).serve(receive, lambda serialized: log.append("!"))
    assert "".join(log) == "?!?!?!?!?"


ALONE = {"trainer": {"accelerator": "cpu", "accumulate_grad_batches": 2}}


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        ({}, {}, [*SHARED, *SHARED, *LOADED, *SHARED, *SHARED]),
        ({}, ALONE, [*SHARED, *SHARED, *LOADED, *OWN, *OWN]),
        (ALONE, {}, [*OWN, *OWN, *LOADED, *SHARED, *SHARED]),
    ],
    ids=["local loop", "then own fits", "first own fits"],
)
def test_another_worker_object_replaces_the_first(tmp_path, events, first, second, fits):
    (one, tasks), (other, others) = (
        started(tmp_path / str(n), "sequential", seed=n, **options) for n, options in enumerate((first, second))
    )
    requests = [load(one), *requests_for(tasks[:2]), load(other), *requests_for(others[:2])]
    answers = served(TaskServer({}), requests)
    assert events == [*LOADED, *fits]
    assert same_result(answers[2].result, one.worker.run(tasks[1]))
    assert same_result(answers[5].result, other.worker.run(others[1]))


@pytest.mark.thorough
def test_a_task_is_freed_before_the_next_is_received(tmp_path):
    run, tasks = started(tmp_path, "sequential")
    waiting, held = requests_for(reversed(tasks)), []

    def receive():
        if not held:
            held.append(None)
            return load(run)
        assert not (held[-1] and held[-1]()), "the task before is still there"
        request = waiting.pop()
        held.append(weakref.ref(request))
        return request

    with pytest.raises(IndexError):
        TaskServer({}).serve(receive, lambda serialized: None)
    assert len(held) == 7


class Trouble(LossTerm):
    """Warns in each step; in given rounds, changes global settings and fails."""

    def __init__(self, **rounds):
        super().__init__()
        self.rounds, self.round = rounds, 0

    def begin(self, module):
        self.round = module.context.round

    def forward(self, step):
        warnings.warn("smoke is seen", UserWarning, stacklevel=1)
        warnings.warn(f"in round {self.round}", RuntimeWarning, stacklevel=1)
        if error := self.rounds.get(f"_{self.round}"):
            torch.set_grad_enabled(False)
            warnings.simplefilter("error")
            raise error
        return step.logits.sum() * 0


@pytest.mark.filterwarnings("always:smoke is seen", "always:in round")
@pytest.mark.parametrize("error", [RuntimeError("fire"), SystemExit("had enough")])
def test_a_client_fails_alone_and_warnings_are_sent_once(tmp_path, events, error):
    run = experiment(tmp_path, FedAvg(loss_terms=[Trouble(_2=error)]))
    run.check()
    tasks = [task_of_round(run, number, 0) for number in (1, 2, 3)]
    _, *answers = served(TaskServer({}), [load(run), *requests_for(tasks)])
    assert events == [*LOADED, *3 * SHARED]
    shown = [[(text, category) for text, category, _, _ in answer.warnings] for answer in answers]
    each = [(f"in round {number}", RuntimeWarning) for number in (1, 2, 3)]
    assert shown == [[("smoke is seen", UserWarning), each[0]], [each[1]], [each[2]]]
    assert {file for answer in answers for _, _, file, _ in answer.warnings} == {__file__}
    assert f"client 0, round 2: {type(error).__name__}: {error}" == str(answers[1].result.failure)
    assert "test_pool.py" in answers[1].trace
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert same_result(answers[0].result, run.worker.run(tasks[0]))
        assert same_result(answers[2].result, run.worker.run(tasks[2]))


class Elsewhere:
    """A model that can only be built by the process that it was made in, less what a test sets."""

    home = True

    def __call__(self, in_shape, num_classes):
        if not Elsewhere.home:
            raise FileNotFoundError("weights.pt")
        return MLP(in_shape=in_shape, num_classes=num_classes, hidden=(16,))


def test_a_model_that_cannot_be_built_is_each_clients_failure(tmp_path, events, monkeypatch):
    run, tasks = started(tmp_path, "sequential", model=Elsewhere())
    monkeypatch.setattr(Elsewhere, "home", False)
    _, *answers = served(TaskServer({}), [load(run), *requests_for(tasks[:2])])
    words = [f"client {k}, round 1: FileNotFoundError: weights.pt" for k in (0, 1)]
    assert [str(answer.result.failure) for answer in answers] == words


def test_a_result_that_cannot_be_serialized_is_a_failed_task(tmp_path):
    class Odd(FedAvg):
        def remember(self, module, upload):
            return {"odd": {"tensor": torch.zeros(1), "lambda": lambda: 0}}

    server = TaskServer({})
    run, tasks = started(tmp_path, "sequential")
    server.worker = run.worker
    server.worker.algorithm = Odd()
    (answer,) = served(server, requests_for(tasks[:1]))
    assert "client 0, round 1: " in str(answer.result.failure)
    assert "lambda" in str(answer.result.failure)


class Broken(TaskServer):
    """Breaks down at the first request."""

    def serve(self, receive, answer):
        receive()
        raise OSError("the disk is gone")


def test_an_actor_raises_the_error_of_its_server(monkeypatch):
    monkeypatch.setattr(ray_actor, "TaskServer", Broken)
    with pytest.raises(OSError, match="the disk is gone"):
        ray_actor.RemoteServer(1, {}, []).load([], {}, [])
