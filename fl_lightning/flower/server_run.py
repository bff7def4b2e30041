"""Start a run on Flower's SuperLink, and make this process the server of the run.

Usually, the SuperLink starts another process as the server. In this process, the run folder, the output and Ctrl-C are
those of any run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from fl_lightning.engines.flower_adapter import import_flower, open_grid, serve_run

if TYPE_CHECKING:
    from flwr.serverapp import Grid

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
    with closing(open_grid(superlink, APP_FILES)) as grid, serve_run(grid):
        yield grid
