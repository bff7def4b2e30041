"""The command line: `fl-lightning fit | test | partition | list`."""

from __future__ import annotations

import gc
import inspect
import os
import secrets
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace
from lightning import Trainer
from rich.console import Console

from fl_lightning.catalogue import KINDS, groups
from fl_lightning.checkpoint import CheckpointFolder
from fl_lightning.cli_errors import one_line, plainly
from fl_lightning.data import Scenario
from fl_lightning.errors import CheckpointError, ConfigError, FLError
from fl_lightning.naming import run_names
from fl_lightning.orchestrator import FederatedOrchestrator
from fl_lightning.report.figures import partition_figure
from fl_lightning.report.tables import partition_table, summary_table, test_table, write_counts
from fl_lightning.rivals import with_rival

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
    "client_store",
    "logger",
    "log_clients",
    "callbacks",
    "run_dir",
    "scenario.dataset.data_dir",
    "scenario.dataset.download",
    "trainer.accelerator",
    "trainer.devices",
}


def run() -> None:
    """Entry point of the console script."""
    sys.path.append(os.getcwd())  # a class path of the user's own may lead into the working folder
    gc.freeze()  # what was imported is no garbage, and need not be looked at
    try:
        sys.exit(main())
    finally:
        gc.unfreeze()


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
            code = _dispatch(words)
        sys.stdout.flush()  # a closed pipe shows here, not when Python exits
        return code
    except SystemExit as end:
        if end.code == 0:  # --help and --print_config
            raise
        return 1  # rich found the pipe closed, or a signal made Lightning exit
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if debug:
            raise
        unforeseen = f"{type(error).__name__}: {one_line(error)}; --debug shows where"
        code, message = (error.exit_code, one_line(error)) if isinstance(error, FLError) else (1, unforeseen)
        print(f"fl-lightning: error: {message}", file=sys.stderr)
        return code


def _dispatch(words: list[str]) -> int:
    words = with_rival(with_config_paths(with_resumed_config(words)))
    parser, subparsers = build_parser()
    with plainly(subparsers["fit"]):
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
        allow_abbrev=False,
    )
    commands = {
        "fit": (fit_parser(), "Run an experiment, or go on with one."),
        "test": (_test_parser(), "Evaluate a run's checkpoint again."),
        "partition": (_partition_parser(), "Show and draw which client holds what."),
        "list": (_list_parser(), "List what can be named in a config."),
    }
    subcommands = parser.add_subcommands(required=True)
    for name, (subparser, text) in commands.items():
        subcommands.add_subcommand(name, subparser, help=text)
    return parser, {name: subparser for name, (subparser, _) in commands.items()}


