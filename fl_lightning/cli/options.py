"""The command-line arguments of each command: one table for parsers, help texts and shell completion.

The keys of an experiment, which `fit` and `partition` take, are the arguments of `FederatedOrchestrator`, read from its
source. Only `command_parser` imports torch, for those two commands.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from fl_lightning.cli.catalogue import KINDS
from fl_lightning.cli.experiment_parser import EXPERIMENT_DEFAULTS, experiment_parser
from fl_lightning.cli.signatures import Parameter, find_class, parameters

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

Option = dict[str, Any]
"""An option of a help text: `flags` (none for a positional argument), `metavar`, `help`, and optionally `nargs`,
`choices`, `default`, and `needed` if it is required."""

Keywords = dict[str, Any]
"""Keyword arguments of `add_argument`."""


def switch(help: str) -> Keywords:
    """Return the keywords of argparse's `add_argument` for an option without a value, such as `--fast`."""
    return {"action": "store_true", "help": help}


def value(kind: Any, help: str, **more: Any) -> Keywords:
    """Return the keywords of argparse's `add_argument` for an argument with a value of the given type."""
    return {"type": kind, "help": help, **more}


RUN = value(str, "Folder of the run.", metavar="RUN")
RUNS = value(str, "Folders of runs, at any depth.", nargs="+", metavar="RUN")
CHECKPOINT = value(str, "last, best, or the number of a round.", default="last", metavar="ROUND")
TRUST = switch("Run the code that another user's run names.")
ONLY_RUNS = "Only runs with these settings. KEY=[a, b] accepts either value."
WHERE = value(str, ONLY_RUNS, nargs="+", default=[], metavar="KEY=VALUE")
BY = value(str, "Settings that define the groups: a,b,c. The end of a key is enough.", default="", metavar="KEYS")
UNFINISHED = switch("Include unfinished runs, with the rounds they have.")
WORKERS = value(int, "Number of runs at a time.", default=1, metavar="N")
THREADS = value(
    int | None,
    "Torch's threads for each; by default OMP_NUM_THREADS, or the cores divided by --workers.",
    metavar="N",
)
REFERENCE = value(str, "Test against the group with KEY=VALUE, or of this algorithm.", nargs="+", metavar="GROUP")
PERCENT = switch("Show the metric in percent.")
FORMAT = value(Literal["table", "csv", "latex", "markdown"], "Format of the output.", default="table")
TARGETS = "Values of the metric: report when each was reached, and the cost."
SCALE = "Shrink every run: multiply rounds and training samples by this, rounded up."
SHELL = 'The shell. To install, add to ~/.bashrc: eval "$(fl-lightning completion bash)"'
TEST_SET = "Evaluate on the test samples, also in a run with scenario.validation_share."
FIGURE_FILE = "The file to write. Its ending is the format: .pdf, .svg or .png."
FIGURE_KIND = "Curves, bars of the last values, distributions over clients, or bubbles of the partition."
FIGURE_METRIC = "The metric, as in compare; for clients a column of clients.csv, by default acc."
CITED = "Methods, datasets and other classes, or folders of runs; fl-lightning itself by default."
FIGURE_WIDTHS = Literal[
    "column", "text", "neurips", "icml-column", "icml-text", "ieee-column", "ieee-text", "nature-column", "nature-text"
]
VENUES = ", ".join(get_args(FIGURE_WIDTHS)[2:])
FIGURE_WIDTH = f"A number of inches, or the width of a venue: {VENUES}. column and text are those of ICML."
FIGURE_FONT = "sans, serif (similar to Times), or the name of an installed font."
FONT_SIZE = "Size of axis labels in points; ticks and legends are one point smaller."
EXPORT_FILE = (
    "The file to write. Its ending is the format: .pt (state dict), .onnx (ONNX), .ts (TorchScript) or .ckpt "
    "(Lightning checkpoint)."
)
RUN_WORDS: dict[str, Keywords] = {
    "--resume": value(str | None, "Folder of a run to resume.", metavar="RUN"),
    "--trust": TRUST,
    "--fast": switch("Dry run of two short rounds on a few samples, which leaves no files."),
}

