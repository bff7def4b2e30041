"""Waiting for a Ray cluster: what is printed, signals, and addresses where nothing answers. Does not need Ray."""

import itertools
import re
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
from running import free_port

from fl_lightning.core.errors import ConfigError, Interrupted
from fl_lightning.engines import RayEngine, ray_actor, ray_connection
from fl_lightning.engines import ray as ray_engine
from fl_lightning.engines.ray_actor import Actor
from fl_lightning.engines.ray_connection import check_address


class Cluster:
    """Stands for the package `ray`: a cluster whose actors start after some polls, or never."""

    def __init__(self, polls=float("inf"), free=None, total=None):
        self.polls, self.waits, self.clock = polls, [], 0.0
        self.free, self.total = free or {}, total or {"CPU": 2.0}

    def remote(self, **needs):
        self.needs = needs
        serve = SimpleNamespace(remote=lambda *request: object())
        return lambda kind: SimpleNamespace(remote=lambda *arguments: SimpleNamespace(serve=serve))

    def wait(self, references, num_returns, timeout):
        self.waits.append(timeout)
        self.clock += timeout
        found = references[:1] if len(self.waits) > self.polls else []
        return found, [one for one in references if one not in found]

    def available_resources(self):
        return self.free

    def cluster_resources(self):
        return self.total


def waiting(monkeypatch, cluster, **options):
    """Return an engine with one actor that has been asked to load an experiment."""
    for module in (ray_engine, ray_actor):
        monkeypatch.setattr(module, "import_ray", lambda: cluster)
    monkeypatch.setattr(ray_engine, "time", SimpleNamespace(monotonic=lambda: cluster.clock))
    engine = RayEngine(**options)
    engine.gpus_per_actor = options.get("gpus") or 0.0
    engine.start_workers(1)
    return engine


def test_what_is_waited_for_is_printed_every_few_seconds(monkeypatch, capsys):
    engine = waiting(monkeypatch, Cluster(polls=48))
    (actor,) = engine.wait_for_answers()
    assert actor is engine.pool_workers[0]
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
    assert re.match("engine: 0 of 1 workers .* 1 CPU; 0 of 2 CPUs", first)


def test_gpus_and_fractions_are_printed(monkeypatch, capsys):
    cluster = Cluster(24, {"CPU": 7.0, "GPU": 0.25}, {"CPU": 8.0, "GPU": 1.0})
    waiting(monkeypatch, cluster, threads=2, gpus=0.5).wait_for_answers()
    assert "Each needs 2 CPU and 0.5 GPU" in (text := capsys.readouterr().err)
    assert "7 of 8 CPUs and 0.25 of 1 GPUs are free" in text


def test_nothing_is_printed_if_an_actor_starts_soon_or_has_started(monkeypatch, capsys):
    waiting(monkeypatch, Cluster(polls=12)).wait_for_answers()
    engine = waiting(monkeypatch, Cluster(polls=160))
    engine.pool_workers[0].started = True  # it loads the experiment, or trains
    engine.wait_for_answers()
    assert not capsys.readouterr().err


def test_a_signal_ends_the_wait(monkeypatch):
    engine, polls = waiting(monkeypatch, Cluster()), itertools.count()

    def check():
        if next(polls) == 3:
            raise Interrupted(2, "stopped")

    engine.check_interrupt = check
    with pytest.raises(Interrupted):
        engine.wait_for_answers()


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "localhost:{}", "ray://localhost:{}/"])
def test_an_address_where_nothing_answers_is_refused_at_once(monkeypatch, form):
    initialised = []
    package = SimpleNamespace(is_initialized=lambda: False, init=lambda *_, **__: initialised.append(1))
    monkeypatch.setattr(ray_engine, "import_ray", lambda: package)
    with pytest.raises(ConfigError, match=r"^engine.address: "):
        RayEngine(address=form.format(free_port())).connect()
    assert not initialised  # Ray would wait for minutes


def test_the_address_of_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS: "):
        check_address(None)


@pytest.mark.parametrize("address", ["no-such-host.invalid:6379", "127.0.0.1:99999", "ray://[::1"])
def test_an_impossible_address_is_refused(address):
    with pytest.raises(ConfigError, match=r"^engine.address: "):
        check_address(address)


@pytest.mark.parametrize("address", [None, "auto", "local", "ray://cluster", "127.0.0.1"])
def test_an_address_without_a_port_is_left_to_ray(monkeypatch, address):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_address(address)


@pytest.fixture
def service():
    """Listens on a port, and answers each connection with these bytes; return the address and the setter."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        channels, threads = [], []

        def serve(answer):
            with suppress(OSError):  # the server has been shut down
                while True:
                    channels.append(server.accept()[0])  # stays open
                    channels[-1].sendall(answer)

        def start(answer):
            threads.append(threading.Thread(target=serve, args=[answer]))
            threads[0].start()
            return f"127.0.0.1:{server.getsockname()[1]}"

        yield start
        server.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for channel in channels:
            channel.close()


def test_the_exit_of_ray_becomes_an_error(monkeypatch, service):
    def init(*_, **__):
        raise SystemExit(15)

    package = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(ray_engine, "import_ray", lambda: package)
    with pytest.raises(ConfigError, match=r"^engine.address: "):
        RayEngine(address=service(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))).connect()


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.6\r\n", b""])
def test_another_service_or_a_frozen_one_is_refused(monkeypatch, service, answer):
    """Ray itself waits 200 seconds for it."""
    monkeypatch.setattr(ray_connection, "CONNECT", 0.2)
    with pytest.raises(ConfigError, match=r"^engine.address: "):
        check_address(service(answer))


def test_an_actor_has_started_once_it_has_answered(monkeypatch):
    cluster = Cluster()
    cluster.get = lambda reference: []
    cluster.exceptions = SimpleNamespace(RayError=RuntimeError)
    monkeypatch.setattr(ray_actor, "import_ray", lambda: cluster)
    monkeypatch.setattr(ray_actor, "deserialize", lambda parts, copy: "answer")
    actor = Actor(1, 0.0)
    actor.send("handle")
    assert not actor.started
    assert actor.answer() == "answer"
    assert actor.started


# --- Runtime environments ---


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        ({"working_dir": "nowhere"}, "engine.runtime_env.working_dir: nowhere"),
        ({"py_modules": ["s3://bucket/package.zip", "nowhere.whl"]}, "engine.runtime_env.py_modules: nowhere.whl"),
    ],
)
def test_a_missing_file_of_the_runtime_environment_is_named(environment, key):
    with pytest.raises(ConfigError, match=f"^{key}"):
        RayEngine(runtime_env=environment)


def test_a_connection_without_the_runtime_environment_is_refused(monkeypatch):
    monkeypatch.setattr(ray_engine, "import_ray", lambda: SimpleNamespace(is_initialized=lambda: True))
    with pytest.raises(ConfigError, match=r"^engine.runtime_env: "):
        RayEngine(runtime_env={"env_vars": {"A": "1"}}).connect()
