"""A client's own machine: what it reports, what it refuses, and the state that it keeps."""

import json
import re
import signal
import stat
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import yaml
from experiments import digits
from flower_grid import Held, flower  # noqa: F401

from fl_lightning.cli.commands.node import read_site
from fl_lightning.cli.flower_app import client_experiment
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.interrupt import Stopped, raise_on_signal
from fl_lightning.core.message import Message
from fl_lightning.core.task import Task
from fl_lightning.data.client_folders import write_client_folders
from fl_lightning.engines.flower_records import pack, pack_failure, pack_task, unpack
from fl_lightning.flower import connection
from fl_lightning.flower.client_states import ClientStates, StateMissing
from fl_lightning.flower.connection import Address, describe_answer, refusal
from fl_lightning.flower.node import Node, Site

PAGE = Path(__file__).parents[2] / "docs" / "deploy-reference.md"
RUN = "0123456789abcdef" * 2


# --- State -----------------------------------------------------------------------------------------------------------


def state(value):
    return {"head": {"w": torch.full((2,), float(value))}, "term": {"n": torch.tensor(value)}}


def test_the_state_of_the_last_three_rounds_is_kept_and_read_by_another_process(tmp_path):
    states = ClientStates(tmp_path / "run", 4, "digest")
    for round in (1, 3, 4, 9):
        states.write(round, state(round))
    again = ClientStates(tmp_path / "run", 4, "digest")
    assert again.read(-1) == {}
    for round in (3, 4, 9):
        assert again.read(round)["term"]["n"] == round
    with pytest.raises(StateMissing, match=r"round 1 .*: 3, 4, 9"):
        again.read(1)
    assert len([*(tmp_path / "run" / "clients").iterdir()]) == 3
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_a_round_that_is_trained_again_replaces_its_state_and_no_other(tmp_path):
    states = ClientStates(tmp_path / "run", 0, "digest")
    for round in (1, 2, 3):
        states.write(round, state(round))
    states.write(2, state(20))
    again = ClientStates(tmp_path / "run", 0, "digest")
    assert [int(again.read(round)["term"]["n"]) for round in (1, 2, 3)] == [1, 20, 3]
    again.write(4, state(4))
    assert again.read(3)["term"]["n"] == 3
    with pytest.raises(StateMissing):
        again.read(1)


def test_late_tasks_do_not_remove_the_state_that_they_continue_from(tmp_path):
    """A machine that was away trains the tasks of all rounds that it missed, whose answers the server does not use."""
    states = ClientStates(tmp_path / "run", 0, "digest")
    states.write(1, state(1))
    for round in (2, 3, 4, 5, 6):
        assert states.read(1)["term"]["n"] == 1
        states.write(round, state(round))
    states.read(6)
    states.write(7, state(7))
    again = ClientStates(tmp_path / "run", 0, "digest")
    assert [int(again.read(round)["term"]["n"]) for round in (1, 6, 7)] == [1, 6, 7]  # the server may go back to 5


def test_an_empty_state_is_a_state(tmp_path):
    states = ClientStates(tmp_path / "run", 0, "digest")
    states.write(1, {})
    states.write(2, state(2))
    assert states.read(1) == {}
    assert states.read(2)["term"]["n"] == 2


def test_a_damaged_state_and_another_experiment_are_refused(tmp_path):
    states = ClientStates(tmp_path / "run", 0, "digest")
    states.write(1, state(1))
    with pytest.raises(StateMissing, match="that of another experiment"):
        ClientStates(tmp_path / "run", 0, "other")
    (file,) = (tmp_path / "run" / "clients").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(StateMissing, match="after round 1 is damaged"):
        states.read(1)


# --- Messages --------------------------------------------------------------------------------------------------------

EXPERIMENT = {
    "model": {"class_path": "fl_lightning.models.MLP", "init_args": {"hidden": [8]}},
    "algorithm": "fl_lightning.FedAvg",
    "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
    "trainer": {"accelerator": "cpu"},
    "logger": None,
}


@pytest.fixture(scope="module")
def held():
    data = digits(4).build(0)
    return Held(data.data, data.shards[1].train, data.shards[1].test)


