"""Engines with several workers: serialization, shared tensors, distribution of tasks, and lost workers."""

import gc
import warnings
import weakref
from collections import deque
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from experiments import experiment, same_bytes, task_of_round, untimed
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.algorithms import FedAvg, PeerAlgorithm
from fl_lightning.client.module import LossTerm
from fl_lightning.core.message import Message
from fl_lightning.engines import Task, pool, ray, shared_fit, task_server
from fl_lightning.engines.pool import FETCHED, QUEUED, PoolEngine, PoolWorker, WorkerLost
from fl_lightning.engines.serialization import ALIGNMENT, SerializedValue, SharedTensorStore, unpack
from fl_lightning.engines.task_server import LoadWorker, RunTask, TaskServer
from fl_lightning.models import MLP


@pytest.fixture(autouse=True)
def _unfrozen():
    """A server keeps the collector off what a process starts with; here that is the tests' own."""
    yield
    gc.unfreeze()


# --- Parcels ---


def written(serialized):
    target = torch.empty(serialized.nbytes + ALIGNMENT, dtype=torch.uint8)
    skip = -target.data_ptr() % ALIGNMENT
    serialized.write(target[skip : skip + serialized.nbytes])
    return target[skip : skip + serialized.nbytes].numpy()


def there_and_back(value, **options):
    return unpack(written(SerializedValue(value)), **options)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "permuted", "sliced", "expanded"]),
    st.booleans(),
)
def test_tensors_arrive_bit_for_bit_with_their_strides(shape, dtype, form, copy):
    tensor = torch.randint(0, 2, shape).to(dtype)
    if form == "permuted":
        tensor = tensor.permute(list(reversed(range(tensor.ndim))))
    elif form == "sliced" and shape:
        tensor = torch.cat([tensor, tensor])[1 : 1 + len(tensor)]
    elif form == "expanded":
        tensor = tensor.expand(3, *shape)
    (arrived,) = there_and_back([tensor], copy=copy)
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived, tensor)
    if form != "expanded" and tensor.numel():
        assert arrived.stride() == tensor.stride()
    assert arrived.numel() == 0 or copy or arrived.data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (1, 3, 1, 1)])
def test_channels_last_stays_so(shape):
    tensor = torch.randn(shape).to(memory_format=torch.channels_last)
    for copy in (False, True):
        (arrived,) = there_and_back([tensor], copy=copy)
        assert arrived.stride() == tensor.stride()
        assert torch.equal(arrived, tensor)


def test_one_tensor_twice_is_one_tensor_there_and_equal_ones_are_two():
    one, equal, empty, other_empty = torch.ones(3), torch.ones(3), torch.empty(0), torch.empty(0, dtype=torch.int64)
    a, b, c, d, e = there_and_back([one, one, equal, empty, other_empty])
    assert a is b
    assert a is not c
    assert (d.dtype, e.dtype) == (torch.float32, torch.int64)


def test_a_tensor_has_its_elements_for_itself():
    large, small = there_and_back([torch.zeros(1000), torch.zeros(2)])
    assert small.untyped_storage().nbytes() == 8  # a deep copy takes all of a tensor's storage
    assert large.untyped_storage().nbytes() == 4000


def test_every_tensor_starts_where_torch_would_have_put_it():
    arrived = there_and_back([torch.ones(size, dtype=torch.uint8) for size in (3, 64, 65, 1)])
    assert [tensor.data_ptr() % ALIGNMENT for tensor in arrived] == [0, 0, 0, 0]
    assert [int(tensor.sum()) for tensor in arrived] == [3, 64, 65, 1]


def test_copies_do_not_lie_in_the_parcel():
    source = written(SerializedValue([torch.ones(4)]))
    (inside,), (copied,) = unpack(source), unpack(source, copy=True)
    source[:] = 0
    assert inside.sum() == 0
    assert copied.sum() == 4


def test_read_only_bytes_can_be_read():
    source = written(SerializedValue([torch.ones(4)]))
    source.flags.writeable = False
    assert unpack(source)[0].sum() == 4


