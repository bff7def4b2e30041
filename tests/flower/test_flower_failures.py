"""Machines that are restarted, away, or send what they should not; servers that are killed and resumed."""

import itertools
import math
import re
import signal
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from experiments import experiment, same_bytes, untimed
from flower_grid import flower, remote_experiment  # noqa: F401
from methods import METHODS

from fl_lightning.algorithms import FedRep
from fl_lightning.cli import flower_app
from fl_lightning.core.errors import ClientFailure, ConfigError, Interrupted
from fl_lightning.core.interrupt import Stopped
from fl_lightning.core.task import Result
from fl_lightning.core.trusted_imports import Untrusted, untrusted
from fl_lightning.engines import flower as engine_module
from fl_lightning.engines.flower import ClientLink, FlowerEngine
from fl_lightning.engines.flower_adapter import limit_answers
from fl_lightning.engines.flower_records import MEGABYTE, describe_excess, pack, unpack
from fl_lightning.flower.node import Node

pytestmark = pytest.mark.usefixtures("flower", "one_thread")

OPTIONS = {"rounds": 5, "trainer": {"accelerator": "cpu", "max_epochs": 2}}
"""A run of FedRep, whose clients keep their heads."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = experiment(tmp_path_factory.mktemp("alone"), FedRep(), **OPTIONS)
    run.fit()
    return run


def remote(tmp_path, alone, run="remote", **options):
    return remote_experiment(tmp_path / run, alone, FedRep, folder=tmp_path, **OPTIONS | options)


def assert_same(alone, run):
    assert all(same_bytes(alone.state[part], run.state[part]) for part in alone.state)
    assert untimed(alone.csv.rows) == untimed(run.csv.rows)


def restarted(node):
    return Node(node.site, node.folder, node.build)


# --- The same bytes --------------------------------------------------------------------------------------------------


def test_a_message_is_sent_again_if_the_superlink_is_restarted_while_it_is_sent(tmp_path, alone, monkeypatch):
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

    run, grid = remote(tmp_path, alone)
    push, count = grid.push_messages, itertools.count()

    def interrupted(messages):
        if next(count) % 3 == 1:
            raise ObjectPushError("object", 1, "session")
        return push(messages)

    monkeypatch.setattr(grid, "push_messages", interrupted)
    run.fit()
    assert_same(alone, run)


def test_a_run_that_cannot_send_can_be_stopped(tmp_path, alone, monkeypatch):
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

    def interrupted(messages):
        signal.raise_signal(signal.SIGTERM)
        raise ObjectPushError("object", 1, "session")

    run, grid = remote(tmp_path, alone)
    monkeypatch.setattr(grid, "push_messages", interrupted)
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        run.fit()


def test_a_signal_ends_the_wait_for_machines_and_the_run_on_the_superlink(tmp_path, alone, monkeypatch):
    ended = []

    @contextmanager
    def start_run(superlink):
        try:
            yield None
        except BaseException as error:
            ended.append(error)
            raise

    run, _ = remote(tmp_path, alone)
    run.engine.superlink = "federation"
    monkeypatch.setattr(flower_app, "start_run", start_run)
    monkeypatch.setattr(flower_app, "connect_clients", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped), flower_app.connected_clients(run, {}, resume=False):
        pass
    assert isinstance(ended[0], Stopped)


def test_a_machine_that_is_restarted_after_every_answer_continues_from_its_state(tmp_path, alone):
    run, grid = remote(tmp_path, alone)

    def restart(machine, records):
        grid.nodes[machine] = restarted(grid.nodes[machine])
        return records

    grid.change = restart
    run.fit()
    assert_same(alone, run)


def test_a_machine_that_lost_its_task_gets_it_again(tmp_path, alone):
    run, grid = remote(tmp_path, alone)
    grid.lost = {100, 102, 104}
    run.fit()
    assert_same(alone, run)
    assert grid.kinds.count("train") >= 5 * 4 + len({100, 102, 104} - grid.lost) > 5 * 4


@pytest.mark.thorough
def test_a_lost_task_is_sent_again_once_though_its_answer_takes_several_looks(tmp_path, alone, monkeypatch):
    run, grid = remote(tmp_path, alone, rounds=1, clients_per_round=6)
    pull, ask, looks = grid.pull_messages, run.engine.link.ask, Counter()

    def pull_late(names):
        looks.update(names)
        return pull(names) if looks[names[0]] > 3 else []

    def ask_once(_):
        monkeypatch.setattr(engine_module, "ASK", math.inf)
        ask({2})

    grid.lost, grid.pull_messages = {102}, pull_late
    monkeypatch.setattr(run.engine.link, "ask", ask_once)
    run.fit()
    assert grid.kinds.count("train") == 6 + 1


def test_tasks_that_are_delivered_again_change_nothing(tmp_path, alone):
    """Each task is delivered twice, and then the task of the client's round before: its state stays that of the run."""
    run, grid = remote(tmp_path, alone)
    replays = []

    def replaying(answer):
        before = []

        def answer_all(records):
            first = answer(records)
            if dict(records["values"])["kind"] == "task":
                again = answer(records)
                assert first["tensors"].object_id == again["tensors"].object_id
                replays.extend(bool(dict(answer(old)["values"]).get("failure")) for old in before[-1:])
                before.append(records)
            return first

        return answer_all

    for node in grid.nodes.values():
        node.answer = replaying(node.answer)
    run.fit()
    assert_same(alone, run)
    assert replays
    assert not any(replays)