def fit_parser() -> ArgumentParser:
    """The parser of an experiment's keys."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("-c", "--config", action=ActionConfigFile, help="Config file, or the name of a shipped one.")
    parser.add_argument("--resume", type=str | None, help="Folder of a run to go on with.", metavar="RUN")
    parser.add_class_arguments(FederatedOrchestrator, skip={"trainer"}, fail_untyped=False)
    rivals = "What --algorithm NAME sets beside the algorithm: a mapping by name, the path of one, or a list."
    parser.add_argument("--rivals", type=str | dict | list | None, help=rivals)
    unwanted = set(inspect.signature(Trainer).parameters) - TRAINER_KEYS
    parser.add_class_arguments(Trainer, "trainer", skip=unwanted, instantiate=False)
    logger = {"class_path": "fl_lightning.loggers.WandbRoundLogger"}
    parser.set_defaults({"trainer.devices": 1, "logger": logger, "run_dir": None})
    return parser


def _test_parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("run", type=str, help="Folder of the run.")
    parser.add_argument("--checkpoint", type=str, default="last", help="last, best, or the number of a round.")
    return parser


def _partition_parser() -> ArgumentParser:
    parser = fit_parser()
    parser.set_defaults(model="MLP", algorithm="FedAvg")  # not asked for: they do not change who holds what
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
        refuse_another_experiment(yaml.safe_load(Path(config_file(run_dir)).read_text()), config)
    else:
        run_dir = Path(given.run_dir) if given.run_dir else new_run_dir(given.config)
    orchestrator = build(given, parser, run_dir)
    name, group = names(given, parser, config) if given.logger and not given.resume else (None, None)
    summary = orchestrator.fit(bool(given.resume), config, name, group)
    Console().print(summary_table(summary))
    print(f"run: {run_dir}")
    return 0


def test(given: Namespace, parser: ArgumentParser) -> int:
    """`test`: evaluate a checkpoint of a finished or half-finished run."""
    Console().print(test_table(open_run(given.run, given.checkpoint).test()))
    return 0


def partition(given: Namespace, parser: ArgumentParser) -> int:
    """`partition`: print who holds what, and draw it."""
    with plainly(parser):
        scenario: Scenario = parser.instantiate(given).scenario
    data = scenario.build(given.seed)
    counts, test_counts = data.class_counts("train"), data.class_counts("test")
    console = Console()
    console.print(partition_table(counts, test_counts), width=None if console.is_terminal else 1000, no_wrap=True)
    if given.out:
        out = Path(given.out)
        try:
            partition_figure(counts, out / "partition.png")
            write_counts(out / "partition.csv", data)
        except OSError as error:
            raise ConfigError(f"--out: {out} cannot be written to: {error}") from error
        print(f"wrote {out / 'partition.png'} and {out / 'partition.csv'}")
    return 0


def list_things(given: Namespace, parser: ArgumentParser) -> int:
    """`list`: one line for each thing a config can name."""
    if given.kind not in (None, *KINDS):
        raise ConfigError(f"list: there is no kind {given.kind!r}; there are {', '.join(KINDS)}")
    for kind in [given.kind] if given.kind else KINDS:
        listed = groups(kind)
        width = max(len(name) for lines in listed.values() for name in lines)
        for heading, lines in listed.items():
            print(heading, *(f"  {name:<{width}}  {line}" for name, line in lines.items()), sep="\n")
    return 0


# --- What the commands need ------------------------------------------------------------------------------------------


def build(given: Namespace, parser: ArgumentParser, run_dir: Path) -> FederatedOrchestrator:
    """The orchestrator that a parsed command line describes."""
    with plainly(parser):
        objects = parser.instantiate(given)
    parameters = inspect.signature(FederatedOrchestrator).parameters
    options = {name: objects[name] for name in parameters if name not in ("trainer", "run_dir")}
    for name, value in options.items():
        if value is None and parameters[name].default is not None:
            raise ConfigError(f"{name}: null is no value for it; leave it out to get {parameters[name].default}")
    return FederatedOrchestrator(**options, trainer=given.trainer.as_dict(), run_dir=str(run_dir))


def open_run(run_dir: str | Path, checkpoint: str = "last") -> FederatedOrchestrator:
    """A run as a checkpoint left it, to look into: `open_run("runs/...").client_module(3)` is client 3's module.

    Args:
        run_dir: Folder of a finished or half-finished run.
        checkpoint: `last`, `best`, or the number of a round.

    Raises:
        ConfigError: There is no run, or no such checkpoint.
        CheckpointError: The run holds no checkpoint, or only damaged ones.
    """
    run_dir = Path(run_dir)
    parser = fit_parser()
    with plainly(parser):
        config = parser.parse_args(["--config", config_file(run_dir), "--logger", "null"])
    orchestrator = build(config, parser, run_dir)
    orchestrator.load(chosen_round(checkpoint, run_dir))
    if not orchestrator.round:
        raise CheckpointError(f"{run_dir} holds no checkpoint yet")
    return orchestrator


def plain_config(given: Namespace, parser: ArgumentParser) -> dict[str, Any]:
    """The resolved config as plain values, less what belongs to one run only."""
    config = yaml.safe_load(parser.dump(given, skip_unset=False))
    return {name: value for name, value in config.items() if name not in ("config", "resume", "rivals", "run_dir")}


def with_config_paths(words: Sequence[str]) -> list[str]:
    """The command line with each `--config` a path: a file as named from here, else a shipped config of that name."""
    found = list(words)
    for i, word in enumerate(words):
        if word in ("-c", "--config") and i + 1 < len(words):
            found[i + 1] = config_path(words[i + 1])
        elif word.startswith("--config="):
            found[i] = f"--config={config_path(word.removeprefix('--config='))}"
    return found


def config_path(name: str) -> str:
    """A config file by path, or by the bare name of a shipped one.

    Raises:
        ConfigError: There is none, or it is no YAML mapping.
    """
    path = Path(name)
    if not path.is_file():
        path = Path(str(files("fl_lightning.configs") / name))
        if os.sep in name or not path.is_file():
            hint = "`fl-lightning list configs` names those"
            raise ConfigError(f"--config: {name} is neither a file here nor a shipped config; {hint}")
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else one_line(error)
        raise ConfigError(f"--config: {name} is no readable YAML: {line}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {name} needs lines `key: value`, it holds {type(content).__name__}")
    return str(path)


def with_resumed_config(words: list[str]) -> list[str]:
    """The command line with the resumed run's own config, unless another is given."""
    if words[:1] != ["fit"]:
        return words
    resumed = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "--resume"]
    resumed += [word.removeprefix("--resume=") for word in words if word.startswith("--resume=")]
    if not resumed or any(word in ("-c", "--config") or word.startswith("--config=") for word in words):
        return words
    return ["fit", "--config", config_file(Path(resumed[-1])), *words[1:]]