def test_parameters_and_tensors_that_are_more_than_elements_arrive_too():
    parameter, leaf = torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    conjugate, sparse = torch.tensor([1 + 2j]).conj(), torch.eye(2).to_sparse()
    arrived = there_and_back([parameter, leaf, conjugate, sparse])
    assert isinstance(arrived[0], torch.nn.Parameter)
    assert arrived[1].requires_grad
    assert torch.equal(arrived[2], torch.tensor([1 - 2j]))
    assert torch.equal(arrived[3].to_dense(), torch.eye(2))


# --- The store ---


def task(client, memory=None, **tensors):
    return Task(1, client, Message(tensors), memory or {})


def test_what_tasks_have_in_common_is_put_down_once():
    put, shared, own = [], torch.randn(1000), [torch.randn(500) for _ in range(3)]
    store = SharedTensorStore(lambda serialized: put.append(written(serialized)) or len(put) - 1)
    tasks = [task(k, w=shared, v=own[k]) for k in range(3)]
    for one in tasks:
        store.add(one)
    assert len(put) == len(store.handles) == 1
    for k, one in enumerate(tasks):
        serialized = SerializedValue(one, store)
        assert serialized.blocks == {0}
        assert serialized.nbytes < 4000
        arrived = unpack(written(serialized), lambda block: unpack(put[block]))
        assert torch.equal(arrived.download.tensors["w"], shared)
        assert torch.equal(arrived.download.tensors["v"], own[k])


def test_a_tensor_that_one_task_has_twice_is_not_common():
    tensor = torch.ones(3)
    store = SharedTensorStore(lambda serialized: pytest.fail("nothing is common"))
    store.add(task(0, {"m": {"w": tensor}}, w=tensor))
    store.add(task(1, w=torch.ones(3)))


def test_memory_counts_as_well_as_downloads_and_later_finds_make_later_blocks():
    first, second = torch.ones(3), torch.zeros(3)
    store = SharedTensorStore(lambda serialized: serialized.nbytes)
    store.add(task(0, {"m": {"a": first}}))
    store.add(task(1, a=first, b=second))
    store.add(task(2, {"m": {"b": second}}))
    assert len(store.handles) == 2
    assert (store.position(first), store.position(second)) == ((0, 0), (1, 0))


def test_the_shelf_does_not_keep_alive_what_one_task_has():
    store = SharedTensorStore(lambda serialized: None)
    one = task(0, w=torch.ones(3))
    store.add(one)
    assert len(store._seen) == 1
    del one
    assert len(store._seen) == 0


# --- Dealing out ---


def served(server, requests):
    """What a server answers to requests."""
    waiting, answers = deque(requests), []
    with pytest.raises(IndexError):
        server.serve(waiting.popleft, lambda serialized: answers.append(unpack(written(serialized), copy=True)))
    assert not waiting
    return answers


class Near(PoolWorker):
    """A worker in this process; it works when it is asked for an answer, and dies at some clients."""

    def __init__(self, pool):
        super().__init__()
        self.pool, self.server, self.inbox = pool, TaskServer(), deque()

    def load(self, handle):
        self.inbox.append(LoadWorker(handle, {}))

    def send_task(self, serialized, blocks):
        self.inbox.append(RunTask(written(serialized), lambda b: unpack(blocks[b])))

    def answer(self):
        request = self.inbox.popleft()
        if isinstance(request, LoadWorker):
            if self.pool.stillborn:
                self.pool.stillborn -= 1
                raise WorkerLost("young")
        else:
            client = self.tasks[0].client
            self.pool.order.append(client)
            if client in self.pool.deadly:
                self.pool.deadly.remove(client)
                raise WorkerLost("by a test")
        (answer,) = served(self.server, [request])
        return answer

    def end(self):
        self.pool.ended += 1


class NearPool(PoolEngine):
    def __init__(self, workers, deadly=(), stillborn=0):
        super().__init__()
        self.workers, self.deadly, self.stillborn = workers, list(deadly), stillborn
        self.order, self.put, self.started, self.ended = [], [], 0, 0

    def size(self, worker):
        return self.workers

    def _start_worker(self):
        self.started += 1
        return Near(self)

    def _put(self, serialized):
        self.put.append(serialized)
        return written(serialized)

    def _wait(self):
        return [member for member in self._pool_workers if member.inbox][-1:]