@pytest.mark.thorough
@pytest.mark.parametrize("reason", ["the node is away", None])
def test_a_machine_that_flower_does_not_reach_gets_its_task_later(tmp_path, alone, reason):
    run, grid = remote(tmp_path, alone)
    grid.unreachable, grid.reason = {100, 101, 102, 103}, reason
    with pytest.warns(UserWarning, match=r"^client \d, round \d: its machine is away") as shown:
        run.fit()
    assert {str(one.message).partition(",")[0] for one in shown} == {f"client {number}" for number in range(4)}
    assert_same(alone, run)
    assert not grid.unreachable


def test_a_round_that_begins_while_machines_are_away_says_so(tmp_path, alone):
    run, _ = remote(tmp_path, alone)
    run.engine.link.machines.clear()
    with pytest.warns(UserWarning, match=r"^client \d, round 1: its machine is away") as shown:
        run.fit()
    assert len(shown) == 4
    assert_same(alone, run)


@pytest.mark.thorough
def test_a_machine_with_a_new_id_is_found(tmp_path, alone):
    run, grid = remote(tmp_path, alone)

    def move(machine, records):
        if machine < 200:
            grid.nodes[machine + 100] = restarted(grid.nodes[machine])
            grid.away.add(machine)
        return records

    grid.change = move
    run.fit()
    assert_same(alone, run)


@pytest.mark.thorough
def test_a_machine_that_has_signed_off_costs_the_timeout_once(tmp_path, alone, monkeypatch):
    monkeypatch.setattr(engine_module, "RETURN", 1.5)
    engine = FlowerEngine(timeout=3)
    run, grid = remote(tmp_path, alone, engine=engine, clients_per_round=6, on_client_failure="drop")
    log = run.record.log
    run.record.log = lambda metrics: (log(metrics), grid.away.update({103} if run.round < 4 else ()))
    grid.change = lambda machine, records: (grid.away.discard(103) if run.round == 3 else None, records)[1]
    with pytest.warns(UserWarning, match="client 3") as shown:
        run.fit()
    reasons = [str(one.message).partition(": ")[2] for one in shown]
    first, second = "no answer in 3 seconds (engine.timeout)", "no answer in 1.5 seconds (its machine has signed off)"
    assert reasons == [f"{first}; dropped from this round", f"{second}; dropped from this round"]
    assert [row["client/failed"] for row in run.csv.rows] == [0, 1, 1, 0, 0]


class Killed(BaseException):
    pass


@pytest.mark.thorough
@pytest.mark.parametrize("rounds_back", [0, 1])
def test_a_server_that_is_killed_resumes(tmp_path, alone, rounds_back):
    run, grid = remote(tmp_path, alone)
    answers = []

    def kill(machine, records):
        answers.append(machine)
        if len(answers) == 6 + 4 * 2 + 2:  # descriptions, two rounds and a half
            raise Killed
        return records

    grid.change = kill
    with pytest.raises(Killed):
        run.fit()
    folders = sorted((tmp_path / "remote" / "checkpoints").iterdir())
    for folder in folders[len(folders) - rounds_back :]:
        (folder / "state.pt").unlink()
    run, grid = remote(tmp_path, alone, grid=grid)
    with pytest.warns(UserWarning, match="state.pt") if rounds_back else nullcontext():
        run.fit(resume=True)
    assert_same(alone, run)


