"""Conversion of tasks and results to Flower's records, and checks of the records that arrive.

All tensors of a message are one array of bytes in the safetensors format, because Flower sends each array with requests
of its own. Records hold tensors, numbers and texts. Nothing in them is unpickled or executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from fl_lightning.core.errors import FLError, one_short_line
from fl_lightning.core.message import Message, Tensors
from fl_lightning.core.state_dicts import State
from fl_lightning.core.task import Result, Score, Task, failed_result
from fl_lightning.engines.flower_adapter import import_flower
from fl_lightning.engines.flower_checks import BadMessage, Contents, check_contents, quote

if TYPE_CHECKING:
    from flwr.app import Message as FlowerMessage
    from flwr.app import RecordDict

MEGABYTE = 1 << 20
FLAGS = ("fit", "upload", "evaluate", "evaluate_globally", "keep_model")
"""Fields of a `Task` that say what to do."""


def pack(tensors: Tensors, numbers: Mapping[str, int | float], values: Mapping[str, Any]) -> RecordDict:
    """Return tensors, numbers and plain values as Flower's records."""
    flower = import_flower()
    content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    array = flower.Array(dtype="uint8", shape=(len(content),), stype="safetensors", data=content)
    return flower.RecordDict(
        {
            "tensors": flower.ArrayRecord({"content": array}),
            "numbers": flower.MetricRecord(dict(numbers)),
            "values": flower.ConfigRecord({**values, "names": list(tensors)}),  # safetensors sorts by size
        }
    )


def unpack(records: Any, most_bytes: float) -> Contents:
    """Return the content of Flower's records.

    Args:
        records: The records that `pack` returned in another process.
        most_bytes: Largest size of the tensors that is accepted.

    Raises:
        BadMessage: The records are not those of `pack`, are too large, or hold a NaN or Inf.
    """
    try:
        content = records["tensors"]["content"].data
        if len(content) > most_bytes:
            raise BadMessage(describe_excess(len(content), most_bytes))
        found, values = load(content), dict(records["values"])
        tensors = {name: found[name] for name in values.pop("names")}
        numbers = dict(records["numbers"])
        if len(tensors) != len(found):
            raise BadMessage("the message names other tensors than it holds")
    except (KeyError, AttributeError, TypeError, ValueError, SafetensorError) as error:
        raise BadMessage(f"the message is damaged ({type(error).__name__}: {one_short_line(error)})") from error
    contents = Contents(tensors, numbers, values)
    check_contents(contents)
    return contents


TOO_LARGE = "the message is too large: "


def describe_excess(size: float, most_bytes: float) -> str:
    """Return the text of the error for a message that is too large."""
    what = f"{size / MEGABYTE:,.1f} MB are above {most_bytes / MEGABYTE:,.1f} MB"
    return f"{TOO_LARGE}{what} (max_megabytes)"


def read_excess(answer: FlowerMessage) -> str:
    """Return the error text of an answer that was too large to be received; empty for other answers."""
    reason = answer.error.reason if answer.has_error() else None
    return one_short_line("".join((reason or "").partition(TOO_LARGE)[1:]))


# --- Tasks -----------------------------------------------------------------------------------------------------------


def pack_task(task: Task, state_round: int, **values: str) -> RecordDict:
    """Return a task as Flower records, without the client's state, which is stored on the client's machine.

    Args:
        task: The task.
        state_round: The round after which the client stored the state that it continues from; -1 for none.
        **values: Further values, such as the run's id.
    """
    known = {"kind": "task", "round": task.round, "client": task.client, "lr_scale": float(task.lr_scale)}
    flags = {name: getattr(task, name) for name in FLAGS}
    return pack(task.download.tensors, task.download.numbers, {**known, **flags, "state_round": state_round, **values})


def unpack_task(contents: Contents, memory: State) -> Task:
    """Build a `Task` from the contents of a message and the client's state (`memory`).

    Raises:
        BadMessage: A value is missing or of another type.
    """
    values = contents.values
    kinds: dict[str, type] = {"round": int, "client": int, "lr_scale": float, **dict.fromkeys(FLAGS, bool)}
    wrong = [name for name, kind in kinds.items() if type(values.get(name)) is not kind]
    if wrong := wrong or [name for name in ("round", "client", "lr_scale") if values[name] < 0]:
        raise BadMessage(f"the task has no valid {wrong[0]}")
    options = {name: values[name] for name in ("lr_scale", *FLAGS)}
    return Task(values["round"], values["client"], Message(contents.tensors, contents.numbers), memory, **options)


# --- Results ---------------------------------------------------------------------------------------------------------


def pack_result(result: Result, public: str | None) -> RecordDict:
    """Return a client's result as records. They contain only the part of the client's state that peers may read.

    Args:
        result: The result.
        public: The section of the client's state that its peers may read, if any.
    """
    if result.failure:
        return pack_failure(result.failure.reason)
    upload = result.upload or Message()
    shared = result.memory.get(public, {}) if public else {}
    tensors = {f"upload/{name}": value for name, value in upload.tensors.items()}
    tensors |= {f"public/{name}": value for name, value in shared.items()}
    numbers = with_prefix("upload", upload.numbers) | with_prefix("losses", result.losses)
    numbers |= with_prefix("logged", result.logged)
    if result.local:
        numbers |= {"local/n": result.local.n, **with_prefix("local/values", result.local.values)}
    return pack(tensors, numbers, {"uploads": result.upload is not None, "untrained": result.untrained})


def pack_failure(reason: str) -> RecordDict:
    """Pack the reason why a client cannot run a task into Flower's records. The client sends them as its answer."""
    return pack({}, {}, {"failure": one_short_line(reason)})


def unpack_result(task: Task, contents: Contents, public: str | None) -> Result:
    """Return the result of a task from the content of a client's message.

    Of the client's state, it has only the section `public`, which peers may read. The rest is on the client's machine.

    Raises:
        BadMessage: The message does not answer the task.
    """
    failure = contents.values.get("failure")
    if isinstance(failure, str):
        return failed_result(task, FLError(one_short_line(failure)))
    if contents.values.get("uploads") is not task.upload:
        raise BadMessage("the answer is not that of the task")
    starts = *["upload/"] * task.upload, *["public/"] * (public is not None), "losses/", "logged/", "local/"
    if unknown := [name for name in (*contents.tensors, *contents.numbers) if not name.startswith(starts)]:
        raise BadMessage(f"the answer has more than that of the task, such as {quote(unknown[0])}")
    tensors, numbers = (partial(without_prefix, entries=part) for part in (contents.tensors, contents.numbers))
    upload = Message(tensors("upload"), numbers("upload")) if task.upload else None
    memory = {public: shared} if public and (shared := tensors("public")) else {}
    local, n = None, contents.numbers.get("local/n")
    if n is not None:
        if not isinstance(n, int):
            raise BadMessage("the answer's number of test samples is no whole number")
        local = Score(n, numbers("local/values"))
    losses, logged = numbers("losses"), numbers("logged")
    result = Result(task.client, task.download.nbytes, upload, memory, losses, logged, local)
    return replace(result, untrained=contents.values.get("untrained") is True)


def with_prefix(prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries with `prefix/` before each name."""
    return {f"{prefix}/{name}": value for name, value in entries.items()}


def without_prefix(prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose names begin with `prefix/`, without this beginning."""
    start = f"{prefix}/"
    return {name.removeprefix(start): value for name, value in entries.items() if name.startswith(start)}
