"""A Ray cluster of two nodes on this machine: the same bytes, whatever worker or node is killed."""

import itertools
import os
import signal
import sys
import warnings

import pytest
from experiments import experiment
from methods import FEW_QUICK, METHODS, assert_same_run
from worker_processes import Deadly, Harmless, Witness

from fl_lightning.algorithms import FedAvg, FedSKC
from fl_lightning.core.errors import ClientFailure, ConfigError, Interrupted
from fl_lightning.engines import RayEngine
from fl_lightning.engines.client_order import ClientOrder
from fl_lightning.engines.ray import places_on

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:::ray.*", "ignore:subprocess:ResourceWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes.add_node(num_cpus=1)
        ray.init(nodes.address, logging_level="error", log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Lasting(RayEngine):
    """Its actors outlast a run: they take long to start."""

    def close(self):
        pass


@pytest.fixture(scope="module")
def engine(cluster):
    lasting = Lasting()
    yield lasting
    RayEngine.close(lasting)


def both(tmp_path, engine, name):
    method, options = METHODS[name]
    alone = experiment(tmp_path / "alone", method(), rounds=2, **options)
    shared = experiment(tmp_path / "shared", method(), rounds=2, engine=engine, **options)
    alone.fit()
    shared.fit()
    return alone, shared


@pytest.mark.parametrize("name", FEW_QUICK)
def test_every_method_gives_the_bytes_of_one_client_after_another(tmp_path, engine, name):
    warm_up(tmp_path, engine)
    assert_same_run(*both(tmp_path, engine, name))
    nodes = {actor_node(one) for one in engine.pool_workers}
    assert len(nodes) == len(engine.pool_workers) == 2


def test_an_actor_has_its_threads_and_a_fit_for_several(tmp_path, engine):
    run = experiment(tmp_path, FedAvg(loss_terms=[Witness()]), rounds=1, engine=engine)
    run.fit()
    assert run.csv.rows[0]["client/train_witness"] == 1001


def actor_node(actor):
    import ray

    def where(host):  # by value: it is asked of an actor that knows nothing of the tests
        return ray.get_runtime_context().get_node_id()

    return ray.get(actor._actor.__ray_call__.remote(where))


def warm_up(tmp_path, engine):
    """Run short experiments until both workers are there."""
    for number in itertools.count():
        experiment(tmp_path / f"warm-{number}", engine=engine, rounds=1).fit()
        if sum(one.ready for one in engine.pool_workers) == 2:
            return


def test_a_worker_killed_in_mid_round_changes_nothing(tmp_path, engine):
    alone = experiment(tmp_path / "alone", FedSKC(loss_terms=[Harmless()]))
    killed = experiment(tmp_path / "killed", FedSKC(loss_terms=[Deadly(tmp_path, 1)]), engine=engine)
    alone.fit()
    killed.fit()
    assert (tmp_path / "kill-0").exists()
    assert_same_run(alone, killed)


@pytest.mark.slow
def test_a_client_that_always_kills_its_worker_fails_by_name(tmp_path, engine):
    run = experiment(tmp_path, FedAvg(loss_terms=[Deadly(tmp_path, 99)]), engine=engine, clients_per_round=1)
    words = r"client \d, round 2: 3 worker processes died running it, the last of them with ActorDiedError"
    with pytest.raises(ClientFailure, match=words):
        run.fit()
    assert run.checkpoints.rounds() == [1, 0]


def test_a_node_killed_in_mid_round_changes_nothing(tmp_path, cluster, engine):
    class Losing(Lasting):
        def run(self, worker, tasks, done):
            def strike(result):
                if self.rounds == 2 and cluster.worker_nodes:
                    self.struck = [len(one.tasks) for one in self.pool_workers]
                    cluster.remove_node(next(iter(cluster.worker_nodes)))
                done(result)

            self.rounds += 1
            super().run(worker, tasks, ClientOrder(tasks.clients, strike))

    warm_up(tmp_path, engine)
    losing = Losing()
    losing.rounds, losing.pool_workers = 0, engine.pool_workers
    alone, shared = (
        experiment(tmp_path / str(number), FedSKC(), engine=one, clients_per_round=None)
        for number, one in enumerate(("sequential", losing))
    )
    alone.fit()
    try:
        shared.fit()
        assert not cluster.worker_nodes
        assert all(losing.struck)  # both had clients to train
    finally:
        cluster.add_node(num_cpus=1)
    assert_same_run(alone, shared)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_a_safe_point(tmp_path, engine, signum):
    method = FedSKC(loss_terms=[Deadly(tmp_path, 1, to="leader", signum=signum)])
    run = experiment(tmp_path / "run", method, engine=engine)
    with pytest.raises(Interrupted, match=f"stopped by {signum.name} after round 1 of 3"):
        run.fit()
    assert run.checkpoints.rounds() == [1, 0]


class Busy(RayEngine):
    """Runs on a cluster whose cores another job holds, until `release` is called."""

    def __init__(self, release, **options):
        super().__init__(**options)
        self.release = release

    def _report_waiting(self):
        super()._report_waiting()
        self.release()


@pytest.fixture
def occupied(cluster, engine):
    """All cores are in use by another job; return the function that ends it."""
    import ray

    RayEngine.close(engine)

    class Job:
        pass

    jobs = [ray.remote(num_cpus=1)(Job).remote() for _ in range(2)]
    ray.get([job.__ray_ready__.remote() for job in jobs])
    yield lambda: [ray.kill(job) for job in jobs]
    for job in jobs:
        ray.kill(job)


def test_a_run_waits_for_free_cores_and_says_so(tmp_path, occupied, monkeypatch, capfd):
    monkeypatch.setattr("fl_lightning.engines.ray.REPORT", 0.0)  # the first report is before the cores are free
    experiment(tmp_path, rounds=1, engine=Busy(occupied, workers=1)).fit()
    line = "engine: 0 of 1 workers have started. Each needs 1 CPU; 0 of 2 CPUs are free."
    assert line in capfd.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_free_cores(tmp_path, occupied, signum):
    run = experiment(tmp_path, rounds=1, engine=Busy(lambda: os.kill(os.getpid(), signum), workers=1))
    with pytest.raises(Interrupted, match=f"stopped by {signum.name} after round 0 of 1"):
        run.fit()


# --- What cannot work ---


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^engine: RayEngine .*'fl-lightning\[ray\]'"):
        experiment(tmp_path, engine=RayEngine()).fit()


def test_workers_that_no_machine_has_room_for_are_refused(tmp_path, cluster):
    with pytest.raises(ConfigError, match=r"^engine: .* 2 core\(s\)"):
        experiment(tmp_path, engine=RayEngine(threads=2)).fit()
    with pytest.raises(ConfigError, match=r"^engine: .*1 core\(s\) and 0.5 GPU\(s\)"):
        experiment(tmp_path, engine=RayEngine(gpus=0.5)).fit()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": 0}, "engine.workers: 0 is below 1"),
        ({"threads": 0}, "engine.threads: 0 is below 1"),
        ({"gpus": -0.5}, "engine.gpus: -0.5 is below 0"),
        ({"timeout": 0}, "engine.timeout: 0 is not above 0"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        RayEngine(**arguments)


@pytest.mark.parametrize(
    ("node", "threads", "gpus", "places"),
    [
        ({"CPU": 8.0}, 3, 0, 2),
        ({"CPU": 8.0, "GPU": 2.0}, 1, 0.4, 4),  # an actor has its part of one GPU, never of two
        ({"CPU": 8.0, "GPU": 5.0}, 1, 2, 2),
        ({"CPU": 8.0}, 1, 1, 0),
        ({}, 1, 0, 0),
    ],
)
def test_workers_that_fit_on_a_machine(node, threads, gpus, places):
    assert places_on(node, threads, gpus) == places


@pytest.mark.slow
def test_a_cluster_is_started_where_there_is_none_and_ended_with_the_run(tmp_path):
    import ray

    if ray.is_initialized():
        pytest.skip("run this test alone")
    run = experiment(tmp_path, engine=RayEngine(workers=1), rounds=1)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run.check()
    assert ray.is_initialized()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    run.fit()
    assert not ray.is_initialized()
