"""Start a run on Flower's SuperLink, and make this process the server of the run.

Usually, the SuperLink starts another process as the server. In this process, the run folder, the output and Ctrl-C are
those of any run. As in `connection.py`, this uses parts of Flower that are not public.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.engines.flower_records import import_flower

if TYPE_CHECKING:
    from flwr.serverapp import Grid

KEY = "engine.superlink"

APP_FILES = {
    "pyproject.toml": """\
[project]
name = "fl-lightning-app"
version = "1.0.0"
description = "An experiment of fl-lightning on the clients' own machines"
license = "Apache-2.0"
dependencies = ["fl-lightning[flower]"]

[tool.flwr.app]
publisher = "fl-lightning"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
run-dir = ""
resume = false
""",
    "server_app.py": '''\
"""The server of the experiment in experiment.yaml."""

from pathlib import Path

from fl_lightning.cli.flower_app import server_app

app = server_app(Path(__file__).with_name("experiment.yaml"))
''',
    "client_app.py": '''\
"""Clients' machines run `fl-lightning node` in place of Flower's SuperNode, which would run this app."""

from flwr.clientapp import ClientApp

app = ClientApp()
''',
}
"""The files of a Flower app, by name. `experiment.yaml` beside them is the config."""


class RunStopped(FLError):
    """The SuperLink has ended the run."""

    exit_code = 1


@contextmanager
def start_run(superlink: str) -> Iterator[Grid]:
    """Start a run on a SuperLink, and yield Flower's `Grid`, which exchanges messages with the clients' machines.

    Args:
        superlink: Name of the connection in Flower's `config.toml`.

    Raises:
        ConfigError: The connection is not in the file, or the SuperLink does not answer or starts the server itself.
        RunStopped: The SuperLink has ended the run, for example because of `flwr stop`.
    """
    import_flower()
    from click import ClickException
    from flwr.cli.config_utils import load_certificate_in_connection
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
    from flwr.superlink.grid import HttpGrid

    try:
        connection = read_superlink_connection(superlink)
        address = str(connection.address), connection.insecure, load_certificate_in_connection(connection)
        with closing(init_http_client_from_connection(connection)) as control, flwr_cli_exc_handler():
            token = acquire_run(control, address)
    except ClickException as error:
        raise ConfigError(f"{KEY}: {one_line(error.message)}") from error
    with closing(HttpGrid(*address, token=token)) as grid, serve_run(grid):
        yield grid


def acquire_run(control: Any, address: tuple[str, bool, bytes | None]) -> str:
    """Start a run on a SuperLink, and return the token that lets this process act as the run's server.

    Args:
        control: A client of the SuperLink's Control API.
        address: The SuperLink's address, whether it is reached without encryption, and its authority's certificate.

    Raises:
        ConfigError: The SuperLink has started the server itself.
    """
    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.fab import Fab
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    content, _ = build_fab_from_files({name: text.encode() for name, text in APP_FILES.items()})
    app = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
    versions = [RuntimeVersionHttpInterceptor(component_name="fl-lightning")]
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
    from flwr.common.serde import run_from_proto
    from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.run import RunNotRunningException
    from flwr.supercore.task_identity import TaskIdentity
    from httpx import HTTPError

    given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
    TaskIdentity.node_id = given.context.node_id
    grid.set_run(run_from_proto(given.run))
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))  # SIGINT here if the run is stopped
    heartbeat.start()
    ended = PushTaskOutputRequest(sub_status=SubStatus.COMPLETED)
    try:
        yield
    except (RunNotRunningException, HTTPError) as error:  # which of them depends on the request that meets it first
        reason = one_line(error) or "it is not running"
        raise RunStopped(
            f"the SuperLink has ended the run: {reason}. Continue it with fl-lightning fit --resume"
        ) from error
    except BaseException as error:
        ended = PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=one_line(error))
        raise
    finally:
        grid._retry_invoker.should_giveup = lambda error: True  # the SuperLink may be away
        if heartbeat.is_running:  # one after the end would be refused, which Flower answers with SIGINT
            heartbeat.stop()
        with suppress(HTTPError, RunNotRunningException):
            grid._runtime_client.PushTaskOutput(ended)