def same(one, other):
    assert one.state.keys() == other.state.keys()
    assert all(same_bytes(one.state[name], other.state[name]) for name in one.state)
    assert untimed(one.csv.rows) == untimed(other.csv.rows)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("method", [FedAvg, PeerAlgorithm])
def test_any_number_of_members_gives_the_same_bytes(tmp_path, workers, method):
    alone, shared = experiment(tmp_path / "1", method()), experiment(tmp_path / "n", method(), engine=NearPool(workers))
    alone.fit()
    shared.fit()
    same(alone, shared)


def started(tmp_path, engine, **options):
    """A run that is about to begin, and the tasks of its first round."""
    run = experiment(tmp_path, engine=engine, clients_per_round=None, **options)
    run._build()
    clients = range(run.scenario.clients)
    return run, [run.server.task(1, k, d) for k, d in zip(clients, run.server.downloads(1, clients), strict=True)]


def test_the_largest_of_those_taken_goes_first(tmp_path):
    engine = NearPool(1)
    run, tasks = started(tmp_path, engine)
    work = [len(shard.train) for shard in run.data.shards]
    assert len(set(work)) == len(work)
    assert [result.client for result in engine.run(run.worker, tasks)] == engine.order
    assert engine.order != sorted(engine.order)
    # taken in twos; the next two are taken when the last of these is given away, one having been answered by then
    assert sorted(engine.order[:FETCHED]) == [0, 1]
    assert work[engine.order[0]] > work[engine.order[1]]
    assert sorted(engine.order) == list(range(6))


def test_tasks_are_taken_only_when_there_is_room(tmp_path):
    engine, taken, done = NearPool(2), 0, 0
    run, tasks = started(tmp_path, engine)

    def watched():
        nonlocal taken
        for one in tasks * 5:
            taken += 1
            yield one

    for _ in engine.run(run.worker, watched()):
        done += 1
        assert taken - done < (QUEUED + FETCHED) * 2
    assert done == taken == 30


def test_the_common_state_travels_once_a_round_and_the_worker_object_once(tmp_path):
    engine = NearPool(3)
    run = experiment(tmp_path, engine=engine, clients_per_round=None)
    run.fit()
    assert len(engine.put) == 1 + run.rounds
    assert engine.started == engine.ended == 3


def test_no_more_members_than_tasks_are_hired(tmp_path):
    engine = NearPool(30)
    run, tasks = started(tmp_path, engine)
    assert len(list(engine.run(run.worker, tasks[:2]))) == 2
    assert engine.started == 2


def test_all_members_can_be_started_ahead(tmp_path):
    engine = NearPool(3)
    run, tasks = started(tmp_path, engine)
    engine.start(run.worker)
    assert [member.ready for member in engine._pool_workers] == [True] * 3
    engine.start(run.worker)
    assert len(list(engine.run(run.worker, tasks))) == 6
    assert engine.started == 3
    assert NearPool.start(stillborn := NearPool(2, stillborn=1), run.worker) is None
    assert (stillborn.started, len(stillborn._pool_workers)) == (3, 2)
    with pytest.raises(WorkerLost, match="3 workers ended before they could begin"):
        NearPool(2, stillborn=9).start(run.worker)
    few = NearPool(30)
    few.start(run.worker)
    assert few.started == 6  # there are no more clients


def test_another_worker_object_is_sent_anew(tmp_path):
    engine = NearPool(1)
    (one, tasks), (other, other_tasks) = (started(tmp_path / str(n), engine, seed=n) for n in (0, 1))
    first, second = (next(engine.run(run.worker, t[:1])) for run, t in ((one, tasks), (other, other_tasks)))
    assert engine.started == 1
    assert same_bytes(first.upload.tensors, one.worker.run(tasks[0]).upload.tensors)
    assert same_bytes(second.upload.tensors, other.worker.run(other_tasks[0]).upload.tensors)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("deadly", [[2], [2, 2], [0, 1, 2, 3, 4, 5]])
