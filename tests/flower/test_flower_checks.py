"""Checks of what a client's machine sends. They run without Flower."""

import math
import re
from dataclasses import replace

import pytest
import torch
from experiments import digits, experiment
from torch import tensor

from fl_lightning import __version__
from fl_lightning.algorithms import FedAvg, FedROD
from fl_lightning.core.errors import LONGEST, ConfigError, one_short_line
from fl_lightning.core.message import Message
from fl_lightning.core.task import Result, Score, Task
from fl_lightning.data import ByClient, RemoteClients, Scenario
from fl_lightning.data.remote import DataDescription, check_same_form, describe
from fl_lightning.engines.flower_checks import (
    BadMessage,
    Contents,
    check_contents,
    check_result,
    check_upload,
    check_versions,
    expected_answer,
    installed_versions,
    read_description,
)
from fl_lightning.engines.flower_records import unpack_result
from fl_lightning.evaluation.evaluation import Evaluation

ESCAPE, FORMULA = "\x1b[2J\x1b]0;x\x07", '=HYPERLINK("http://x")'
NAMES = (ESCAPE, "a\nb", FORMULA, "global/acc", "../x", "", "x" * 10_000, "\u202eloss", "acc_mean")


# --- Contents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "numbers", "values"),
    [
        ({"w": tensor([1.0, math.nan])}, {}, {}),
        ({"w": tensor([math.inf])}, {}, {}),
        ({"w": tensor([complex(0, math.nan)])}, {}, {}),
        ({"w": tensor([math.inf], dtype=torch.bfloat16)}, {}, {}),
        ({}, {"w": math.nan}, {}),
        ({}, {"w": -math.inf}, {}),
        ({}, {"w": [1.0]}, {}),
        ({}, {"w": True}, {}),
        ({}, {}, {"w": math.nan}),
        ({}, {}, {"w": [0.0, math.inf]}),
    ],
)
def test_numbers_that_are_not_finite_are_refused(tensors, numbers, values):
    with pytest.raises(BadMessage, match=r"^w "):
        check_contents(Contents(tensors, numbers, values))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_message_is_short_and_printable(name):
    with pytest.raises(BadMessage) as raised:
        check_contents(Contents({}, {name: math.nan}, {}))
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 100


def test_a_text_of_another_machine_is_cut():
    assert one_short_line("a" * LONGEST) == "a" * LONGEST
    cut = one_short_line(f"{ESCAPE}{'a' * 10**6}\n")
    assert cut.isprintable()
    assert len(cut) == LONGEST


# --- Results ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[FedAvg, FedROD])
def worker(request):
    evaluation = Evaluation(metrics=["Recall", "CohenKappa"])
    run = experiment(None, request.param(), scenario=digits(4), evaluation=evaluation)
    run.check()
    return run.worker


@pytest.fixture(scope="module")
def honest(worker):
    """A task, and the result of a client that is honest."""
    task = Task(1, 2, Message.pack({"model": worker.template.backbone.state_dict()}), {}, evaluate=True)
    result = worker.run(task)
    assert not result.failure
    return task, result


def changed(result, section, **entries):
    """Return a result with other entries in its losses, logged metrics, test metrics or upload."""
    parts = {name: getattr(result, name) for name in ("upload", "losses", "logged", "local")}
    if section == "local":
        entries = {"n": result.local.n, **entries}
        parts["local"] = Score(entries.pop("n"), result.local.values | entries)
    elif section == "upload":
        parts["upload"] = Message.pack(result.upload.sections, **result.upload.numbers | entries)
    else:
        parts[section] = parts[section] | entries
    return Result(result.client, result.download_bytes, **parts)


def check(worker, task, result, logged=("lr-SGD",)):
    check_result(result, task, expected_answer(worker, task.client, logged))