MULTIRUN: dict[str, Keywords] = {
    "--seeds": value(
        int, "Run with each of these seeds, and compare. The same command resumes.", nargs="*", metavar="SEED"
    ),
    "-m --multirun": value(str, "Run each combination of these values, and compare.", nargs="*", metavar="KEY=A,B"),
    "--workers": WORKERS,
    "--threads": THREADS,
    "--out": value(str | None, "Folder of the runs; runs/multirun/CONFIG by default.", metavar="FOLDER"),
    "--reference": REFERENCE,
    "--percent": PERCENT,
    "--format": FORMAT,
}
"""Options of `fit` for several runs. They have a parser of their own, `multirun`."""

OPTIONS: dict[str, dict[str, Keywords]] = {
    "fit": RUN_WORDS | MULTIRUN,
    "multirun": MULTIRUN | {"words": value(str, "Command line of the runs.", nargs="*")},
    "test": {"run": RUN, "--checkpoint": CHECKPOINT, "--test_set": switch(TEST_SET), "--trust": TRUST},
    "watch": {
        "run": value(
            str, "Folder of the run. For a folder of runs, the newest unfinished one is shown.", metavar="RUN"
        ),
        "--every": value(float, "Seconds between updates.", default=1.0, metavar="SECONDS"),
        "--once": switch("Print the current state and exit. Without a terminal, this is the default."),
    },
    "partition": {
        **{name: words | {"help": SUPPRESS} for name, words in RUN_WORDS.items()},
        "--out": value(str | None, "Folder to write the figure (PNG) and the table (CSV) to.", metavar="FOLDER"),
        "--export": switch("With --out, write each client's samples to a folder of its own, for `fl-lightning node`."),
    },
    "deploy": {
        **{name: words | {"help": SUPPRESS} for name, words in RUN_WORDS.items()},
        "--out": value(str, "Folder to write the Flower app to.", default="app", metavar="FOLDER"),
        "--test": value(str | None, "Folder or .npz file on the server with a global test set.", metavar="FILE"),
    },
    "node": {
        "site": value(str, "File that describes this client and its data.", metavar="FILE"),
        "--superlink": value(str, "Address of Flower's SuperLink.", default="127.0.0.1:8000", metavar="HOST:PORT"),
        "--certificate": value(str | None, "Certificate of the authority that signed the SuperLink's.", metavar="FILE"),
        "--key": value(str | None, "This machine's private key, an OpenSSH key on an elliptic curve.", metavar="FILE"),
        "--state": value(str, "Folder for the client's state between rounds.", default="state", metavar="FOLDER"),
    },
    "cluster-check": {name: words | {"help": SUPPRESS} for name, words in RUN_WORDS.items()},
    "compare": {
        "runs": RUNS,
        "--where": WHERE,
        "--by": BY,
        "--across": value(str | None, "The setting whose values become columns; --by need not name it.", metavar="KEY"),
        "--architectures": switch("Compare the clients with each network of a Mixed: a column for each architecture."),
        "--metric": value(
            str | None, "By default global/acc, or client/acc_mean, or mae, of metrics.csv.", metavar="COLUMN"
        ),
        "--mode": value(Literal["max", "min"] | None, "Direction of the metric; by default its own."),
        "--target": value(float, TARGETS, nargs="+", default=[], metavar="VALUE"),
        "--reference": REFERENCE,
        "--unfinished": UNFINISHED,
        "--percent": PERCENT,
        "--format": FORMAT,
    },
    "plot": {
        "runs": RUNS,
        "-o --out": value(str, FIGURE_FILE, default="figure.pdf", metavar="FILE"),
        "--kind": value(Literal["curves", "bars", "clients", "partition"], FIGURE_KIND, default="curves"),
        "--x": value(Literal["round", "bytes", "seconds", "simulated"], "The x axis of curves.", default="round"),
        "--y": value(str | None, FIGURE_METRIC, metavar="COLUMN"),
        "--where": WHERE,
        "--by": BY,
        "--across": value(str | None, "The setting whose values get axes, or clusters, of their own.", metavar="KEY"),
        "--unfinished": UNFINISHED,
        "--percent": PERCENT,
        "--y_limits": value(float, "Ends of the y axis, as drawn, such as 60 100.", nargs=2, metavar=("LOW", "HIGH")),
        "--width": value(float | FIGURE_WIDTHS, FIGURE_WIDTH, default="column", metavar="VENUE|INCHES"),
        "--font": value(str, FIGURE_FONT, default="sans", metavar="NAME"),
        "--font_size": value(float, FONT_SIZE, default=8, metavar="POINTS"),
    },
    "report": {
        "runs": RUNS,
        "-o --out": value(str, "The page to write.", default="report.html", metavar="FILE"),
        "--where": WHERE,
        "--reference": REFERENCE,
    },
    "export": {
        "run": RUN,
        "-o --out": value(str | None, EXPORT_FILE, metavar="FILE"),
        "--client": value(int | None, "Export client K's next model; the global one by default.", metavar="K"),
        "--prepare": switch("Include the scaling and normalization, so that the model takes stored samples."),
        "--merge": switch("Add LoRA adapters to the weights of their layers, so that the model needs no peft."),
        "--peft": switch("Write the adapters as a folder for peft's PeftModel.from_pretrained; -o names the folder."),
        "--checkpoint": CHECKPOINT,
        "--trust": TRUST,
    },
    "sweep": {
        "sweep": value(str, "A W&B sweep file, or the name of an included one.", nargs="?", metavar="FILE"),
        "--workers": WORKERS,
        "--threads": THREADS,
        "--count": value(int | None, "Number of trials; random and bayes need it.", metavar="N"),
        "--out": value(str | None, "The sweep's folder; runs/sweeps/NAME by default.", metavar="FOLDER"),
        "--seed": value(int, "Seed of random and bayes.", default=0, metavar="SEED"),
        "--set": value(str, "Set a key in every trial.", action="append", metavar="KEY=VALUE"),
    },
    "benchmark": {
        "benchmark": value(str, "A benchmark file, or the name of an included one.", metavar="FILE"),
        "--workers": WORKERS,
        "--threads": THREADS,
        "--set": value(str, "Set keys in every run.", nargs="+", metavar="KEY=VALUE"),
        "--out": value(str | None, "The benchmark's folder; runs/benchmarks/NAME by default.", metavar="FOLDER"),
        "--percent": PERCENT,
        "--format": FORMAT,
    },
    "reproduce": {
        "table": value(str, "A table's file, or an included one's name: `fl-lightning list papers`.", metavar="TABLE"),
        "--rows": value(str, "Rows, by name or part of a name; all by default.", nargs="+", metavar="NAME"),
        "--columns": value(str, "Columns, by name or part of a name; all by default.", nargs="+", metavar="NAME"),
        "--seeds": value(int, "Seeds; by default those of the table.", nargs="+", metavar="SEED"),
        "--scale": value(float, SCALE, default=1.0, metavar="FACTOR"),
        "--scale_epochs": switch("Let --scale multiply local epochs, too."),
        "--set": value(str, "Set keys in every run; overrides the table and --scale.", nargs="+", metavar="KEY=VALUE"),
        "--workers": WORKERS,
        "--threads": THREADS,
        "--out": value(str | None, "Folder of the runs; runs/reproduce/TABLE by default.", metavar="FOLDER"),
        "--show": switch("Show finished runs without starting any."),
        "--format": value(Literal["table", "markdown", "csv"], "Format of the output.", default="table"),
    },
    "new": {
        "name": value(str, "Name of the project's folder and module, such as my_method.", metavar="NAME"),
        "--data": value(Literal["images", "table", "text"], "The kind of data of the config.", default="images"),
    },
    "cite": {"names": value(str, CITED, nargs="*", metavar="NAME")},
    "list": {"kind": value(str, " | ".join(KINDS), nargs="?", metavar="NAME")},
    "completion": {
        "shell": value(Literal["bash", "zsh"], SHELL),
    },
}
"""The arguments of each command's parser: flags, and keyword arguments of `add_argument`."""

