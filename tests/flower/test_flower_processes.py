"""A SuperLink and three clients in processes of their own, with encryption and authentication: the same bytes."""

import csv
import json
import random
import shutil
import signal
from contextlib import contextmanager

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
GDA = "FedAvg --algorithm.aggregator=GlobalDiscrepancy"
METHODS = ("FedAvg", "FedSKC", "FedDW", "CwFedAvg", "FedRep", "SCAFFOLD", GDA, "UAPDFL --algorithm.n_com=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return parts(tmp_path_factory.mktemp("federation"))


def parts(folder):
    """Write the experiment and a folder for each client."""
    (folder / "small.yaml").write_text(CONFIG)
    assert command("partition", "--config", folder / "small.yaml", "--out", folder / "parts", "--export").code == 0
    return folder


@pytest.fixture(scope="module")
def federation(folder):
    with running(Federation(folder, clients=3)) as one:
        yield one


@contextmanager
def running(one):
    """Context in which a federation runs, with all nodes."""
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


def last_line(folder):
    return (folder / "fit.log").read_text().splitlines()[-1]


def both(folder, name, method, *more, engine=()):
    """Run an experiment as a simulation, and write its app. Return the folders of the app and of the two runs."""
    app, alone, remote = (folder / f"{kind}-{name}" for kind in ("app", "alone", "remote"))
    words = "--config", folder / "small.yaml", "--algorithm", *method.split(), *more
    assert command("fit", *words, "--run_dir", alone).code == 0
    assert command("deploy", *words, *engine, "--out", app, "--test", folder / "parts" / "test").code == 0
    return app, alone, remote


def assert_same(alone, remote):
    assert untimed(rows(alone)) == untimed(rows(remote))
    names = ["clients.csv", *["final/model.pt"] * (alone / "final" / "model.pt").exists()]
    for name in names:
        assert (alone / name).read_bytes() == (remote / name).read_bytes()


@pytest.mark.parametrize("method", METHODS)
def test_same_bytes(folder, federation, method):
    app, alone, remote = both(folder, method.replace(" ", ""), method)
    done = federation.fit("--config", app / "experiment.yaml", "--run_dir", remote)
    assert done.wait(120) == 0, last_line(folder)
    assert last_line(folder) == f"run: {remote}"
    assert_same(alone, remote)


def test_a_superlink_can_start_the_server_itself(tmp_path):
    folder = parts(tmp_path)
    with running(Federation(folder, clients=3, isolation="subprocess")) as federation:
        app, alone, remote = both(folder, "SCAFFOLD", "SCAFFOLD", "--rounds", "3")
        federation.run(app, remote)
        wait_until(lambda: is_over(remote), 120)
    assert_same(alone, remote)


def after_round(remote, moments):
    """Wait until another round is over, and then a random part of a second."""
    seen = len(rows(remote))
    wait_until(lambda: len(rows(remote)) > seen, 240)
    signal.sigtimedwait([], moments.random())


@pytest.mark.parametrize("kind", ["node", "server", "superlink"])
def test_kill_and_resume(folder, federation, kind):
    """Kill a process three times at random moments. Without a limit of time, ten times passed, too."""
    app, alone, remote = both(folder, kind, "SCAFFOLD", "--rounds", "12")
    fit = federation.fit("--config", app / "experiment.yaml", "--run_dir", remote)
    moments = random.Random(kind)
    for _ in range(3):
        after_round(remote, moments)
        if kind == "node":
            client = moments.randrange(3)
            federation.nodes[client].kill()
            federation.nodes[client].wait()
            federation.start_node(client)
        elif kind == "server":
            fit.kill()
            fit.wait()
            fit = federation.fit("--resume", remote)
        else:
            federation.superlink.kill()
            federation.superlink.wait()
            federation.start_superlink()
    assert fit.wait(300) == 0, last_line(folder)
    assert_same(alone, remote)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_checkpoint(folder, federation, number):
    app, alone, remote = both(folder, number.name, "SCAFFOLD", "--rounds", "12")
    fit = federation.fit("--config", app / "experiment.yaml", "--run_dir", remote)
    after_round(remote, random.Random(number))
    fit.send_signal(number)
    assert fit.wait(60) == 128 + number
    done = f"fl-lightning: stopped by {number.name} after round {len(rows(remote))} of 12; "
    assert last_line(folder) == f"{done}resume it with: fl-lightning fit --resume {remote}"
    assert federation.fit("--resume", remote).wait(120) == 0
    assert_same(alone, remote)


def test_a_run_that_is_stopped_in_flower_can_be_resumed(folder, federation):
    app, alone, remote = both(folder, "stop", "SCAFFOLD", "--rounds", "12")
    fit = federation.fit("--config", app / "experiment.yaml", "--run_dir", remote)
    after_round(remote, random.Random(0))
    runs = json.loads(federation.flwr("list", "federation", "--format", "json").stdout)["runs"]
    (run,) = (each["run-id"] for each in runs if each["status"].startswith("running"))
    assert federation.flwr("stop", run, "federation").returncode == 0
    assert fit.wait(60) in (1, 128 + signal.SIGINT)  # which depends on what asks the SuperLink first
    assert "fl-lightning fit --resume" in (folder / "fit.log").read_text()[-500:]
    assert federation.fit("--resume", remote).wait(120) == 0
    assert_same(alone, remote)


def test_a_node_that_is_away_for_three_rounds_is_dropped_and_then_back(folder, federation):
    engine = ("--engine", "FlowerEngine", "--engine.timeout", "5")
    app, _, remote = both(folder, "away", "FedAvg", "--rounds", "40", "--on_client_failure", "drop", engine=engine)
    fit = federation.fit("--config", app / "experiment.yaml", "--run_dir", remote)
    wait_until(lambda: rows(remote), 60)
    federation.nodes[1].kill()
    federation.nodes[1].wait()
    wait_until(lambda: failed(remote).count(1) == 3, 60)
    federation.start_node(1)
    wait_until(lambda: 1 in failed(remote) and failed(remote)[-1] == 0, 200)
    assert failed(remote)[0] == 0
    assert fit.poll() is None  # the run has not waited for it
    assert "client 1, round 3: no answer in 5 seconds (engine.timeout)" in (folder / "fit.log").read_text()
    fit.send_signal(signal.SIGINT)
    assert fit.wait(60) == 128 + signal.SIGINT


def failed(run_dir):
    """Return the number of failed clients of each round."""
    return [int(float(row["client/failed"])) for row in rows(run_dir)]


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
        assert "connected to" not in log.read_text()
        process = federation.nodes.pop(9)
        process.kill()
        process.wait()