def test_a_lost_members_tasks_are_done_again(tmp_path, deadly):
    options = {"clients_per_round": None, "rounds": 2}
    alone, shared = (
        experiment(tmp_path / str(engine), engine=engine, **options) for engine in ("sequential", NearPool(2, deadly))
    )
    alone.fit()
    shared.fit()
    same(alone, shared)
    assert shared.engine.started == 2 + len(deadly)
    assert shared.engine.ended == shared.engine.started


def test_a_client_that_three_workers_die_at_has_failed_and_the_others_go_on(tmp_path):
    run = experiment(
        tmp_path, engine=NearPool(2, [3, 3, 3]), clients_per_round=None, rounds=1, on_client_failure="drop"
    )
    with pytest.warns(
        UserWarning, match="client 3, round 1: 3 worker processes died at it, the last of them by a test; dropped"
    ):
        run.fit()
    assert run.csv.rows[0]["client/failed"] == 1
    assert run.engine.order.count(3) == 3


def test_members_that_never_begin_end_the_run(tmp_path):
    engine = NearPool(2, stillborn=3)
    run = experiment(tmp_path, engine=engine)
    with pytest.raises(
        WorkerLost, match=r"3 workers ended before they could begin, the last of them young; .*__main__"
    ):
        run.fit()
    assert engine.started == engine.ended


def test_what_is_left_of_a_round_broken_off_is_not_taken_for_the_next(tmp_path):
    engine = NearPool(2)
    run, tasks = started(tmp_path, engine)
    broken_off = engine.run(run.worker, tasks)
    next(broken_off)
    clients = [result.client for result in engine.run(run.worker, tasks[:3])]
    assert sorted(clients) == [0, 1, 2]


def test_the_work_of_a_task_is_its_training_samples(tmp_path):
    """The member with least to do gets the next task, however many tasks the others have."""
    engine = NearPool(2)
    _, tasks = started(tmp_path, engine)
    members = [Near(engine), Near(engine)]
    for member in members:
        member.ready = True
    engine._pool_workers = members
    engine._assign(tasks[:4], SharedTensorStore(lambda serialized: None), lambda one: 1 if one.client else 100)
    assert [len(member.tasks) for member in members] == [1, 2]
    assert members[0].tasks[0].client == 0


# --- The other end ---


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


def load(run):
    return LoadWorker(written(pool.serialize_worker(run.worker)), {})


def orders(tasks):
    return [RunTask(written(SerializedValue(task)), None) for task in tasks]


def same_result(one, other):
    assert one.client == other.client
    assert one.losses == other.losses
    return same_bytes(one.upload.tensors, other.upload.tensors)


def test_a_host_carries_tasks_out_in_one_fit(tmp_path, events):
    run, tasks = started(tmp_path, "sequential")
    loaded, *answers = served(TaskServer(), [load(run), *orders(tasks[:4])])
    assert (loaded.result, loaded.refused) == (None, None)
    assert events == [*LOADED, "SharedFit", "end"]
    for answer, task in zip(answers, tasks, strict=False):
        assert same_result(answer.result, run.worker.run(task))


def test_and_answers_each_before_it_asks_for_the_next(tmp_path):
    run, tasks = started(tmp_path, "sequential")
    waiting, log = deque([load(run), *orders(tasks[:3])]), []

    def receive():
        log.append("?")
        return waiting.popleft()

    with pytest.raises(IndexError):
        TaskServer().serve(receive, lambda serialized: log.append("!"))
    assert "".join(log) == "?!?!?!?!?"