def test_the_state_of_the_engine_is_restored():
    state = {"run": "0a", "trained": {0: [3, 4], 12: [1]}}
    engine = FlowerEngine()
    engine.load_state_dict(state)
    assert engine.state_dict() == state


@pytest.mark.thorough
def test_a_failed_round_does_not_change_the_state_from_which_a_client_continues(tmp_path):
    """A client trains in round 2, but the server does not use its upload: it continues from its state of round 1."""
    options = {"clients_per_round": 6, "on_client_failure": "drop", "rounds": 3}
    simulated = experiment(tmp_path / "alone", FedRep(), **OPTIONS | options)
    real = simulated.engine.run

    def run_and_fail(worker, tasks, done):
        def receive(result):
            failing = result.client == 1 and simulated.round == 1
            done(failed(result, simulated.round + 1) if failing else result)

        real(worker, tasks, receive)

    simulated.engine.run = run_and_fail
    with pytest.warns(UserWarning, match="client 1, round 2"):
        simulated.fit()
    run, grid = remote(tmp_path, simulated, **options)
    trained = []

    def spoil(machine, records):
        if machine == 101:
            trained.append(machine)
        return with_tensors(records, nan) if machine == 101 and len(trained) == 2 else records

    grid.change = spoil
    with pytest.warns(UserWarning, match="client 1, round 2: upload/model/.* contains NaN"):
        run.fit()
    assert_same(simulated, run)


def failed(result, round):
    return Result(result.client, result.download_bytes, failure=ClientFailure(result.client, round, "failed"))


@pytest.mark.thorough
def test_a_machine_that_is_away_for_three_rounds_is_dropped_and_then_back(tmp_path, alone):
    engine = FlowerEngine(timeout=2)
    options = {"engine": engine, "clients_per_round": 6, "on_client_failure": "drop"}
    run, grid = remote(tmp_path, alone, **options)
    failures = []

    def on_round_end(metrics):
        failures.append(metrics["client/failed"])
        grid.away = {103} if run.round in (1, 2, 3) else set()

    log = run.record.log
    run.record.log = lambda metrics: (on_round_end(metrics), log(metrics))
    with pytest.warns(UserWarning, match="client 3") as shown:
        run.fit()
    reason = "client 3, round {}: no answer in 2 seconds ({}); dropped from this round"
    off = "its machine has signed off"
    expected = [reason.format(2, "engine.timeout"), reason.format(3, off), reason.format(4, off)]
    assert [str(one.message) for one in shown] == expected
    assert failures == [0, 1, 1, 1, 0]


# --- What is refused -------------------------------------------------------------------------------------------------


def with_tensors(records, change):
    tensors, numbers, values = unpack(records, 1e9)
    return pack(change(tensors), numbers, values)


def first_of(tensors):
    return next(name for name in tensors if name.startswith("upload/model/"))


def nan(tensors):
    name = first_of(tensors)
    return {**tensors, name: torch.full_like(tensors[name], torch.nan)}


def shape(tensors):
    name = first_of(tensors)
    return {**tensors, name: tensors[name][:1]}


def dtype(tensors):
    name = first_of(tensors)
    return {**tensors, name: tensors[name].double()}


def missing(tensors):
    return {name: value for name, value in tensors.items() if name != first_of(tensors)}


def more(tensors):
    return {**tensors, "upload/model/more": torch.zeros(1)}


def large(tensors):
    return {**tensors, "upload/more/x": torch.zeros(300_000)}


def heavier(records):
    tensors, numbers, values = unpack(records, 1e9)
    return pack(tensors, {**numbers, "upload/n_samples": 10**9}, values)


def with_numbers(**changes):
    """Return a function that changes numbers of an answer; `__` in a name stands for a slash."""

    def change(records):
        tensors, numbers, values = unpack(records, 1e9)
        return pack(tensors, numbers | {name.replace("__", "/"): value for name, value in changes.items()}, values)

    return change


def is_result(records):
    return dict(records["values"]).get("kind") != "description"


def damaged(records):
    tensors, numbers, values = unpack(records, 1e9)
    records = pack(tensors, numbers, values)
    del records["numbers"]
    return records


def another(records):
    return pack({}, {}, {"kind": "hello"})


def error(records):
    return pack({}, {}, {"failure": "the disk\nis full"})


