"""The only file that uses parts of Flower that are not public, such as the connection of its SuperNode.

Any version of Flower can change them. So `import_flower` accepts only the versions with which the tests pass. They are
those that the extra `flower` installs.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fl_lightning.core.errors import ConfigError, FLError, one_line, one_short_line, require_extra

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

VERSIONS = ("1.41", "1.42")
"""Versions of Flower with which the tests pass."""

KEY = "engine.superlink"


def import_flower() -> ModuleType:
    """Import and return Flower's package `flwr.app`.

    Raises:
        ConfigError: Flower is not installed, or has another version than `VERSIONS`.
    """
    with require_extra("flower", "engine: FlowerEngine needs flwr"):
        import flwr.app
    if not is_supported(flwr.__version__):
        what = f"flwr {flwr.__version__} is installed, but fl-lightning needs {' or '.join(VERSIONS)}"
        raise ConfigError(f"engine: {what}. Install it with pip install 'fl-lightning[flower]'")
    return flwr.app


def is_supported(version: str) -> bool:
    """Return whether this version of Flower is one of `VERSIONS`."""
    return version.startswith(tuple(f"{each}." for each in VERSIONS))


def raise_on_exit(refuse: Callable[[str], NoReturn]) -> None:
    """Make Flower call `refuse` with its message where it would end the process."""
    from flwr.supercore import tls
    from flwr.supercore.interceptors.http import runtime_version
    from flwr.supernode import fleet_http_connection

    def on_exit(code: int, message: str | None = None, *args: Any, **options: Any) -> None:
        refuse(message or f"Flower's exit code is {code}")

    modules: list[Any] = [tls, runtime_version, fleet_http_connection]
    for module in modules:
        module.flwr_exit = on_exit


def describe_other_version(message: str) -> str:
    """Return what to do if Flower's message says that the SuperLink has another version of Flower; else an empty text.

    Args:
        message: The text with which the SuperLink refused a request.
    """
    found = re.search(r"SuperLink version ([0-9][0-9a-z.]*) detected a runtime version mismatch", message)
    if not found:
        return ""
    from flwr import __version__ as here

    there = found[1].rstrip(".")
    fix = f"Install the same on both, such as flwr {here} on the SuperLink's machine"
    if is_supported(there):
        fix = f"Install the same on both: pip install 'flwr=={there}' here"
    return f"the SuperLink has flwr {there}, but this machine has flwr {here}. {fix}"


# --- Messages of the server ------------------------------------------------------------------------------------------


def push_message(grid: Grid, message: Message) -> str | None:
    """Send a message and return its id, or None if the SuperLink has not received the whole message."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

    with suppress(ObjectPushError):
        (sent,) = grid.push_messages([message])
        return str(sent)
    return None


def limit_answers(grid: Any, most_bytes: float, describe: Callable[[float, float], str]) -> None:
    """Make Flower stop receiving a message once it exceeds `most_bytes`, before it fills the memory.

    Flower then returns an error in place of the message.

    Args:
        grid: Flower's grid. If it reaches a SuperLink, two methods of its client of the Runtime API are replaced.
        most_bytes: Largest size of a message that is accepted.
        describe: Returns the text of the error, given the size of the message and the largest size.
    """
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

    client = getattr(grid, "_runtime_client", None)
    if client is None:  # a grid inside this process, as in tests
        return
    pull_messages, pull_object = client.PullMessages, client.PullObject
    sizes: dict[str, list[int]] = {}  # by the id of a part that has not arrived: what has arrived of its message

    def note_parts(request: Any) -> Any:
        answer = pull_messages(request)
        for tree in answer.message_object_trees:
            size = [0]
            sizes.update((part.object_id, size) for part in iterate_object_tree(tree))
        return answer

    def count_part(request: Any) -> Any:
        answer = pull_object(request)
        if answer.object_available and (size := sizes.pop(request.object_id, None)):
            size[0] += len(answer.object_content)
            if size[0] > most_bytes:
                raise ObjectPullError(request.object_id, describe(size[0], most_bytes))
        return answer

    client.PullMessages, client.PullObject = note_parts, count_part


# --- The connection of a client's machine ----------------------------------------------------------------------------


class RunEnded(FLError):
    """A message cannot be answered, because its run has ended."""


class Answered(NamedTuple):
    """A message of the server that was answered.

    Attributes:
        question: The type of the message, or its round.
        content: The answer.
        seconds: How long the answer took.
    """

    question: str
    content: RecordDict
    seconds: float


def open_connection(*args: Any, refuse: Callable[[str], NoReturn]) -> AbstractContextManager[Any]:
    """Return the connection of Flower's SuperNode.

    Args:
        *args: Its arguments: address, whether it is not encrypted, certificate and keys.
        refuse: Is called with Flower's message where Flower would end the process.
    """
    from flwr.supernode.fleet_http_connection import http_request_response

    raise_on_exit(refuse)
    return http_request_response(*args)


def answer_message(connection: Any, answer: Callable[[RecordDict], RecordDict]) -> Answered | None:
    """Answer one message of the server. Return None if there is no message.

    Args:
        connection: The connection that `open_connection` returned.
        answer: Returns the answer to a message.

    Raises:
        RunEnded: The message is of a run that has ended.
    """
    from flwr.supercore.run import RunNotRunningException

    try:
        if (message := _pull_message(connection)) is None:
            return None
        started = time.monotonic()
        content = _push_reply(connection, message, answer)
    except RunNotRunningException as error:
        raise RunEnded("the run has ended") from error
    round = dict(message.content.get("values", {})).get("round")
    question = message.metadata.message_type if round is None else f"round {round}"
    return Answered(one_short_line(question), content, time.monotonic() - started)


