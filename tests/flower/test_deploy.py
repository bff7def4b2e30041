"""`fl-lightning deploy` and `partition --export`, and what docs/deploy.md says about messages."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from commands import run
from experiments import digits

from fl_lightning.core.message import Message
from fl_lightning.core.task import Result, Score, Task
from fl_lightning.data.remote import describe
from fl_lightning.engines.flower import describe_client
from fl_lightning.engines.flower_records import pack_failure, pack_result, pack_task

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
CONFIG = ("--config", "digits_fedavg.yaml", "--scenario.clients", "3", "--logger", "null")


def test_deploy_writes_an_app_and_the_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("deploy", *CONFIG, "--test", "parts/test")
    assert done.code == 0
    experiment = yaml.safe_load((tmp_path / "app" / "experiment.yaml").read_text())
    assert experiment["engine"] == "fl_lightning.engines.flower.FlowerEngine"
    remote = experiment["scenario"]["dataset"]
    assert remote["init_args"]["clients"] == 3
    assert remote["init_args"]["test"]["init_args"]["path"] == str(tmp_path / "parts" / "test")
    assert f'run-dir="{tmp_path}/run"' in done.out
    assert "flwr supernode register client.pub federation" in done.out
    compile((tmp_path / "app" / "server_app.py").read_text(), "server_app.py", "exec")
    again = run("deploy", *CONFIG)
    assert again.code == 2
    assert "error: --out: app exists already. Choose another folder" in again.err


def test_the_certificates_are_valid_for_the_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("deploy", *CONFIG)
    subprocess.run(["sh", "app/certificates.sh", "fl.example.org"], check=True, capture_output=True)
    verified = subprocess.run(
        ["openssl", "verify", "-CAfile", "ca.crt", "-verify_hostname", "fl.example.org", "server.pem"], check=False
    )
    assert verified.returncode == 0
    assert (tmp_path / "ca.key").stat().st_mode & 0o77 == 0


def test_a_run_outside_of_flower_names_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("deploy", *CONFIG)
    done = run("fit", "--config", "app/experiment.yaml")
    assert done.code == 2
    assert "the data are on the clients' machines. Run it in Flower, with the app" in done.err


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
    task = pack_task(Task(1, 0, Message(), {}), -1, run="", experiment="")
    messages = {
        "description": {*describe_client(0, described)["values"]},
        "task": {*task["values"]},
        "result": {name.partition("/")[0] for name in pack_result(result, "offer")["numbers"]} | {"public"},
        "failure": {*pack_failure("full")["values"]},
    }
    rows = dict(re.findall(r"^\| (\w+), \w+ a client \| (.*?) \|$", PAGE.read_text(), re.MULTILINE))
    for kind, names in messages.items():
        assert {*re.findall(r"`(\w+)`", rows[kind])} == names - {"kind", "names"}, kind