@pytest.fixture
def node(tmp_path, held, flower):  # noqa: F811
    return Node(Site(1, held), tmp_path / "state", client_experiment)


def experiment(node, **changes):
    described = [vars(node.description)] * 4
    remote = {"class_path": "fl_lightning.data.remote.RemoteClients", "init_args": {"clients": 4}}
    remote["init_args"]["described"] = described
    scenario = {"dataset": remote, "partition": "fl_lightning.data.natural_partitions.ByClient", "clients": 4}
    return yaml.safe_dump({**EXPERIMENT, "scenario": scenario, **changes})


def model(node):
    orchestrator = client_experiment(experiment(node), True)
    orchestrator.check()
    return {"model": dict(orchestrator.worker.template.backbone.state_dict())}


def ask(node, text=None, download=None, run=RUN, state_round=-1, fixed="", **task):
    message = Message.pack(model(node) if download is None else download)
    sent = Task(**{"round": 1, "client": 1, "download": message, "memory": {}, **task})
    values = {"run": run, "experiment": experiment(node) if text is None else text, "fixed": fixed}
    records = pack_task(sent, state_round, **values)
    return unpack(node.answer(records), 1e9)


def test_a_task_is_answered_with_weights_and_numbers_only(node):
    answer = ask(node, evaluate=True)
    assert {*answer.tensors} == {f"upload/model/{name}" for name in model(node)["model"]}
    assert answer.numbers["upload/n_samples"] == node.description.train
    assert answer.numbers["local/n"] == node.description.test
    assert "failure" not in answer.values


def test_the_description_has_counts_shapes_and_a_digest(node):
    values = unpack(node.answer(pack({}, {}, {"kind": "describe"})), 1e9).values
    known = {"kind", "client", "train", "test", "in_shape", "inputs", "outputs", "labels", "digest", "schema"}
    assert values.keys() == known | {"classes", "fl_lightning", "torch"}
    assert values["in_shape"] == [1, 8, 8]


REFUSED = {
    "another client": ({"client": 2}, "the task is for client 2, not for client 1"),
    "no state": ({"round": 5, "state_round": 4}, "the client's state after round 4 is not on its machine"),
    "another base": ({"fixed": "sha256:0"}, "model: the frozen part of the network is unlike the server's"),
    "run": ({"run": "../../home"}, "the run's id is not 32 hexadecimal digits"),
    "nan": ({"download": {"model": {"w": torch.tensor([float("nan")])}}}, "model/w contains NaN or Inf"),
    "other weights": ({"download": {"model": {"w": torch.zeros(1)}}}, "w"),
    "no round": ({"round": -1}, "the task has no valid round"),
    "rate": ({"lr_scale": float("nan")}, "lr_scale is NaN or Inf"),
    "negative rate": ({"lr_scale": -1.0}, "the task has no valid lr_scale"),
    "large": ({"download": {"model": {"w": torch.zeros(300_000)}}}, "the message is too large: 1.1 MB"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_task_is_refused_in_one_line(node, case):
    options, message = REFUSED[case]
    node.site.max_megabytes = 1
    failure = ask(node, **options).values["failure"]
    assert message in failure
    assert "\n" not in failure


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"class_path": "os.system"}}, "os.system is not allowed"),
        ({"model": {"class_path": "subprocess.Popen", "init_args": {"args": "true"}}}, "subprocess.Popen is not"),
        ({"logger": {"class_path": "fl_lightning.WandbRoundLogger"}}, "not for clients: logger"),
        ({"run_dir": "/tmp/x"}, "not for clients: run_dir"),
        ({"scenario": {"dataset": "Digits", "partition": "IID", "clients": 2}}, "needs RemoteClients"),
    ],
)
def test_the_server_cannot_name_code_files_or_other_machines(node, changes, message):
    assert message in ask(node, experiment(node, **changes)).values["failure"]


def test_an_allowed_experiment_may_name_other_classes(node, monkeypatch):
    from hashlib import sha256

    text = experiment(node, algorithm={"class_path": "flower_method.Mine"})
    digest, refused = sha256(text.encode()).hexdigest(), ask(node, text).values["failure"]
    assert "flower_method.Mine is not allowed" in refused
    assert f" {digest} " in refused
    node.site.allow.append(digest)
    assert "No module named 'flower_method'" in ask(node, text).values["failure"]


