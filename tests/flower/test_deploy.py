"""`fl-lightning deploy` and `partition --export`, and what docs/deploy-reference.md says about messages."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from commands import run
from experiments import digits

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message
from fl_lightning.core.task import Result, Score, Task
from fl_lightning.data import IID, ByClient, RemoteClients, Scenario
from fl_lightning.data.remote import DataDescription, describe
from fl_lightning.engines.flower import describe_client
from fl_lightning.engines.flower_records import pack_failure, pack_result, pack_task

PAGE = Path(__file__).parents[2] / "docs" / "deploy-reference.md"
CONFIG = ("--config", "digits_fedavg.yaml", "--scenario.clients", "3", "--logger", "null")


@pytest.mark.thorough
def test_deploy_writes_an_app_and_the_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = run("deploy", *CONFIG, "--test", "parts/test")
    assert "error: --test: parts/test " in refused.err
    (tmp_path / "parts" / "test").mkdir(parents=True)
    done = run("deploy", *CONFIG, "--test", "parts/test")
    assert done.code == 0
    experiment = yaml.safe_load((tmp_path / "app" / "experiment.yaml").read_text())
    assert experiment["engine"]["class_path"] == "fl_lightning.engines.flower.FlowerEngine"
    assert experiment["engine"]["init_args"]["superlink"] == "federation"
    remote = experiment["scenario"]["dataset"]
    assert remote["init_args"]["clients"] == 3
    assert remote["init_args"]["test"]["init_args"]["path"] == str(tmp_path / "parts" / "test")
    assert "fl-lightning fit --config app/experiment.yaml" in done.out
    assert "flwr supernode register client.pub federation" in done.out
    compile((tmp_path / "app" / "server_app.py").read_text(), "server_app.py", "exec")
    again = run("deploy", *CONFIG)
    assert again.code == 2
    assert "error: --out: app exists already" in again.err


def test_deploy_keeps_the_options_of_the_engine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("deploy", *CONFIG, "--engine", "FlowerEngine", "--engine.timeout", "5", "--engine.superlink", "mine")
    options = yaml.safe_load((tmp_path / "app" / "experiment.yaml").read_text())["engine"]["init_args"]
    assert (options["timeout"], options["superlink"]) == (5, "mine")
    assert "[superlink.mine]" in done.out


def test_the_certificates_are_valid_for_the_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("deploy", *CONFIG)
    subprocess.run(["sh", "app/certificates.sh", "fl.example.org"], check=True, capture_output=True)
    verified = subprocess.run(
        ["openssl", "verify", "-CAfile", "ca.crt", "-verify_hostname", "fl.example.org", "server.pem"], check=False
    )
    assert verified.returncode == 0
    assert (tmp_path / "ca.key").stat().st_mode & 0o77 == 0


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--engine.superlink", "null"), "engine.superlink: which SuperLink reaches the clients? Name its connection"),
        (("--engine.superlink", "other"), "SuperLink connection 'other' not found in the Flower configuration file"),
        ((), "engine.superlink: Connection to the SuperLink is unavailable"),
        (("--scenario.dataset", "Digits"), "engine: FlowerEngine needs scenario.dataset RemoteClients"),
        (("--engine", "sequential"), "scenario.dataset: the data are on the clients' machines. Use fl-lightning fit"),
        (("--fast",), "scenario.dataset: the data are on the clients' machines. Use fl-lightning fit"),
    ],
)
def test_a_run_that_reaches_no_clients_is_refused(tmp_path, monkeypatch, words, message):
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('[superlink.federation]\naddress = "127.0.0.1:1"\ninsecure = true\n')
    run("deploy", *CONFIG)
    done = run("fit", "--config", "app/experiment.yaml", "--run_dir", "remote", *words)
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "remote").exists()


@pytest.mark.parametrize("key", ["held_out_clients", "validation_share"])
def test_what_remote_clients_do_not_support_is_refused(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    assert f"error: scenario.{key}: " in run("deploy", *CONFIG, f"--scenario.{key}", "0.34").err
    assert not (tmp_path / "app").exists()


def test_export_needs_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "--export: to which folder? Give --out" in run("partition", *CONFIG, "--export").err
    assert run("partition", *CONFIG, "--export", "--out", "parts").code == 0
    assert {path.name for path in (tmp_path / "parts").iterdir()} >= {"client-0", "client-1", "client-2", "test"}


def test_the_page_names_everything_that_crosses():
    pytest.importorskip("flwr")
    data = digits(3).build(0)
    score = Score(1, {"acc": 1.0})
    message = Message.pack({"model": {}}, n_samples=1)
    result = Result(0, 0, message, {"offer": {}}, {"loss": 1.0}, {"lr": 0.1}, score)
    described = describe(data.data, data.shards[0], "sha256:0")
    task = pack_task(Task(1, 0, Message(), {}), -1, run="", experiment="", fixed="")
    messages = {
        "description": {*describe_client(0, described)["values"]},
        "task": {*task["values"]},
        "result": {name.partition("/")[0] for name in pack_result(result, "offer")["numbers"]} | {"public"},
        "failure": {*pack_failure("full")["values"]},
    }
    rows = dict(re.findall(r"^\| (\w+), \w+ a client \| (.*?) \|$", PAGE.read_text(), re.MULTILINE))
    for kind, names in messages.items():
        assert {*re.findall(r"`(\w+)`", rows[kind])} == names - {"kind", "names"}, kind


DESCRIBED = DataDescription(20, 5, [4], "float32", 3, "classes", "sha256:0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": IID()}, "scenario.partition: the data are on the clients' machines, already split. Set it to B"),
        ({"clients": 3}, "scenario.clients: the data are on the clients' machines, already split. Set it to 2"),
        *[
            ({key: value}, f"scenario.{key}: the data are on the clients' machines, already split. Leave it out")
            for key, value in {
                "local_test": 0.25,
                "long_tail": 10,
                "train_samples": 30,
                "validation_share": 0.2,
            }.items()
        ],
        ({"held_out_clients": 1}, "scenario.held_out_clients: the data are on"),
    ],
)
def test_options_that_split_data_are_refused(options, message):
    remote = RemoteClients(2, [DESCRIBED] * 2)
    given = {"partition": ByClient(), "clients": 2}
    assert len(Scenario(remote, **given).build(0).shards) == 2
    with pytest.raises(ConfigError, match=f"^{message}"):
        Scenario(remote, **given | options)