def _pull_message(connection: Any) -> Any:
    """Return the next message of the server, with all of its parts, or None if there is no message."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

    _, receive, _, _, _, pull_object, _, confirm = connection
    if (received := receive()) is None:
        return None
    envelope, tree = received
    run, name = envelope.metadata.run_id, envelope.metadata.message_id
    parts = [each.object_id for each in iterate_object_tree(tree)]
    contents = pull_objects(parts, pull_object_fn=lambda each: pull_object(run, each))
    confirm(run, name)
    message: Any = inflate_object_from_contents(tree.object_id, contents)
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


def _push_reply(connection: Any, message: Any, answer: Callable[[RecordDict], RecordDict]) -> RecordDict:
    """Answer a message, send the answer to the server, and return it."""
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import push_object_contents_from_iterable

    _, _, send, _, _, _, push_object, _ = connection
    run, started = message.metadata.run_id, time.monotonic()
    with no_object_id_recompute():
        content = answer(message.content)
        reply = Message(content, reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = get_all_nested_objects(reply)
        wanted, session = send(reply, get_object_tree(reply), time.monotonic() - started)
        parts = ((each, objects[each].deflate()) for each in wanted)
        push_object_contents_from_iterable(parts, lambda each, part: push_object(run, session, each, part))
    return content


# --- The server of a run ---------------------------------------------------------------------------------------------


class RunStopped(FLError):
    """The SuperLink has ended the run."""

    exit_code = 1


def open_grid(superlink: str, files: Mapping[str, str]) -> Any:
    """Start a run on a SuperLink, and return the grid with which this process is the server of the run.

    Args:
        superlink: Name of the connection in Flower's `config.toml`.
        files: The files of the Flower app, by name.

    Raises:
        ConfigError: The connection is not in the file, or the SuperLink does not answer, starts the server itself, or
            has another version of Flower.
    """
    from click import ClickException
    from flwr.cli.config_utils import load_certificate_in_connection
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
    from flwr.superlink.grid import HttpGrid

    raise_on_exit(refuse_run)
    try:
        connection = read_superlink_connection(superlink)
        address = str(connection.address), connection.insecure, load_certificate_in_connection(connection)
        with closing(init_http_client_from_connection(connection)) as control, flwr_cli_exc_handler():
            token = acquire_run(control, address, files)
    except ClickException as error:
        raise ConfigError(f"{KEY}: {one_line(error.message)}") from error
    return HttpGrid(*address, token=token)


def refuse_run(message: str) -> NoReturn:
    """Raise a `ConfigError` with the message with which the SuperLink refused this process."""
    raise ConfigError(f"{KEY}: {describe_other_version(message) or one_short_line(message)}")


def acquire_run(control: Any, address: tuple[str, bool, bytes | None], files: Mapping[str, str]) -> str:
    """Start a run on a SuperLink, and return the token that lets this process act as the run's server.

    Args:
        control: A client of the SuperLink's Control API.
        address: The SuperLink's address, whether it is reached without encryption, and its authority's certificate.
        files: The files of the Flower app, by name.

    Raises:
        ConfigError: The SuperLink has started the server itself, or has another version of Flower.
    """
    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.fab import Fab
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    content, _ = build_fab_from_files({name: text.encode() for name, text in files.items()})
    app = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
    versions = [RuntimeVersionHttpInterceptor(component_name="flwr")]
    with closing(RuntimeHttpClient.from_server_address(*address, interceptors=versions)) as runtime:
        run = control.StartRun(StartRunRequest(fab=app)).run_id
        while True:  # runs whose process was killed before it became their server come first
            acquired = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
            if not acquired.token:
                fix = "Start it with --isolation process"
                raise ConfigError(f"{KEY}: the SuperLink has started the server of the run itself. {fix}")
            if acquired.task.run_id == run:
                return acquired.token


@contextmanager
def serve_run(grid: Any) -> Iterator[None]:
    """Context in which this process acts as the server of a Flower run. On exit, the SuperLink ends the run."""
    from flwr.common.constant import SubStatus
    from flwr.proto.runtime_pb2 import PushTaskOutputRequest
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.run import RunNotRunningException
    from httpx import HTTPError

    _take_task(grid)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))  # SIGINT here if the run is stopped
    heartbeat.start()
    ended = PushTaskOutputRequest(sub_status=SubStatus.COMPLETED)
    try:
        yield
    except (RunNotRunningException, HTTPError) as error:  # which of them depends on the request that meets it first
        reason, fix = one_line(error) or "it is not running", "Continue it with fl-lightning fit --resume"
        raise RunStopped(f"the SuperLink has ended the run: {reason}. {fix}") from error
    except BaseException as error:
        ended = PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=one_line(error))
        raise
    finally:
        grid._retry_invoker.should_giveup = lambda error: True  # the SuperLink may be away
        if heartbeat.is_running:  # one after the end would be refused, which Flower answers with SIGINT
            heartbeat.stop()
        with suppress(HTTPError, RunNotRunningException):
            grid._runtime_client.PushTaskOutput(ended)


def _take_task(grid: Any) -> None:
    """Take over the task of the run's server, so that requests of this process carry its ids."""
    from flwr.common.serde import run_from_proto
    from flwr.proto.runtime_pb2 import PullTaskInputRequest
    from flwr.supercore.task_identity import TaskIdentity

    given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
    TaskIdentity.node_id = given.context.node_id
    grid.set_run(run_from_proto(given.run))