nan_ = float("nan")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda records: with_tensors(records, nan), "contains NaN or Inf"),
        (lambda records: with_tensors(records, shape), "of torch.float32 instead of"),
        (lambda records: with_tensors(records, dtype), "of torch.float64 instead of"),
        (lambda records: with_tensors(records, missing), "other entries than the network: encoder"),
        (lambda records: with_tensors(records, more), "other entries than the network: more"),
        (lambda records: with_tensors(records, large), r"too large: 1.1 MB are above 1.0 MB \(max_megabytes\)"),
        (heavier, "another number of samples than the client announced: 1000000000 instead of"),
        (with_numbers(local__n=nan_), "local/n is NaN or Inf"),
        (with_numbers(local__n=float("inf")), "local/n is NaN or Inf"),
        (with_numbers(local__n=0), "metrics of 0 test samples instead of"),
        (with_numbers(local__n=-5), "metrics of -5 test samples instead of"),
        (with_numbers(local__n=10**9), "metrics of 1000000000 test samples instead of"),
        (with_numbers(losses__loss=nan_), "losses/loss is NaN or Inf"),
        (with_numbers(local__values__acc=99.0), r"the answer's acc is 99, outside \[0, 1\]"),
        (with_numbers(logged__acc=0.5), "unknown logged metric, 'acc'. List it in engine.logged"),
        (with_numbers(**{"losses__=1+1\n\x1b[2J": 0.5}), "unknown training loss, "),
        (with_numbers(local__values__global__acc=0.5), "unknown metric, 'global/acc'"),
        (with_numbers(global__acc=0.5), "more than that of the task, such as global/acc"),
        (damaged, r"the message is damaged \(KeyError"),
        (another, "the answer is not that of the task"),
        (error, "the disk is full"),
    ],
)
def test_a_bad_answer_is_one_line_and_the_run_goes_on(tmp_path, alone, change, message):
    options = {"engine": FlowerEngine(max_megabytes=1), "rounds": 1, "clients_per_round": 6}
    run, grid = remote(tmp_path, alone, on_client_failure="drop", **options)
    grid.change = lambda machine, records: change(records) if machine == 102 and is_result(records) else records
    with pytest.warns(UserWarning, match=f"client 2, round 1: .*{message}") as shown:
        run.fit()
    assert run.csv.rows[-1]["client/failed"] == 1
    assert all(str(one.message).isprintable() for one in shown)
    names = untimed(run.csv.rows)[0].keys()
    alone_names = untimed(alone.csv.rows)[0].keys()
    assert {name for name in names if not name.startswith("client_")} - {"client/failed"} == {*alone_names}


def entries(prefix, value):
    """Return a function that changes the first tensor with this prefix: `value` returns it, or None to remove it."""

    def change(records):
        tensors, numbers, values = unpack(records, 1e9)
        name = next((name for name in tensors if name.startswith(prefix)), None)
        if name is None:  # as in answers before round 1
            return records
        changed = value(tensors.pop(name))
        return pack(tensors | ({name: changed} if changed is not None else {}), numbers, values)

    return change


def without_numbers(*names):
    def change(records):
        tensors, numbers, values = unpack(records, 1e9)
        return pack(tensors, {name: value for name, value in numbers.items() if name not in names}, values)

    return change


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("SCAFFOLD", entries("upload/control/", lambda c: c[:1]), "the upload's control/.* is .* instead of"),
        ("FedProto", entries("upload/prototypes/", lambda _: None), "the upload's prototypes/.* is missing"),
        ("SCAFFOLD", entries("upload/control/", lambda c: c.double()), "is .* of torch.float64 instead of"),
        ("SCAFFOLD", entries("upload/control/", lambda c: c.mean()), r"is \(\) of torch.float32 instead of"),
        ("FedNova", without_numbers("upload/effective_steps"), "the upload's effective_steps is missing"),
        ("IFCA", with_numbers(upload__cluster=0.5), "the upload's cluster is float instead of int"),
        ("FedSKC", entries("upload/structural/", lambda _: None), "the upload's structural/.* is missing"),
        ("FedAMP", entries("public/", lambda _: None), "the public state's .* is missing"),
        ("FedKD", entries("upload/factors/", lambda factor: factor[:1]), "RuntimeError|ValueError"),
        ("FedKD", entries("upload/factors/", lambda _: None), "KeyError"),
        ("FedKD", entries("upload/model/", lambda _: None), "KeyError"),
        ("FedFomo", entries("upload/affinity/worth", lambda _: None), "KeyError"),
        ("CriticalFL", entries("upload/model/", lambda value: value[:0]), "Error"),
        ("PeerCriticalFL", entries("upload/model/", lambda value: value.flatten()[:0]), "instead of"),
        ("PeerCriticalFL", entries("public/", lambda value: value.flatten()[:0]), "Error"),
        ("FLoRA with ranks", entries("upload/model/", lambda value: value[:1]), "Error"),
        ("FLoRA with ranks", entries("upload/model/", lambda _: None), "KeyError"),
        ("FlexLoRA with ranks", entries("upload/model/", lambda value: value[:1]), "Error"),
        ("FlexLoRA with ranks", entries("upload/model/", lambda _: None), "KeyError"),
    ],
)
def test_wrong_content_of_a_method_is_the_failure_of_its_client(tmp_path, method, change, message):
    make, own = METHODS[method]
    options = {"rounds": 1, "clients_per_round": 6, **own}
    alone = experiment(tmp_path / "alone", make(), **options)
    alone.fit()
    run, grid = remote_experiment(
        tmp_path / "remote", alone, make, folder=tmp_path, on_client_failure="drop", **options
    )
    grid.change = lambda machine, records: change(records) if machine == 102 and is_result(records) else records
    with pytest.warns(UserWarning, match=f"client 2, round [01]: .*{message}"):  # peers' first answers have round 0
        run.fit()
    assert run.csv.rows[-1]["client/failed"] == 1


