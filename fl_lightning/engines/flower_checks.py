"""Checks of messages between the server and the clients' own machines, before anything in a message is used.

Neither side trusts the other. These functions need no Flower, so they also run where it is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch

import fl_lightning
from fl_lightning.core.errors import FLError, one_short_line
from fl_lightning.core.message import Message, Tensors
from fl_lightning.core.seeding import RandomStates
from fl_lightning.core.task import Result, Score, Task
from fl_lightning.data.federated_data import FederatedData
from fl_lightning.data.remote import INPUTS, DataDescription, Labels, are_class_names
from fl_lightning.data.truncation import truncate_dataset

if TYPE_CHECKING:
    from fl_lightning.engines.worker import Worker

NAME = 60  # characters of a name in a message
MOST_SAMPLES = 10**8  # of a client: the server keeps an index of each sample
MOST_ELEMENTS = 10**9  # of a sample's input
MOST_OUTPUTS = 10**6


class BadMessage(FLError):
    """A message of a client or of the server is not as expected, and is not used."""

    exit_code = 1


class Contents(NamedTuple):
    """The content of a message: tensors by name, numbers by name, and plain values by name."""

    tensors: Tensors
    numbers: dict[str, int | float]
    values: dict[str, Any]


def check_contents(contents: Contents) -> None:
    """Check that all tensors, numbers and values of a message are finite, and that its numbers are plain numbers.

    Raises:
        BadMessage: Names the first that is not.
    """
    for name, tensor in contents.tensors.items():
        if (tensor.is_floating_point() or tensor.is_complex()) and not tensor.isfinite().all():
            raise BadMessage(f"{quote(name)} contains NaN or Inf")
    for name, number in {**contents.values, **contents.numbers}.items():
        if name in contents.numbers and type(number) not in (int, float):
            raise BadMessage(f"{quote(name)} is no plain number")
        for one in number if isinstance(number, list) else [number]:
            if isinstance(one, float) and not math.isfinite(one):
                raise BadMessage(f"{quote(name)} is NaN or Inf")


def quote(name: object) -> str:
    """Return a name from another machine as one short line, for use in an error message."""
    return one_short_line(str(name), NAME)


# --- Results ---------------------------------------------------------------------------------------------------------


class ExpectedAnswer(NamedTuple):
    """The names, counts and ranges that a client's answer must have, known before it arrives.

    Attributes:
        train: Number of training samples that the client announced before round 1.
        test: Number of its test samples that it announced.
        losses: Names of the training losses.
        logged: Names of the metrics that may be logged during the training.
        metrics: Lowest and highest value of each metric on the client's test samples, by name.
        model: The state dict of the network.
        shared: Names of the entries of the network that a client uploads; None if they differ between clients.
        sent: A result with placeholder samples: names, shapes and dtypes of what the client sends. None if not known.
        public: The section of the client state that peers may read, if any.
        varies: Whether the sizes of what clients send differ.
    """

    train: int
    test: int
    losses: Collection[str]
    logged: Collection[str]
    metrics: Mapping[str, tuple[float, float]]
    model: Tensors
    shared: Sequence[str] | None
    sent: Result | None
    public: str | None
    varies: bool


def rehearse(worker: Worker, task: Task) -> Result | None:
    """Return a task's result with one training step on a few placeholder samples, to know what clients have to send.

    Args:
        worker: The model, data and options of the run.
        task: The task of one of the clients with the same network.

    Returns:
        The result; None if the names and sizes differ between clients, or if placeholders cannot be trained on.
    """
    if not task.upload or worker.algorithm.uploads_vary:
        return None
    few = truncate_dataset(worker.data, worker.training.batch_size)
    placeholders = FederatedData(few.data, few.shards, objective=few.objective)  # that are not remote
    own = replace(worker.for_client(task.client), data=placeholders, compression=None)
    with RandomStates(worker.device).drawing():
        result = own.run(replace(task, evaluate=False, evaluate_globally=False, max_steps=1))
    return None if result.failure else result


def expected_answer(worker: Worker, client: int, logged: Collection[str], sent: Result | None = None) -> ExpectedAnswer:
    """Return what the server knows of a client's answers.

    Args:
        worker: The model, data and options of the run.
        client: The client's id.
        logged: Names of the metrics that may be logged during the training.
        sent: The result of `rehearse`.
    """
    worker = worker.for_client(client)
    module, objective, scorer = worker.template, worker.data.objective, worker.scorer
    losses = {"loss", "training_step", objective.term, *module.loss_names, *(term.name for term in module.terms())}
    backbone = module.backbone
    shared = worker.algorithm.shared_names(backbone) if worker.algorithm.plain_exchange else None
    train, test = worker.client_data.sample_count(client), len(worker.data.shard(client).test)
    bounds = {measure.name: measure.bounds for measure in scorer.measures} | objective.bounds
    metrics = {name: bounds.get(name, (-math.inf, math.inf)) for name in scorer.score_names}
    public, varies = worker.algorithm.public, worker.algorithm.uploads_vary
    return ExpectedAnswer(train, test, losses, logged, metrics, backbone.state_dict(), shared, sent, public, varies)


def check_result(result: Result, task: Task, expected: ExpectedAnswer) -> None:
    """Check a client's result: that names and counts are those expected, and that metrics are in their range.

    Raises:
        BadMessage: A name is unknown, a count differs, a value is out of its range, or the upload does not match the
            network.
    """
    check_names("training loss", result.losses, expected.losses)
    check_names("logged metric", result.logged, expected.logged, "List it in engine.logged")
    if result.losses and "loss" not in result.losses:
        raise BadMessage("the answer has training losses, but not their sum, loss")
    if not task.fit and (result.losses or result.logged):
        raise BadMessage("the answer has training losses or logged metrics, but the task was not to train")
    check_score(result.local, expected.test if task.evaluate else 0, expected)
    if result.upload:
        check_upload(result.upload, expected.model, expected.shared, expected.train, expected.varies)
    if result.upload and expected.sent and expected.sent.upload:
        check_entries("upload", result.upload.tensors, expected.sent.upload.tensors)
        check_entries("upload", result.upload.numbers, expected.sent.upload.numbers)
        if expected.public:
            own, other = (each.memory.get(expected.public, {}) for each in (result, expected.sent))
            check_entries("public state", own, other)


def is_smaller(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether a tensor has the dtype of another one, and no dimension that is larger, as a smaller adapter."""
    same = part.dtype == whole.dtype and part.ndim == whole.ndim
    return same and all(size <= most for size, most in zip(part.shape, whole.shape, strict=True))