def test_an_honest_result_passes(worker, honest):
    task, result = honest
    check(worker, task, result)
    check(worker, task, changed(result, "logged", **{"lr-SGD": 0.1}))
    check(worker, task, changed(result, "local", acc=1.0, recall=0.0, cohen_kappa=-1.0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("section", ["losses", "logged", "local"])
def test_an_unknown_name_is_refused(worker, honest, section, name):
    task, result = honest
    with pytest.raises(BadMessage, match="unknown") as raised:
        check(worker, task, changed(result, section, **{name: 0.5}))
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("n", [0, -5, 10**9, 1])
def test_another_number_of_samples_is_refused(worker, honest, n):
    task, result = honest
    with pytest.raises(BadMessage, match=f"metrics of {n} test samples instead of {result.local.n}"):
        check(worker, task, changed(result, "local", n=n))
    with pytest.raises(BadMessage, match=f"{n} instead of {result.upload.numbers['n_samples']}"):
        check(worker, task, changed(result, "upload", n_samples=n))


def test_an_upload_without_a_number_of_samples_is_refused_unless_it_is_empty():
    with pytest.raises(BadMessage, match="None instead of 5"):
        check_upload(Message({"control/w": torch.zeros(1)}), {}, None, 5)
    check_upload(Message(), {}, None, 5)  # as of the method Local
    with pytest.raises(BadMessage, match="None instead of 5"):
        check_upload(Message(), {}, [], 5)


@pytest.mark.parametrize(("name", "value"), [("acc", 99.0), ("acc", -0.01), ("recall", 1.5)])
def test_a_metric_out_of_its_range_is_refused(worker, honest, name, value):
    task, result = honest
    with pytest.raises(BadMessage, match=f"answer's {name} is {value:g}, outside "):
        check(worker, task, changed(result, "local", **{name: value}))


def test_what_the_task_did_not_ask_for_is_refused(worker, honest):
    task, result = honest
    quiet = Task(1, 2, task.download, {}, fit=False)
    with pytest.raises(BadMessage, match="was not to train"):
        check(worker, quiet, result)
    with pytest.raises(BadMessage, match="instead of 0"):
        check(worker, Task(1, 2, task.download, {}), result)
    without = Result(2, 0, result.upload, losses=result.losses)
    with pytest.raises(BadMessage, match="metrics of 0 test samples instead of"):
        check(worker, task, without)
    with pytest.raises(BadMessage, match="not their sum"):
        check(worker, task, Result(2, 0, result.upload, losses={"ce": 1.0}, local=result.local))


@pytest.mark.parametrize(
    ("tensors", "numbers"),
    [({"memory/w": torch.zeros(1)}, {}), ({"public/w": torch.zeros(1)}, {}), ({}, {"on_global/n": 3}), ({}, {"x": 1})],
)
def test_a_group_that_is_not_part_of_a_result_is_refused(tensors, numbers):
    with pytest.raises(BadMessage, match="more than that of the task"):
        unpack_result(Task(1, 0, Message(), {}), Contents(tensors, numbers, {"uploads": True}), None)


@pytest.mark.parametrize("n", [math.nan, math.inf, 3.5, 3.0])
def test_a_count_is_a_whole_number(n):
    with pytest.raises(BadMessage, match="no whole number"):
        unpack_result(Task(1, 0, Message(), {}), Contents({}, {"local/n": n}, {"uploads": True}), None)


def test_the_text_of_a_failure_is_cut():
    answer = Contents({}, {}, {"failure": f"{ESCAPE}\n{'x' * 5000}"})
    failure = unpack_result(Task(3, 1, Message(), {}), answer, None).failure
    assert str(failure).startswith("client 1, round 3: ")
    assert str(failure).isprintable()
    assert len(failure.reason) == LONGEST


# --- Descriptions ----------------------------------------------------------------------------------------------------

DESCRIBED = {
    "client": 1,
    "train": 20,
    "test": 5,
    "in_shape": [1, 8, 8],
    "inputs": "uint8",
    "outputs": 2,
    "labels": "classes",
    "digest": "sha256:0",
    "schema": "",
    "classes": ["benign", "malignant"],
}


def test_a_description_is_read():
    client, described = read_description(DESCRIBED | {"other": "ignored"})
    assert (client, described.train, described.classes) == (1, 20, ["benign", "malignant"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("client", -1),
        ("client", True),
        ("train", 0),
        ("train", -5),
        ("train", 10**9),
        ("train", 20.0),
        ("test", -1),
        ("in_shape", []),
        ("in_shape", [0]),
        ("in_shape", [1.5, 2]),
        ("in_shape", [10**6, 10**6]),
        ("inputs", "object"),
        ("outputs", 0),
        ("outputs", 10**9),
        ("labels", "x"),
        ("digest", "a\nb"),
        ("digest", "0" * 1000),
        ("schema", ESCAPE),
        ("classes", ["benign"]),
        ("classes", ["benign", "benign"]),
        ("classes", ["benign", ESCAPE]),
        ("classes", ["benign", ""]),
        ("classes", ["benign", "x" * 1000]),
        ("classes", ["benign", 1]),
    ],
)
def test_a_description_that_is_not_possible_is_refused(name, value):
    with pytest.raises(BadMessage, match=f"description .*{name}") as raised:
        read_description(DESCRIBED | {name: value})
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_description_without_a_value_is_refused(name):
    with pytest.raises(BadMessage, match=f"no valid {name}"):
        read_description({key: value for key, value in DESCRIBED.items() if key != name})


def test_another_version_of_the_package_is_refused_and_another_torch_is_warned_of():
    assert check_versions(installed_versions()) == ""
    assert check_versions(installed_versions() | {"torch": f"{torch.__version__.partition('+')[0]}+cu999"}) == ""
    warning = check_versions(installed_versions() | {"torch": "2.1.0"})
    assert re.search(f"torch 2.1.0, .*{re.escape(torch.__version__)}", warning)
    with pytest.raises(BadMessage, match=f"fl-lightning 0.0.1, .*{__version__}"):
        check_versions(installed_versions() | {"fl_lightning": "0.0.1"})
    for old in ({}, {"fl_lightning": 1}):
        with pytest.raises(BadMessage, match="older fl-lightning"):
            check_versions(old)


# --- Classes ---------------------------------------------------------------------------------------------------------


def described(*classes, outputs=None):
    return DataDescription(20, 5, [4], "uint8", outputs or len(classes), "classes", "sha256:0", classes=list(classes))


def test_clients_with_other_classes_are_refused_by_name():
    one, other = described("benign", "malignant"), described("malignant", "normal")
    message = r"^client 1: .*client 0: classes malignant, normal instead of benign, malignant. List the classes"
    with pytest.raises(ConfigError, match=message):
        check_same_form([one, other])
    with pytest.raises(ConfigError, match=r"^client 1: .*client 0: .* b, a .* a, b"):
        check_same_form([described("a", "b"), described("b", "a")])


def test_classes_without_names_are_compared_by_number_only():
    nameless = described(outputs=2)
    check_same_form([nameless, described("a", "b"), nameless])
    with pytest.raises(ConfigError, match=r"^client 2: .*client 1: .* a, c "):
        check_same_form([nameless, described("a", "b"), described("a", "c")])
    with pytest.raises(ConfigError, match=r"^client 1: .*client 0: .* 3 .* 2"):
        check_same_form([nameless, described(outputs=3)])


def test_of_many_classes_the_first_that_differs_is_named():
    names = [f"class{number}" for number in range(100)]
    with pytest.raises(ConfigError, match=r"classes x instead of class57\. List"):
        check_same_form([described(*names), described(*names[:57], "x", *names[58:])])


def test_names_that_cannot_be_sent_are_left_out():
    data = digits(3).build(0)
    data.data.class_names = ["zero"] * 10
    assert describe(data.data, data.shards[0], "").classes == []
    data.data.class_names = [f"digit {number}" for number in range(10)]
    assert describe(data.data, data.shards[0], "").classes == data.data.class_names


def test_the_server_knows_the_names_of_the_classes():
    one = described("no", "1e3")
    remote = RemoteClients(2, [replace(one, classes=[]), one])
    assert Scenario(remote, ByClient(), 2).build(0).data.class_names == ["no", "1e3"]