EXPERIMENTS = ("fit", "partition", "deploy", "cluster-check")
"""Commands that take the keys of an experiment, too."""
PARTITION_DEFAULTS = {"model": "MLP", "algorithm": "FedAvg"}
"""Defaults in `partition` of keys that `fit` requires and that do not influence the partition."""

SWITCHES = ("print_config", "trust", "fast")
"""Options of `fit` without a value. `partition` accepts them, too."""
OPTION_WORD = re.compile("-{1,2}[A-Za-z]")
"""Matches the beginning of a word that is an option. `-1` is a value."""

BASELINES = "Settings that --algorithm NAME adds: a mapping by name, the path of one, or a list."
CONFIG = "Config file, or the name of an included one. Later files override earlier ones."
BOOL = {"metavar": "true|false", "default": False, "choices": ["true", "false"]}
PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"]
TRAINER: dict[str, Option] = {
    "accelerator": {"metavar": "NAME", "default": "auto"}
    | {"help": "Hardware to train on, such as `cpu`, `gpu`, `mps` or `auto`."},
    "devices": {"metavar": "VALUE", "default": 1, "help": "1 for any device, or a list with one index, such as [2]."},
    "precision": {"metavar": "NAME", "default": "32-true", "choices": PRECISIONS}
    | {"help": "Floating-point precision, such as `bf16-mixed`."},
    "max_epochs": {"metavar": "INT", "default": 1, "help": "Local epochs in each round, unless max_steps is given."},
    "max_steps": {"metavar": "INT", "default": -1}
    | {"help": "Maximum of local optimizer steps in each round; -1 for none."},
    "limit_train_batches": {"metavar": "NUMBER", "default": 1.0, "help": "Batches in an epoch, or a fraction of them."},
    "accumulate_grad_batches": {"metavar": "INT", "default": 1, "help": "Batches per optimizer step."},
    "gradient_clip_val": {"metavar": "NUMBER", "help": "Maximum norm or value of the gradient; no limit by default."},
    "gradient_clip_algorithm": {"metavar": "TEXT", "default": "norm"}
    | {"help": "Clip the gradient's `norm` or each `value`."},
    "deterministic": {"metavar": "true|false|warn", "default": False, "choices": ["true", "false", "warn"]}
    | {"help": "Use deterministic algorithms only; `warn` reports operations that have none."},
    "benchmark": BOOL | {"help": "Let cuDNN search for its fastest algorithms."},
    "detect_anomaly": BOOL | {"help": "Find the operation that makes a gradient NaN. Slow."},
}
"""The options of Lightning's `Trainer` that a client's fit takes. The defaults are what null means there."""