def test_a_message_that_is_too_large_is_not_received(tmp_path, alone):
    """Flower's error in place of the message fails the client, which does not get its task again."""
    run, grid = remote(tmp_path, alone, on_client_failure="drop", rounds=1, clients_per_round=6)
    grid.unreachable, grid.reason = {102}, f"no object: {describe_excess(3 * MEGABYTE, MEGABYTE)}"
    text = "client 2, round 1: the message is too large: 3.0 MB are above 1.0 MB (max_megabytes); dropped"
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}"):
        run.fit()
    assert grid.kinds.count("train") == 6


def test_the_parts_of_a_message_are_counted_while_they_arrive():
    from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

    parts = {name: [ObjectTree(object_id=f"{name}{part}") for part in range(3)] for name in "ab"}
    trees = [ObjectTree(object_id=name, children=children) for name, children in parts.items()]
    client = SimpleNamespace(
        PullMessages=lambda request: SimpleNamespace(message_object_trees=trees),
        PullObject=lambda request: PullObjectResponse(
            object_available=request.ready, object_content=b"x" * MEGABYTE * request.ready
        ),
    )
    limit_answers(SimpleNamespace(_runtime_client=client), 3 * MEGABYTE, describe_excess)
    client.PullMessages(None)

    def pull(name, ready=True):
        return client.PullObject(SimpleNamespace(object_id=name, ready=ready))

    for name in ("a", "a0", "a1", "b", "b0", "b1"):  # each message on its own
        pull(name, ready=False)  # which is asked for again
        pull(name)
    for name in "ab":
        with pytest.raises(ObjectPullError, match=r"too large: 4.0 MB are above 3.0 MB \(max_megabytes\)"):
            pull(f"{name}2")


def test_a_bad_answer_ends_the_run_by_default(tmp_path, alone):
    run, grid = remote(tmp_path, alone)
    grid.change = lambda machine, records: error(records) if is_result(records) else records
    with pytest.raises(ClientFailure, match=r"client [0-9], round 1: the disk is full"):
        run.fit()


def test_metrics_that_the_config_names_are_logged(tmp_path, alone):
    run, grid = remote(tmp_path, alone, engine=FlowerEngine(logged=["lr-SGD"]), rounds=1)
    log_rate = with_numbers(**{"logged__lr-SGD": 0.25})
    grid.change = lambda machine, records: log_rate(records) if is_result(records) else records
    run.fit()
    assert run.csv.rows[-1]["client/lr-SGD"] == 0.25


def test_an_error_in_reading_an_answer_names_client_and_round(tmp_path, alone, monkeypatch):
    def fail(*args):
        raise RuntimeError("x" * 10_000)

    run, _ = remote(tmp_path, alone)
    monkeypatch.setattr(engine_module, "unpack_result", fail)
    with pytest.raises(ClientFailure, match=r"^client [0-9], round 1: RuntimeError: xxx") as raised:
        run.fit()
    assert len(str(raised.value)) < 600