def test_a_fit_ends_when_its_time_is_over(tmp_path, events, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(shared_fit.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(
        task_server, "SECONDS", 2
    )  # begun at 0, over at 2; garbage is then not left for the next request
    run, tasks = started(tmp_path, "sequential")
    served(TaskServer(), [load(run), *orders(tasks[:4])])
    one_fit = ["SharedFit", "end", "collect"]
    assert events == [*LOADED, *one_fit, *one_fit, "SharedFit", "end"]


def test_the_time_that_a_fit_waits_for_its_first_task_does_not_count(monkeypatch):
    now = [0]
    monkeypatch.setattr(shared_fit.time, "monotonic", lambda: now[0])

    def slowly():
        for item in range(4):
            now[0] += 100
            yield item

    assert list(shared_fit.take_for(slowly(), 150)) == [0, 1, 2]  # from 100 to 250, which the third still is begun in


ALONE = {"trainer": {"accelerator": "cpu", "accumulate_grad_batches": 2}}
RELAYED, BY_ITSELF = ["SharedFit", "end", "collect"], ["ClientModule", "end", "collect"]


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        ({}, {}, [*RELAYED, *LOADED, "SharedFit", "end"]),
        ({}, ALONE, [*RELAYED, *LOADED, *BY_ITSELF, *BY_ITSELF]),
        (ALONE, {}, [*BY_ITSELF, *BY_ITSELF, "collect", *LOADED, "SharedFit", "end"]),
    ],
    ids=["common fits", "then each alone", "first each alone"],
)
def test_another_worker_object_ends_the_fit_before_it_is_taken_in(tmp_path, events, first, second, fits):
    (one, tasks), (other, others) = (
        started(tmp_path / str(n), "sequential", seed=n, **options) for n, options in enumerate((first, second))
    )
    requests = [load(one), *orders(tasks[:2]), load(other), *orders(others[:2])]
    answers = served(TaskServer(), requests)
    assert events == [*LOADED, *fits]
    assert same_result(answers[2].result, one.worker.run(tasks[1]))
    assert same_result(answers[5].result, other.worker.run(others[1]))


def test_nothing_of_a_task_is_held_while_the_next_is_waited_for(tmp_path):
    run, tasks = started(tmp_path, "sequential")
    waiting, held = [SerializedValue(task) for task in reversed(tasks)], []

    def receive():
        if not held:
            held.append(None)
            return load(run)
        assert not (held[-1] and held[-1]()), "the task before is still there"
        order = RunTask(written(waiting.pop()), None)
        held.append(weakref.ref(order))
        return order

    with pytest.raises(IndexError):
        TaskServer().serve(receive, lambda serialized: None)
    assert len(held) == 7


class Trouble(LossTerm):
    """Warns in each step; in given rounds, changes global settings and fails."""

    def __init__(self, **rounds):
        super().__init__()
        self.rounds, self.round = rounds, 0

    def begin(self, module):
        self.round = module.round

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
def test_a_client_of_a_host_fails_alone_and_its_warnings_are_told_once(tmp_path, events, error):
    run = experiment(tmp_path, FedAvg(loss_terms=[Trouble(_2=error)]))
    run._build()
    tasks = [task_of_round(run, number, 0) for number in (1, 2, 3)]
    _, *answers = served(TaskServer(), [load(run), *orders(tasks)])
    assert events == [*LOADED, "SharedFit", "end"]
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


def test_a_model_that_cannot_be_built_there_is_each_clients_failure(tmp_path, events, monkeypatch):
    run, tasks = started(tmp_path, "sequential", model=Elsewhere())
    monkeypatch.setattr(Elsewhere, "home", False)
    _, *answers = served(TaskServer(), [load(run), *orders(tasks[:2])])
    words = [f"client {k}, round 1: FileNotFoundError: weights.pt" for k in (0, 1)]
    assert [str(answer.result.failure) for answer in answers] == words


def test_a_result_that_cannot_travel_is_a_failed_task(tmp_path):
    class Odd(FedAvg):
        def remember(self, module, upload):
            return {"odd": {"tensor": torch.zeros(1), "lambda": lambda: 0}}

    server = TaskServer()
    run, tasks = started(tmp_path, "sequential")
    server.worker = run.worker
    server.worker.algorithm = Odd()
    (answer,) = served(server, [RunTask(written(SerializedValue(tasks[0])), None)])
    assert "client 0, round 1: " in str(answer.result.failure)
    assert "lambda" in str(answer.result.failure)


class Broken(TaskServer):
    """Breaks down at the first request."""

    def serve(self, receive, answer):
        receive()
        raise OSError("the disk is gone")


def test_an_actor_whose_host_breaks_down_says_so(monkeypatch):
    monkeypatch.setattr(ray, "TaskServer", Broken)
    with pytest.raises(OSError, match="the disk is gone"):
        ray.RemoteServer(1, []).load(None, {})