def command_parser(command: str) -> ArgumentParser:
    """Build a command's jsonargparse parser. For `fit` and `partition` it includes the experiment's config keys.

    The parser of `fit` does not have the options `MULTIRUN`.
    """
    from jsonargparse import ArgumentParser  # half a second

    is_experiment = command in EXPERIMENTS
    parser = experiment_parser() if is_experiment else ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for flags, keywords in (RUN_WORDS if command == "fit" else OPTIONS[command]).items():
        parser.add_argument(*flags.split(), **keywords)
    if command == "partition":
        parser.set_defaults(PARTITION_DEFAULTS)
    return parser


def key_of(flags: str) -> str:
    """Return the key of an option given its flags: `out` for `-o --out`."""
    return flags.rpartition("-")[2]


def is_multirun(words: Sequence[str]) -> bool:
    """Return whether a command line of `fit` has an option for several runs, such as `--seeds` or `--multirun`."""
    flags = " ".join(MULTIRUN).split()
    return any(word.partition("=")[0] in flags for word in words)


def split_options(
    words: Sequence[str], options: Mapping[str, Option]
) -> Iterator[tuple[str, list[str], Sequence[str]]]:
    """Split a command line into its options, and yield the key of each, its values and its part of the command line.

    A word that belongs to no option is yielded with the key "".

    Args:
        words: The command line after the command.
        options: The known options by key. Others have one value.

    Yields:
        The key of the option, its values, and all its words: for `--out x`, these are `out`, `[x]` and `[--out, x]`.
    """
    rest = deque(words)
    while rest:
        word = rest.popleft()
        flag, apart, value = word.partition("=")
        if not OPTION_WORD.match(word):
            yield "", [word], [word]
            continue
        key = next((key for key, one in options.items() if flag in one.get("flags", ())), flag.lstrip("-"))
        values = [value] if apart else []
        nargs = options.get(key, {}).get("nargs", 1)
        if nargs in ("*", "+"):
            while rest and not OPTION_WORD.match(rest[0]):
                values.append(rest.popleft())
        elif nargs == 1 and not apart and key not in SWITCHES and rest:
            values.append(rest.popleft())
        yield key, values, [word, *values[bool(apart) :]]