def test_another_experiment_under_the_same_run_is_refused(node):
    assert "failure" not in ask(node).values
    answer = ask(node, experiment(node, batch_size=7))
    assert "another experiment" in answer.values["failure"]


def test_data_unlike_the_federations_are_refused(node):
    text = experiment(node).replace("outputs: 10", "outputs: 12")
    expected = "the data of client 1 are unlike the federation's: outputs 10 instead of 12"
    assert ask(node, text).values["failure"] == expected


METHODS = "fl_lightning.algorithms."


@pytest.mark.parametrize(
    ("sends", "algorithm", "message"),
    [
        (["model"], "FedSKC", "FedSKC sends structural, but this machine may only send model"),
        ([], "FedAvg", "FedAvg sends model, but this machine may only send nothing"),
        (["model"], "SCAFFOLD", "SCAFFOLD sends control, but this machine may only send model"),  # its `upload` adds it
        (["model"], "FedNova", "FedNova sends effective_steps, but this machine may only send model"),  # a number
        (["model"], "FedFomo", "FedFomo sends affinity, uploaded, but this machine may only send model"),  # for peers
    ],
)
def test_what_the_site_does_not_permit_is_not_sent(node, sends, algorithm, message):
    node.site.sends = sends
    text = experiment(node, algorithm=METHODS + algorithm)
    fix = "Permit it in the file of this machine, or use another method"
    answer = ask(node, text)
    assert answer.values["failure"] == f"sends: {message}. {fix}"
    assert not answer.tensors
    assert not [*node.folder.glob("*/clients/*")]  # the round did not happen
    node.site.sends = None
    assert "failure" not in ask(node, text).values


def test_what_the_site_permits_is_sent(node):
    node.site.sends = ["model", "structural"]
    answer = ask(node, experiment(node, algorithm=METHODS + "FedSKC"))
    assert {name.split("/")[1] for name in answer.tensors} == {"model", "structural"}
    assert {"upload/n_samples", "losses/loss"} <= answer.numbers.keys()  # always sent