def described_as(**changes):
    """Return a function that changes values of a client's description."""

    def change(machine, records):
        tensors, numbers, values = unpack(records, 1e9)
        is_one = machine == 101 and values.get("kind") == "description"
        return pack(tensors, numbers, values | changes) if is_one else records

    return change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fl_lightning": "0.0.1"}, "it is not used: it has fl-lightning 0.0.1, but the server has"),
        ({"train": -5}, "it is not used: its description is not possible: train -5"),
        ({"in_shape": []}, "it is not used: its description is not possible: in_shape"),
        ({"failure": "no\x1b[2J\n" * 1000}, "it is not used: no"),
    ],
)
def test_a_machine_with_a_wrong_description_is_not_used(tmp_path, alone, changes, message):
    _, grid = remote(tmp_path, alone)
    grid.change = described_as(**changes)
    with (
        pytest.warns(UserWarning, match=f"^machine 101: {message}") as shown,
        pytest.raises(ConfigError, match=r"^clients 1: no machine has answered"),
    ):
        ClientLink(grid).find(6, 2, print)
    assert all(str(one.message).isprintable() and len(str(one.message)) < 600 for one in shown)


def test_a_machine_with_another_torch_is_used_with_a_warning(tmp_path, alone):
    _, grid = remote(tmp_path, alone)
    grid.change = described_as(torch="2.1.0")
    with pytest.warns(UserWarning, match=r"^machine 101: .*torch 2\.1\.0, "):
        assert len(ClientLink(grid).find(6, 5, print)) == 6


def test_sites_with_other_classes_are_refused(tmp_path, alone):
    _, grid = remote(tmp_path, alone)
    names = [f"class{number}" for number in range(10)]
    for number in range(1, 6):
        data = grid.nodes[100 + number].description
        grid.nodes[100 + number].description = replace(data, classes=names if number < 5 else names[::-1])
    message = r"^client 5: its data are unlike those of client 1: classes class9 instead of class0\. List the classes"
    with pytest.raises(ConfigError, match=message):
        ClientLink(grid).find(6, 5, print)


def test_the_machines_of_all_clients_are_needed(tmp_path, alone):
    _, grid = remote(tmp_path, alone)
    grid.away, lines = {101}, []
    with pytest.raises(ConfigError, match=r"^clients 1: no machine has answered"):
        ClientLink(grid).find(6, 0.3, lines.append)
    waited = ["waiting up to 0 s for 6 of 6 machines: clients 0, 1, 2, 3, 4, 5"]
    assert lines[:1] + lines[-1:] == [*waited, "waiting up to 0 s for 1 of 6 machines: clients 1"]
    assert len(lines) == len({*lines})


def test_a_second_machine_of_a_client_is_not_used(tmp_path, alone):
    _, grid = remote(tmp_path, alone)
    site = grid.nodes[103].site
    grid.nodes[150] = Node(type(site)(1, site.dataset), tmp_path / "other", grid.nodes[103].build)
    link = ClientLink(grid)
    with pytest.warns(UserWarning, match="client 1: another machine"):
        link.find(6, 5, print)
    assert link.machines[1] in (101, 150)


def test_other_data_than_those_of_the_run_are_not_used(tmp_path, alone):
    _, grid = remote(tmp_path, alone)
    expected = ClientLink(grid).find(6, 5, print)
    grid.nodes[101] = Node(type(grid.nodes[103].site)(1, grid.nodes[103].site.dataset), tmp_path / "other", None)
    link = ClientLink(grid, expected)
    with pytest.warns(UserWarning, match="client 1: its data"), pytest.raises(ConfigError):
        link.find(6, 0.3, print)


def test_the_engine_needs_the_command_line_and_remote_clients(tmp_path, alone):
    with pytest.raises(ConfigError, match=r"^engine: FlowerEngine needs scenario.dataset RemoteClients"):
        experiment(tmp_path / "run", engine=FlowerEngine()).fit()
    run, _ = remote(tmp_path, alone)
    run.engine.link = None
    with pytest.raises(ConfigError, match=r"^engine: FlowerEngine needs the command line"):
        run.fit()


def test_the_run_of_another_user_names_no_superlink():
    engine = {"engine": {"init_args": {"superlink": "federation"}}}
    message = r"^the run: engine.superlink: federation is not allowed in a file that is not known to be yours"
    with untrusted(Untrusted(engine, "the run: ", "Use --trust")), pytest.raises(ConfigError, match=message):
        FlowerEngine("federation")
