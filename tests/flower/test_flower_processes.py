"""A SuperLink and three clients in processes of their own, with encryption and authentication: the same bytes."""

import csv
import os
import random
import shutil
import signal

import pytest
from commands import run as command
from experiments import untimed
from flower_processes import Federation, wait_until, write_certificates, write_key

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

CONFIG = """
rounds: 6
batch_size: 16
scenario:
  dataset: Digits
  partition: {class_path: Dirichlet, init_args: {alpha: 0.5, min_samples: 20}}
  clients: 3
  local_test: 0.25
model: MLP
algorithm: SCAFFOLD
optimizer: {class_path: SGD, init_args: {lr: 0.1}}
trainer: {max_epochs: 2, accelerator: cpu}
logger: null
"""
METHODS = ("FedAvg", "FedSKC", "FedDW", "CwFedAvg", "FedRep", "SCAFFOLD", "UAPDFL --algorithm.n_com=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    (folder / "small.yaml").write_text(CONFIG)
    assert command("partition", "--config", folder / "small.yaml", "--out", folder / "parts", "--export").code == 0
    return folder


@pytest.fixture(scope="module")
def federation(folder):
    one = Federation(folder, clients=3)
    try:
        one.start_superlink()
        for client in range(3):
            one.register(client)
            one.start_node(client)
        yield one
    finally:
        one.stop()


def rows(run_dir):
    try:
        with (run_dir / "metrics.csv").open(newline="") as file:
            return [*csv.DictReader(file)]
    except OSError:
        return []


def is_over(run_dir):
    return (run_dir / "final" / "summary.json").exists()


def both(folder, name, method, *more):
    """Run an experiment as a simulation, and write its app. Return the folders of the app and of the two runs."""
    app, alone, remote = (folder / f"{kind}-{name}" for kind in ("app", "alone", "remote"))
    words = "--config", folder / "small.yaml", "--algorithm", *method.split(), *more
    assert command("fit", *words, "--run_dir", alone).code == 0
    assert command("deploy", *words, "--out", app, "--test", folder / "parts" / "test").code == 0
    return app, alone, remote


def assert_same(alone, remote):
    assert untimed(rows(alone)) == untimed(rows(remote))
    names = ["clients.csv", *["final/model.pt"] * (alone / "final" / "model.pt").exists()]
    for name in names:
        assert (alone / name).read_bytes() == (remote / name).read_bytes()


@pytest.mark.parametrize("method", METHODS)
def test_same_bytes(folder, federation, method):
    app, alone, remote = both(folder, method.split()[0], method)
    run = federation.run(app, remote)
    wait_until(lambda: is_over(remote), 120), federation.log_of(run)
    assert_same(alone, remote)


@pytest.mark.parametrize("kind", ["node", "server", "superlink"])
def test_kill_and_resume(folder, federation, kind):
    """Kill a process three times at random moments. Without a limit of time, ten times passed, too."""
    app, alone, remote = both(folder, kind, "SCAFFOLD", "--rounds", "12")
    federation.run(app, remote)
    moments = random.Random(kind)
    for _ in range(3):
        seen = len(rows(remote))
        wait_until(lambda: len(rows(remote)) > seen, 240)  # noqa: B023
        signal.sigtimedwait([], moments.random())
        if kind == "node":
            client = moments.randrange(3)
            federation.nodes[client].kill()
            federation.nodes[client].wait()
            federation.start_node(client)
            continue
        if kind == "server":
            os.kill(wait_until(federation.server_process, 30), signal.SIGKILL)
        else:
            federation.superlink.kill()
            federation.superlink.wait()
        wait_until(lambda: federation.server_process() is None, 60)
        if kind == "superlink":
            federation.start_superlink()
        federation.run(app, remote, resume=True)
    wait_until(lambda: is_over(remote), 300)
    assert_same(alone, remote)


def test_a_stranger_and_a_wrong_authority_are_refused(folder, federation):
    write_key(folder / "stranger")
    shutil.copytree(folder / "parts" / "client-0", folder / "parts" / "client-9")
    (folder / "other").mkdir()
    write_certificates(folder / "other")
    log = folder / "node-9.log"
    stranger = {"key": folder / "stranger"}, "Register the key of this machine"
    authority = {"key": folder / "key-0", "authority": folder / "other" / "ca.crt"}, "certificate verify failed"
    for options, reason in (stranger, authority):
        log.unlink(missing_ok=True)
        federation.start_node(9, **options)
        wait_until(lambda: "trying again" in log.read_text(), 60)
        assert reason in log.read_text()
        assert "connected" not in log.read_text()
        process = federation.nodes.pop(9)
        process.kill()
        process.wait()
