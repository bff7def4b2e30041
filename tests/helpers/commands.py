"""Run the command line in this process, on experiments that take a second."""

import argparse
import contextlib
import csv
import io
import json
import re
import shlex
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fl_lightning.cli.main import main

TEST_FOLDERS = sorted(str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir())
"""Folders in which scripts that tests start find the tests' own modules."""

TINY = """# FedSKC on digits, in a second.
rounds: 3
batch_size: 16
scenario: {dataset: Digits, partition: {class_path: Dirichlet, init_args: {alpha: 0.5, min_samples: 20}}, clients: 4}
model: {class_path: MLP, init_args: {hidden: [8]}}
algorithm: FedSKC
optimizer: {class_path: SGD, init_args: {lr: 0.5}}
trainer: {max_epochs: 1, accelerator: cpu}
logger: null
"""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def run(*words: str | Path) -> Outcome:
    """Run a command. Return its exit code and output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return Outcome(code, out.getvalue(), err.getvalue())


def tiny(run_dir: Path, *words: str, text: str = TINY) -> Outcome:
    """Run `fit` with the tiny experiment into a folder, and write its config beside the folder."""
    config = run_dir.with_suffix(".yaml")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(text)
    outcome = run("fit", "--config", config, "--run_dir", run_dir, *words)
    assert outcome.code == 0, outcome.err
    return outcome


def run_page(page: str, edit: Callable[[str], str] = str) -> list[Outcome]:
    """Run what a page of the documentation shows, in its order, in the working folder. Return the commands' outcomes.

    Blocks with a title are files, Python blocks share their names, and each line of a bash block is a command.

    Args:
        page: The page.
        edit: Changes a bash block, for example to fewer rounds.
    """
    names: dict[str, object] = {}
    outcomes = []
    for kind, title, block in re.findall(r'```(bash|python|yaml)(?: title="(.+?)")?\n(.*?)```', page, re.S):
        if title:
            Path(title).write_text(block)
        elif kind == "python":
            exec(block, names)
        else:
            for command in edit(block).splitlines():
                outcomes.append(run(*shlex.split(command)[1:]))
                assert outcomes[-1].code == 0, f"{command}\n{outcomes[-1].err}"
    return outcomes


def rows(run_dir: Path, name: str = "metrics.csv") -> list[dict[str, str]]:
    """Return the rows of a run's metrics.csv or of another csv file."""
    with (run_dir / name).open(newline="") as file:
        return list(csv.DictReader(file))


def untimed_rows(run_dir: Path) -> list[dict[str, str]]:
    return [{name: text for name, text in row.items() if not name.startswith("time/")} for row in rows(run_dir)]


def summary(run_dir: Path) -> dict[str, float]:
    return json.loads((run_dir / "final" / "summary.json").read_text())


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return the content of every file below a folder by path, and None for every folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def arguments_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the arguments of a parser by key, without those that show a help text or stand for a group."""
    found = {one.dest: one for one in parser._actions if "help" not in one.dest.split(".") and one.help != SUPPRESS}
    groups = {key.rpartition(".")[0] for key in found}
    return {key: one for key, one in found.items() if key not in groups and key != "print_shtab"}


def table(text: str) -> dict[str, Sequence[str]]:
    """Return the rows of a printed table by their first cell."""
    lines = [line.strip(" │┃").replace("┃", "│") for line in text.splitlines()]
    cells = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    return {row[0]: row[1:] for row in cells}