def check_entries(what: str, sent: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise a `BadMessage` if tensors or numbers have other names, shapes or types than expected.

    Args:
        what: What has the entries, for the error message.
        sent: The entries in a client's answer.
        expected: The same entries of a client on the server.
    """
    for name in sorted(sent.keys() ^ expected.keys()):
        raise BadMessage(f"the {what}'s {quote(name)} is {'missing' if name in expected else 'unknown'}")
    for name, value in sent.items():
        held, wanted = (describe_form(each) for each in (value, expected[name]))
        if held != wanted:
            raise BadMessage(f"the {what}'s {quote(name)} is {held} instead of {wanted}")


def describe_form(value: Any) -> str:
    """Return the shape and dtype of a tensor, or the type of a number, as a text."""
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


def check_names(what: str, names: Iterable[str], known: Collection[str], fix: str = "") -> None:
    """Raise a `BadMessage` if a name in a client's answer is not in the list of known names.

    Args:
        what: What is named, for the error message.
        names: The names in the answer.
        known: The names that the server knows.
        fix: How to fix it.
    """
    if unknown := [name for name in names if name not in known]:
        raise BadMessage(". ".join(filter(None, (f"the answer has an unknown {what}, {quote(repr(unknown[0]))}", fix))))


def check_score(score: Score | None, samples: int, expected: ExpectedAnswer) -> None:
    """Check the metrics on a client's test samples.

    Args:
        score: The metrics, if the answer has them.
        samples: The number of test samples that it must have; 0 if it must have none.
        expected: What the server knows of the answer.

    Raises:
        BadMessage: The number of samples differs, a name is unknown, or a metric is out of its range.
    """
    if (score.n if score else 0) != samples:
        raise BadMessage(f"the answer has metrics of {score.n if score else 0} test samples instead of {samples}")
    check_names("metric", score.values if score else (), expected.metrics)
    for name, value in score.values.items() if score else ():
        low, high = expected.metrics[name]
        if not low <= value <= high:
            raise BadMessage(f"the answer's {name} is {value:g}, outside [{low:g}, {high:g}]")


def check_upload(
    upload: Message, model: Tensors, names: Sequence[str] | None, n_samples: int, varies: bool = False
) -> None:
    """Raise an error if a client's upload does not match the network, or if its number of samples is wrong.

    Args:
        upload: The upload.
        model: The state dict of the network.
        names: The entries of the network that a client uploads; None if they differ between clients.
        n_samples: The number of training samples that the client announced before round 1.
        varies: Whether an entry can be smaller than the network's, as the adapters of a client's own rank.

    Raises:
        BadMessage: An entry is missing, or has another shape or dtype than the network's, or the number is another.
    """
    sent = upload.section("model")
    if names is not None and sent.keys() != set(names):
        first = min(sent.keys() ^ set(names))
        raise BadMessage(f"the upload has other entries than the network: {quote(first)}")
    for name in sent.keys() & model.keys():
        held, wanted = (describe_form(tensor) for tensor in (sent[name], model[name]))
        if held != wanted and not (varies and is_smaller(sent[name], model[name])):
            raise BadMessage(f"the upload's {quote(name)} is {held} instead of {wanted}")
    is_empty = names is None and not (upload.sections or upload.numbers)  # as of a method that sends nothing
    if not is_empty and upload.numbers.get("n_samples") != n_samples:
        what = f"{upload.numbers.get('n_samples')} instead of {n_samples}"
        raise BadMessage(f"the upload has another number of samples than the client announced: {what}")


# --- Descriptions ----------------------------------------------------------------------------------------------------


def installed_versions() -> dict[str, str]:
    """Return the versions of fl-lightning and torch on this machine, which are part of its description."""
    return {"fl_lightning": fl_lightning.__version__, "torch": str(torch.__version__)}


def check_versions(values: Mapping[str, Any]) -> str:
    """Check the versions that a machine sent with its description.

    Returns:
        A warning if its version of torch is another one than here; otherwise an empty text.

    Raises:
        BadMessage: It has another version of fl-lightning.
    """
    for name, here in installed_versions().items():
        there, package = values.get(name), name.replace("_", "-")
        if not isinstance(there, str):
            raise BadMessage(f"it has an older {package} than the server, {here}. Install {package} {here} there")
        if there.partition("+")[0] != here.partition("+")[0]:  # builds of torch for CPU and CUDA
            text = f"it has {package} {quote(there)}, but the server has {here}. Install the same version on both"
            if package != "torch":
                raise BadMessage(text)
            return f"{text}, because results can differ"
    return ""


def read_description(values: Mapping[str, Any]) -> tuple[int, DataDescription]:
    """Return the client's id, and the description of the client's data, from the values that a machine sent.

    Raises:
        BadMessage: A value is missing, of another type, or not possible.
    """
    kinds: dict[str, type] = {"train": int, "test": int, "in_shape": list, "inputs": str, "outputs": int}
    kinds |= {**dict.fromkeys(("labels", "digest", "schema"), str), "classes": list}
    for name, kind in {"client": int, **kinds}.items():
        if type(values.get(name)) is not kind:
            raise BadMessage(f"its description has no valid {name}")
    one = DataDescription(**{name: values[name] for name in kinds})
    shape, classes = one.in_shape, one.classes
    possible = {
        "client": values["client"] >= 0,
        "train": 1 <= one.train <= MOST_SAMPLES,
        "test": 0 <= one.test <= MOST_SAMPLES,
        "in_shape": bool(shape) and all(type(n) is int and n > 0 for n in shape) and math.prod(shape) <= MOST_ELEMENTS,
        "inputs": one.inputs in INPUTS,
        "outputs": 1 <= one.outputs <= MOST_OUTPUTS,
        "labels": one.labels in get_args(Labels),
        "digest": one.digest.isprintable() and len(one.digest) <= NAME + 20,
        "schema": one.schema.isprintable() and len(one.schema) <= NAME + 20,
        "classes": not classes or are_class_names(classes, one.outputs),
    }
    if wrong := [name for name, is_possible in possible.items() if not is_possible]:
        raise BadMessage(f"its description is not possible: {wrong[0]} {quote(values[wrong[0]])}")
    return values["client"], one
