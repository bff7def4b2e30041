"""The command line: `fl-lightning fit | test | partition | list`."""

from __future__ import annotations

import inspect
import os
import secrets
import sys
import warnings
from collections.abc import Sequence
from datetime import datetime
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace
from lightning import Trainer
from rich.console import Console
from rich.table import Table

from fl_lightning.checkpoint import CheckpointFolder
from fl_lightning.data import Scenario
from fl_lightning.errors import CheckpointError, ConfigError, FLError
from fl_lightning.orchestrator import FederatedOrchestrator
from fl_lightning.report.figures import partition_figure
from fl_lightning.report.tables import partition_table, summary_table, test_table, write_counts

KINDS = ("algorithms", "datasets", "models", "partitions", "callbacks", "configs")

# What of Lightning's Trainer a client's fit takes: where and how precisely to compute, and how much.
TRAINER_KEYS = {
    "accelerator",
    "devices",
    "precision",
    "max_epochs",
    "max_steps",
    "limit_train_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "accumulate_grad_batches",
    "deterministic",
    "benchmark",
    "detect_anomaly",
}

# Keys that a resumed run may change: they say where, how fast and what to watch, not what is computed.
FREE_KEYS = {
    "rounds",
    "engine",
    "evaluation",
    "evaluate_every",
    "checkpoint_every",
    "keep_checkpoints",
    "logger",
    "log_clients",
    "callbacks",
    "run_dir",
    "trainer.accelerator",
    "trainer.devices",
}


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


