"""`fl-lightning fit`: run an experiment, or go on with one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from fl_lightning.config import FREE_KEYS, below, config_file, flatten, with_config_paths
from fl_lightning.errors import ConfigError
from fl_lightning.experiment import build, experiment_parser, plain_config
from fl_lightning.report.tables import summary_table
from fl_lightning.rivals import with_rival

MAY_CHANGE = FREE_KEYS | {"rounds", "evaluation", "evaluate_every"}
"""Keys that a resumed run may change: what is computed in a round stays the same."""


def expand(words: Sequence[str]) -> list[str]:
    """The words with what they stand for: a resumed run's config, the paths of configs, what a rival brings."""
    return with_rival(with_config_paths(with_resumed_config(words)))


def parser() -> ArgumentParser:
    """An experiment's keys, and the run to go on with."""
    parser = experiment_parser()
    parser.add_argument("--resume", type=str | None, help="Folder of a run to go on with.", metavar="RUN")
    return parser


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Run an experiment, or go on with one, and print the table it ends with."""
    config = plain_config(given, parser)
    if given.resume:
        run_dir = Path(given.resume)
        refuse_another_experiment(yaml.safe_load(Path(config_file(run_dir)).read_text()), config)
    else:
        run_dir = Path(given.run_dir) if given.run_dir else new_run_dir(given.config)
    orchestrator = build(given, parser, run_dir)
    summary = orchestrator.fit(resume=bool(given.resume), config=config)
    Console().print(summary_table(summary))
    print(f"run: {run_dir}")
    return 0


def with_resumed_config(words: Sequence[str]) -> list[str]:
    """The command line with the resumed run's own config, unless another is given."""
    resumed = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--resume"]
    resumed += [word.removeprefix("--resume=") for word in words if word.startswith("--resume=")]
    if not resumed or any(word in ("-c", "--config") or word.startswith("--config=") for word in words):
        return list(words)
    return ["--config", config_file(Path(resumed[-1])), *words]


def refuse_another_experiment(saved: dict[str, Any], config: dict[str, Any]) -> None:
    """Let a run go on only as the experiment it is.

    Raises:
        ConfigError: A key that alters the maths has another value; the message names each.
    """
    before, now = flatten(saved), flatten(config)
    changed = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    told = [key for key in sorted(changed - MAY_CHANGE) if not below(key, MAY_CHANGE | changed)]
    if told:
        changes = ", ".join(f"{key} ({before.get(key)} -> {now.get(key)})" for key in told)
        raise ConfigError(f"--resume: another experiment: {changes}; leave them as they were, or start anew")


def new_run_dir(configs: Sequence[Any] | None) -> Path:
    """`runs/<config>/<time>-<id>`, new."""
    name = Path(str(configs[-1])).stem if configs else "run"
    return Path("runs") / name / f"{datetime.now():%Y-%m-%dT%H-%M-%S}-{secrets.token_hex(3)}"