@cache
def options_of(command: str) -> dict[str, Option]:
    """Return a command's options by name, for help texts and completion. Does not import torch."""
    found = _experiment_options() if command in EXPERIMENTS else {}
    for flags, keywords in OPTIONS[command].items():
        if keywords["help"] != SUPPRESS:
            found[key_of(flags)] = _described(flags.split(), keywords)
    if command == "partition":
        for name, default in PARTITION_DEFAULTS.items():
            found[name] = {key: value for key, value in found[name].items() if key != "needed"} | {"default": default}
    return found


def _experiment_options() -> dict[str, Option]:
    """Return the help-text options of an experiment's keys, which are read from the sources of two classes.

    The argument `training` is no key: those of `LocalTraining` are keys instead. `trainer` has a table of its own.
    """
    classes = ("orchestrator.FederatedOrchestrator", "client.local_training.LocalTraining")
    keys = {one.name: one.option for path in classes for one in parameters(find_class(f"fl_lightning.{path}"))}
    keys = {name: option for name, option in keys.items() if name.partition(".")[0] not in ("training", "trainer")}
    keys["logger"]["default"] = EXPERIMENT_DEFAULTS["logger"]["class_path"].rpartition(".")[2]
    keys["run_dir"]["metavar"] = "FOLDER"
    keys["baselines"] = {"metavar": "FILE", "help": BASELINES}
    keys |= {f"trainer.{name}": option for name, option in TRAINER.items()}
    return {
        "config": {"flags": ["-c", "--config"], "metavar": "FILE", "help": CONFIG},
        "print_config": {"flags": ["--print_config"], "nargs": 0, "help": "Print all settings as a config, and exit."},
        **{name: {"flags": [f"--{name}"], **option} for name, option in keys.items()},
    }


def _described(flags: list[str], keywords: Keywords) -> Option:
    """Convert keywords of argparse's `add_argument` to the dict that describes the option in help texts."""
    hint = keywords.get("type", bool)
    parts = [hint] if get_origin(hint) is Literal else get_args(hint) or [hint]
    kinds = [get_args(part) if get_origin(part) is Literal else part.__name__ for part in parts if part is not NoneType]
    found = Parameter("", tuple(kinds), keywords.get("default"), keywords["help"]).option
    found |= {key: keywords[key] for key in ("metavar", "nargs") if key in keywords}
    if flags[0].startswith("-"):
        found["flags"] = flags
    elif keywords.get("nargs") != "?":
        found["needed"] = True
    if keywords.get("action") == "store_true":
        return {"flags": flags, "nargs": 0, "help": keywords["help"]}
    return found