def main(args: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        args: The command line less the program's name; `sys.argv` by default.

    Returns:
        The exit code: 0, 2 for bad input, 1 for a run that failed, 128 + n for signal n.
    """
    words = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _dispatch(words)
    except (FLError, ArgumentError) as error:
        if debug:
            raise
        print(f"fl-lightning: error: {one_line(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, FLError) else 2


def _dispatch(words: list[str]) -> int:
    words = with_config_paths(words)
    if words[:1] == ["fit"] and "--help" not in words:
        words = with_resumed_config(words)
    parser, subparsers = build_parser()
    given = parser.parse_args(words)
    command = given.subcommand
    commands = {"fit": fit, "test": test, "partition": partition, "list": list_things}
    return commands[command](given[command], subparsers[command])


# --- Parsers ---------------------------------------------------------------------------------------------------------


def build_parser() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The parser of the whole command line, and each command's own."""
    parser = ArgumentParser(
        prog="fl-lightning",
        description="Federated learning with non-IID clients on PyTorch Lightning. --debug shows tracebacks.",
        exit_on_error=False,
    )
    commands = {
        "fit": (_fit_parser(), "Run an experiment, or go on with one."),
        "test": (_test_parser(), "Evaluate a run's checkpoint again."),
        "partition": (_partition_parser(), "Show and draw which client holds what."),
        "list": (_list_parser(), "List what can be named in a config."),
    }
    subcommands = parser.add_subcommands(required=True)
    for name, (subparser, text) in commands.items():
        subcommands.add_subcommand(name, subparser, help=text)
    return parser, {name: subparser for name, (subparser, _) in commands.items()}


def _fit_parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("-c", "--config", action=ActionConfigFile, help="Config file, or the name of a shipped one.")
    parser.add_argument("--resume", type=str | None, help="Folder of a run to go on with.", metavar="RUN")
    parser.add_class_arguments(FederatedOrchestrator, skip={"trainer"}, fail_untyped=False)
    unwanted = set(inspect.signature(Trainer).parameters) - TRAINER_KEYS
    parser.add_class_arguments(Trainer, "trainer", skip=unwanted, instantiate=False)
    parser.set_defaults(
        {
            "trainer.devices": 1,
            "logger": {"class_path": "fl_lightning.loggers.WandbRoundLogger"},
            "run_dir": None,
        }
    )
    return parser


def _test_parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("run", type=str, help="Folder of the run.")
    parser.add_argument("--checkpoint", type=str, default="last", help="last, best, or the number of a round.")
    return parser


def _partition_parser() -> ArgumentParser:
    parser = _fit_parser()
    parser.add_argument("--out", type=str | None, help="Write the picture (PNG) and the table (CSV) into this folder.")
    return parser


def _list_parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("kind", type=str, nargs="?", help=" | ".join(KINDS))
    return parser


# --- Commands --------------------------------------------------------------------------------------------------------


def fit(given: Namespace, parser: ArgumentParser) -> int:
    """`fit`: run an experiment, or go on with one, and print the table it ends with."""
    config = plain_config(given, parser)
    if given.resume:
        run_dir = Path(given.resume)
        refuse_another_experiment(saved_config(run_dir), config)
    else:
        run_dir = Path(given.run_dir) if given.run_dir else new_run_dir(given.config)
    orchestrator = build(given, parser, run_dir)
    summary = orchestrator.fit(resume=bool(given.resume), config=config)
    Console().print(summary_table(summary, run_dir))
    return 0


def test(given: Namespace, parser: ArgumentParser) -> int:
    """`test`: evaluate a checkpoint of a finished or half-finished run."""
    run_dir = Path(given.run)
    fit_parser = _fit_parser()
    orchestrator = build(fit_parser.parse_args(["--config", str(config_file(run_dir))]), fit_parser, run_dir)
    orchestrator.load(chosen_round(given.checkpoint, run_dir))
    if not orchestrator.round:
        raise CheckpointError(f"{run_dir} holds no checkpoint yet")
    Console().print(test_table(orchestrator.test()))
    return 0


def partition(given: Namespace, parser: ArgumentParser) -> int:
    """`partition`: print who holds what, and draw it."""
    scenario: Scenario = parser.instantiate(given).scenario
    data = scenario.build(given.seed)
    counts, test_counts = data.class_counts("train"), data.class_counts("test")
    console = Console()
    console.print(partition_table(counts, test_counts), width=None if console.is_terminal else 1000, no_wrap=True)
    if given.out:
        out = Path(given.out)
        partition_figure(counts, out / "partition.png")
        write_counts(out / "partition.csv", data)
        print(f"wrote {out / 'partition.png'} and {out / 'partition.csv'}")
    return 0


def list_things(given: Namespace, parser: ArgumentParser) -> int:
    """`list`: one line for each thing a config can name."""
    if given.kind not in (None, *KINDS):
        raise ConfigError(f"list: there is no kind {given.kind!r}; there are {', '.join(KINDS)}")
    for kind in [given.kind] if given.kind else KINDS:
        table = Table(kind, "", box=None, pad_edge=False, header_style="bold")
        for name, line in things(kind).items():
            table.add_row(name, line)
        Console().print(table)
    return 0


# --- What the commands need ------------------------------------------------------------------------------------------


def build(given: Namespace, parser: ArgumentParser, run_dir: Path) -> FederatedOrchestrator:
    """The orchestrator that a parsed command line describes."""
    objects = parser.instantiate(given)
    options = {name: value for name, value in objects.items(branches=True) if "." not in name}
    for name in ("config", "resume", "out", "trainer", "run_dir"):
        options.pop(name, None)
    return FederatedOrchestrator(**options, trainer=given.trainer.as_dict(), run_dir=str(run_dir))


def plain_config(given: Namespace, parser: ArgumentParser) -> dict[str, Any]:
    """The resolved config as plain values, less what belongs to one run only."""
    config = yaml.safe_load(parser.dump(given, skip_none=False))
    return {name: value for name, value in config.items() if name not in ("config", "resume", "run_dir")}


def with_config_paths(words: Sequence[str]) -> list[str]:
    """The command line with each `--config` a path: a file as named from here, else a shipped config of that name.

    Raises:
        ConfigError: It is neither.
    """
    found = list(words)
    for i, word in enumerate(words):
        if word in ("-c", "--config") and i + 1 < len(words):
            found[i + 1] = config_path(words[i + 1])
        elif word.startswith("--config="):
            found[i] = f"--config={config_path(word.removeprefix('--config='))}"
    return found


def config_path(name: str) -> str:
    """A config file by path, or by the bare name of a shipped one."""
    if Path(name).is_file():
        return name
    shipped = files("fl_lightning.configs") / name
    if os.sep not in name and shipped.is_file():
        return str(shipped)
    raise ConfigError(
        f"--config: {name} is neither a file here nor a shipped config; `fl-lightning list configs` names those"
    )


def with_resumed_config(words: list[str]) -> list[str]:
    """The command line with the resumed run's own config, unless another is given."""
    resumed = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--resume"]
    resumed += [word.removeprefix("--resume=") for word in words if word.startswith("--resume=")]
    if not resumed or any(word in ("-c", "--config") or word.startswith("--config=") for word in words):
        return words
    return ["fit", "--config", str(config_file(Path(resumed[-1]))), *words[1:]]


def config_file(run_dir: Path) -> Path:
    """A run's `config.yaml`.

    Raises:
        ConfigError: The folder holds none.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is no run: it holds no config.yaml")
    return path


def saved_config(run_dir: Path) -> dict[str, Any]:
    """The resolved config that a run was started with."""
    return yaml.safe_load(config_file(run_dir).read_text())


def refuse_another_experiment(saved: dict[str, Any], config: dict[str, Any]) -> None:
    """Let a run go on only as the experiment it is.

    Raises:
        ConfigError: A key that alters the maths has another value; the message names each.
    """
    before, now = flatten(saved), flatten(config)
    changed = [
        f"{key} ({before.get(key)} -> {now.get(key)})"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not any(f"{key}.".startswith(f"{free}.") for free in FREE_KEYS)
    ]
    if changed:
        raise ConfigError(f"--resume: another experiment: {', '.join(changed)}; leave them as they were, or start anew")


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted keys; `init_args` and `class_path` are left out of the keys."""
    if not isinstance(config, dict):
        return {prefix: config}
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = prefix if name in ("class_path", "init_args") else f"{prefix}.{name}".lstrip(".")
        flat |= flatten(value, key)
    return flat


def new_run_dir(configs: Sequence[Any] | None) -> Path:
    """`runs/<config>/<time>-<id>`, new."""
    name = Path(str(configs[-1])).stem if configs else "run"
    return Path("runs") / name / f"{datetime.now():%Y-%m-%dT%H-%M-%S}-{secrets.token_hex(3)}"


def chosen_round(checkpoint: str, run_dir: Path) -> int | None:
    """The round that `last`, `best` or a number stands for; None is the newest sound one.

    Raises:
        ConfigError: It stands for none.
    """
    folder = CheckpointFolder(run_dir / "checkpoints")
    if checkpoint == "last":
        return None
    if checkpoint == "best":
        newest = folder.newest(report=lambda message: print(message, file=sys.stderr)) or {"callbacks": {}}
        return newest["callbacks"].get("Checkpointing", {}).get("best_round")
    if checkpoint.isdigit() and int(checkpoint) in folder.rounds():
        return int(checkpoint)
    held = ", ".join(map(str, folder.rounds())) or "none"
    raise ConfigError(f"--checkpoint: no checkpoint {checkpoint!r}; there are last, best and rounds {held}")


def things(kind: str) -> dict[str, str]:
    """Names and one-line descriptions of a kind, from the docstrings; of configs, from their first line."""
    if kind == "configs":
        folder = files("fl_lightning.configs")
        paths = sorted((p for p in folder.iterdir() if p.name.endswith(".yaml")), key=lambda p: p.name)
        return {path.name: path.read_text().splitlines()[0].lstrip("# ") for path in paths}
    module = import_module(f"fl_lightning.{'data' if kind in ('datasets', 'partitions') else kind}")
    bases = {
        "algorithms": "Algorithm",
        "datasets": "Dataset",
        "models": "Backbone",
        "partitions": "Partition",
        "callbacks": "RoundCallback",
    }
    base = getattr(module, bases[kind])
    members = (getattr(module, name) for name in module.__all__)
    classes = [m for m in members if inspect.isclass(m) and issubclass(m, base) and m is not base]
    return {cls.__name__: (inspect.getdoc(cls) or "").splitlines()[0] for cls in classes}


def one_line(error: BaseException) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split())


def _show_warning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
    print(f"fl-lightning: warning: {' '.join(str(message).split())}", file=sys.stderr)