@pytest.mark.parametrize("method", ["FedSKC", "FedProto", "FedDistill", "FedFomo"])
def test_the_page_has_the_words_for_what_a_method_sends(node, method):
    rows = re.findall(r"^\| (.*?) \| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    words = next(re.findall(r"`(\w+)`", words) for names, words in rows if method in names.split(", "))
    node.site.sends = ["model", *words]
    assert "failure" not in ask(node, experiment(node, algorithm=METHODS + method)).values
    node.site.sends = ["model"]
    assert (
        f"sends: {method} sends {', '.join(sorted(words))}, but"
        in ask(node, experiment(node, algorithm=METHODS + method), run="f" * 32).values["failure"]
    )


def test_a_composed_method_is_checked_before_it_trains(node, monkeypatch):
    node.site.sends = ["model"]
    monkeypatch.setattr("fl_lightning.engines.worker.Worker.run", None)
    aggregator = {"class_path": METHODS + "GlobalDiscrepancy"}
    text = experiment(node, algorithm={"class_path": METHODS + "FedAvg", "init_args": {"aggregator": aggregator}})
    assert re.search("sends: FedAvg .*structural, .* model", ask(node, text).values["failure"])


def test_an_unknown_or_damaged_message_is_refused(node):
    assert "unknown kind: hello" in unpack(node.answer(pack({}, {}, {"kind": "hello"})), 1e9).values["failure"]
    records = pack({}, {}, {})
    del records["tensors"]
    assert "the message is damaged" in unpack(node.answer(records), 1e9).values["failure"]


# --- The command -----------------------------------------------------------------------------------------------------


def test_exported_folders_are_what_the_command_reads(tmp_path, monkeypatch):
    data = digits(3).build(0)
    write_client_folders(tmp_path, data)
    for client, shard in enumerate(data.shards):
        folder = tmp_path / f"client-{client}"
        monkeypatch.chdir(folder)
        site = read_site(folder / "client.yaml")
        loaded = site.dataset.load()
        assert site.client == client
        assert torch.equal(loaded.prepare(loaded.x_train), data.data.prepare(data.data.x_train[shard.train]))
        assert torch.equal(loaded.y_test, data.data.y_train[shard.test])
    assert {path.name for path in (tmp_path / "test").iterdir()} >= {"x_test.npy", "y_test.npy"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("client: -1\ndataset: Digits\n", "client: -1 is below 0"),
        ("client: 0\ndataset: Digits\nlocal_test: 2\n", r"local_test: 2.0 is outside \[0, 1\)"),
        ("client: 0\n", "dataset"),
        ("client: 0\ndataset: Digits\nport: 3\n", "port"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "client.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_site(tmp_path / "client.yaml")
    with pytest.raises(ConfigError, match=r"^site: .* not found"):
        read_site(tmp_path / "other.yaml")


def test_only_this_machine_is_reached_without_encryption(tmp_path):
    pytest.importorskip("flwr")
    assert Address("127.0.0.1:8000").read_certificate() is None
    with pytest.raises(ConfigError, match=r"^--superlink: example.org:8000 .*encryption"):
        Address("example.org:8000")
    (tmp_path / "key").write_text("no key")
    with pytest.raises(ConfigError, match=r"^--key: .*/key is no OpenSSH private key"):
        Address("localhost:8000", key=tmp_path / "key").read_key()
    with pytest.raises(ConfigError, match=r"^--certificate: .* cannot be read: No such file"):
        Address("example.org:8000", tmp_path / "ca.crt").read_certificate()


def test_the_list_of_rounds_is_plain_json(tmp_path):
    ClientStates(tmp_path / "run", 2, "digest").write(3, state(1))
    content = json.loads((tmp_path / "run" / "rounds.json").read_text())
    assert content["client"] == 2
    assert [*content["rounds"]] == ["3"]


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("Failed to activate SuperNode.", "Register the key of this machine on the server"),
        ("Hostname mismatch, certificate is not valid for 'localhost'", "Use the address for which the server's cert"),
        ("certificate verify failed", "Give the server's ca.crt as --certificate"),
    ],
)
def test_a_refusal_of_the_superlink_says_what_to_do(message, fix):
    assert str(refusal(message)).startswith(f"--superlink: {message.rstrip('.')}. {fix}")


def test_the_line_about_an_answer_says_whether_it_is_a_failure(node):
    assert describe_answer("train", pack_failure("no such round"), 1.5) == "failed: train: no such round"
    assert (
        describe_answer("query", node.answer(pack({}, {}, {"kind": "describe"})), 1.5) == "answered: query, in 1.50 s"
    )


def test_only_the_user_can_read_the_folder_of_the_states(node):
    ask(node)
    assert [path.stat().st_mode & 0o77 for path in (node.folder, *node.folder.iterdir())] == [0, 0]


def test_a_repeated_refusal_is_reported_once(monkeypatch):
    attempts, lines = ["not registered", "not registered", None, "not registered"], []

    @contextmanager
    def open_connection(*_, refuse):
        if not attempts:
            raise KeyboardInterrupt
        if reason := attempts.pop(0):
            raise refusal(reason)
        with suppress(ConnectionError):  # as Flower's does
            yield (7,)

    def lose(*_):
        raise ConnectionError

    monkeypatch.setattr(connection, "RETRY", 0.0)
    monkeypatch.setattr(connection, "open_connection", open_connection)
    monkeypatch.setattr(connection, "answer_next", lose)
    with pytest.raises(KeyboardInterrupt):
        connection.serve(Address("127.0.0.1:1"), lambda records: records, lines.append)
    refused = f"{refusal('not registered')}; trying again"
    connected = ["connected to 127.0.0.1:1 as machine 7", "the connection was lost; trying again"]
    assert lines == [refused, *connected, refused]


def test_a_line_is_reported_again_only_after_another_one():
    lines = []
    report = connection.without_repetitions(lines.append)
    for line in "aabba":
        report(line)
    assert "".join(lines) == "aba"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_only_its_context(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(Stopped), raise_on_signal(number):
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
