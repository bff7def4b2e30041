"""Train every method on the digits and store its accuracies by round: `python docs/method_curves.py [METHOD ...]`.

The result is docs/methods/curves.json, from which docs/method_pages.py draws the figure of each method's page. Methods
that are in the file are not trained again, except those that are named.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import reference

from fl_lightning.cli.main import main
from fl_lightning.runs.search import open_runs

FILE = reference.PAGES / "curves.json"
OPTIONS = (
    "--rounds 15 --seed 0 --scenario.clients 10 --scenario.partition Dirichlet --scenario.partition.alpha 0.2 "
    "--scenario.partition.min_samples 20 --trainer.max_epochs 3 --evaluation.every 1 --evaluation.client_model both "
    "--logger false"
)
"""Options that replace those of a method's config, so that all methods have the same clients, splits and rounds."""
METRICS = ("global/acc", "client/acc_mean", "trained_client/acc_mean")


def commands() -> dict[str, str]:
    """Return the command that measures each method: its config with `OPTIONS`. Methods of adapters have none."""
    own = {kind.__name__: reference.command(kind) for kind in reference.methods()}
    return {name: f"{command} {OPTIONS}" for name, command in own.items() if command}


def measure(command: str) -> dict[str, list[float]]:
    """Run a command, and return each metric of the run by round.

    Raises:
        SystemExit: The run failed.
    """
    with TemporaryDirectory() as folder:
        if code := main([*shlex.split(command)[1:], "--run_dir", str(Path(folder, "run"))]):
            raise SystemExit(code)
        (run,) = open_runs(folder)
    return {name: [round(row[name], 4) for row in run.rounds] for name in METRICS if name in run.rounds[0]}


def load() -> dict[str, Any]:
    """Return the content of the file: the options, the date of the last change, and the curves of each method.

    Curves that were measured with other options are left out.
    """
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    return stored if stored.get("options") == OPTIONS else {"options": OPTIONS, "date": "", "curves": {}}


def store(content: dict[str, Any]) -> None:
    """Write the file, one line per metric of a method."""
    text = json.dumps(content, indent=1)
    FILE.write_text(re.sub(r"\[[^]]*\]", lambda numbers: json.dumps(json.loads(numbers[0])), text) + "\n")


if __name__ == "__main__":
    content, named = load(), sys.argv[1:]
    for name, command in commands().items():
        if name in named or not (named or name in content["curves"]):
            content["curves"][name] = measure(command)
            content["date"] = str(datetime.date.today())
            store(content)