def config_file(run_dir: Path) -> str:
    """A run's `config.yaml`; a folder without one is no run."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is no run: it holds no config.yaml")
    return config_path(str(path))


def refuse_another_experiment(saved: dict[str, Any], config: dict[str, Any]) -> None:
    """Let a run go on only as the experiment it is.

    Raises:
        ConfigError: A key that alters the maths has another value; the message names each.
    """
    before, now = flatten(saved), flatten(config)
    changed = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    told = [k for k in sorted(changed - FREE_KEYS) if not any(k.startswith(f"{one}.") for one in FREE_KEYS | changed)]
    if told:
        changes = ", ".join(f"{key} ({before.get(key)} -> {now.get(key)})" for key in told)
        raise ConfigError(f"--resume: another experiment: {changes}; leave them as they were, or start anew")


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted keys; `init_args` and `class_path` are left out of the keys."""
    if not isinstance(config, dict):
        return {prefix: config}
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = prefix if name in ("class_path", "init_args") else f"{prefix}.{name}".lstrip(".")
        flat |= flatten(value, key)
    return flat


def names(given: Namespace, parser: ArgumentParser, config: dict[str, Any]) -> tuple[str, str]:
    """What a run and its group are called."""
    setting = setting_of(config)
    return run_names(config_name(given.config), given.seed, setting, stated_setting(given, parser, setting))


def setting_of(config: dict[str, Any]) -> dict[str, Any]:
    """What runs share that differ in the seed: a config's keys, dotted, less those that do not alter the maths."""
    free, flat = FREE_KEYS - {"rounds"} | {"seed"}, flatten(config)
    return {key: flat[key] for key in flat if not any(f"{key}.".startswith(f"{one}.") for one in free)}


def stated_setting(given: Namespace, parser: ArgumentParser, setting: dict[str, Any]) -> dict[str, Any]:
    """The setting that the config files alone describe; of a class that the command line put in, its own defaults.

    Files that are no whole config are taken to describe all there is.
    """

    def stated(*more: str) -> dict[str, Any]:
        words = [*(f"--config={path}" for path in given.config or []), *more]
        with plainly(parser), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said once already
            return setting_of(plain_config(parser.parse_args(words), parser))

    try:
        found = stated()
    except ConfigError:
        return setting
    classes = {key.rpartition(".")[0] for key in setting} & setting.keys()  # they have keys below them
    put_in = {key: found.get(key) for key in classes if setting[key] not in (None, found.get(key))}
    with suppress(ConfigError):  # a class with arguments that must be given
        found = stated(*(f"--{key}={setting[key]}" for key in put_in)) | put_in if put_in else found
    return found


def config_name(configs: Sequence[Any] | None) -> str:
    """The name of the last config file, which a run is named after."""
    return Path(str(configs[-1])).stem if configs else "run"


def new_run_dir(configs: Sequence[Any] | None) -> Path:
    """`runs/<config>/<time>-<id>`, new."""
    return Path("runs") / config_name(configs) / f"{datetime.now():%Y-%m-%dT%H-%M-%S}-{secrets.token_hex(3)}"


def chosen_round(checkpoint: str, run_dir: Path) -> int | None:
    """The round that `last`, `best` or a number stands for; None is the newest sound one.

    Raises:
        ConfigError: It stands for none.
    """
    folder = CheckpointFolder(run_dir / "checkpoints")
    if checkpoint == "last":
        return None
    if checkpoint == "best":
        newest = folder.newest(report=warnings.warn) or {"callbacks": {}}
        best = newest["callbacks"].get("Checkpointing", {}).get("best_round")
        if best is None:
            raise ConfigError("--checkpoint: no round is the best yet; take last, or the number of a round")
        return best
    if checkpoint.isdigit() and int(checkpoint) in folder.rounds():
        return int(checkpoint)
    held = ", ".join(map(str, folder.rounds())) or "none"
    raise ConfigError(f"--checkpoint: no checkpoint {checkpoint!r}; there are last, best and rounds {held}")


def _show_warning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
    print(f"fl-lightning: warning: {one_line(message)}", file=sys.stderr)
