"""The arguments of each command: one table for parsers, help texts and shell completion.

The keys of an experiment, which `fit` and `partition` take, are the arguments of `FederatedOrchestrator`, read from its
source. Only `command_parser` imports torch, for those two commands.
"""

from __future__ import annotations

from argparse import SUPPRESS
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from fl_lightning.cli.catalogue import KINDS
from fl_lightning.cli.experiment_parser import EXPERIMENT_DEFAULTS, experiment_parser
from fl_lightning.cli.signatures import Parameter, find_class, parameters

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

Option = dict[str, Any]
"""An option of a help text: `flags` (none for a positional argument), `metavar`, `help`, and where it has them
`nargs`, `choices`, `default`, and `needed` where it must be given."""

Keywords = dict[str, Any]

SWITCH: Keywords = {"action": "store_true"}
RUN: Keywords = {"type": str, "help": "Folder of the run."}
CHECKPOINT: Keywords = {"type": str, "default": "last", "help": "last, best, or the number of a round."}
TRUST = SWITCH | {"help": "Run the code that a run of somebody else names."}
WHERE: Keywords = {"type": str, "nargs": "+", "default": [], "metavar": "KEY=VALUE"}
THREADS: Keywords = {
    "type": int | None,
    "help": "Torch's threads for each of them; by default the cores divided by --workers.",
}
DRY_RUN = "Dry run of two short rounds on a few samples, which leaves no files."
RUN_WORDS: dict[str, Keywords] = {
    "--resume": {"type": str | None, "metavar": "RUN", "help": "Folder of a run to resume."},
    "--trust": TRUST,
    "--fast": SWITCH | {"help": DRY_RUN},
}

OPTIONS: dict[str, dict[str, Keywords]] = {
    "fit": RUN_WORDS,
    "test": {"run": RUN, "--checkpoint": CHECKPOINT, "--trust": TRUST},
    "watch": {
        "run": {"type": str, "help": "Folder of the run. For a folder of runs, the newest unfinished one is shown."},
        "--every": {"type": float, "default": 1.0, "help": "Seconds between updates."},
        "--once": SWITCH | {"help": "Print the present state and exit. This is what happens without a terminal."},
    },
    "partition": {
        **{name: words | {"help": SUPPRESS} for name, words in RUN_WORDS.items()},
        "--out": {"type": str | None, "help": "Folder to write the figure (PNG) and the table (CSV) to."},
    },
    "compare": {
        "runs": {"type": str, "nargs": "+", "metavar": "RUN", "help": "Folders of runs, at any depth."},
        "--where": WHERE | {"help": "Only runs with these settings. KEY=[a, b] accepts either value."},
        "--by": {"type": str, "default": "", "help": "Settings that define the groups: a,b,c. Ends of keys will do."},
        "--across": {"type": str | None, "metavar": "KEY", "help": "The setting whose values become columns."},
        "--metric": {
            "type": str | None,
            "help": "A column of metrics.csv; by default global/acc, or else client/acc_mean.",
        },
        "--mode": {"type": Literal["max", "min"] | None, "help": "Direction of the metric; by default its own."},
        "--target": {
            "type": float,
            "nargs": "+",
            "default": [],
            "help": "Values of the metric: report when each was reached, and the cost.",
        },
        "--reference": {
            "type": str,
            "nargs": "+",
            "help": "Test against the group with KEY=VALUE, or of this algorithm.",
        },
        "--unfinished": SWITCH | {"help": "Include unfinished runs, with the rounds they have."},
        "--format": {
            "type": Literal["table", "csv", "latex", "markdown"],
            "default": "table",
            "help": "Format of the output.",
        },
    },
    "report": {
        "runs": {"type": str, "nargs": "+", "metavar": "RUN", "help": "Folders of runs, at any depth."},
        "-o --out": {"type": str, "default": "report.html", "metavar": "FILE", "help": "The page to write."},
        "--where": WHERE | {"help": "Only runs with these settings. KEY=[a, b] accepts either value."},
    },
    "export": {
        "run": RUN,
        "-o --out": {
            "type": str | None,
            "metavar": "FILE",
            "help": "The file to write. Its ending is the format: .pt (state dict), .onnx (ONNX), .ts (TorchScript) or "
            ".ckpt (Lightning checkpoint).",
        },
        "--client": {"type": int | None, "metavar": "K", "help": "Export client K's model; the global one by default."},
        "--prepare": SWITCH
        | {"help": "Include the scaling and normalization, so that the model takes stored samples."},
        "--checkpoint": CHECKPOINT,
        "--trust": TRUST,
    },
    "sweep": {
        "sweep": {"type": str, "nargs": "?", "help": "A W&B sweep file, or the name of a shipped one."},
        "--workers": {"type": int, "default": 1, "help": "Number of trials that run at a time."},
        "--threads": THREADS,
        "--count": {"type": int | None, "help": "Number of trials; random and bayes need it."},
        "--out": {"type": str | None, "help": "The sweep's folder; runs/sweeps/NAME by default."},
        "--seed": {"type": int, "default": 0, "help": "Seed of random and bayes."},
        "--set": {"type": str, "action": "append", "metavar": "KEY=VALUE", "help": "Set a key in every trial."},
    },
    "reproduce": {
        "table": {"type": str, "help": "A table's file, or the name of a shipped one: `fl-lightning list papers`."},
        "--rows": {"type": str, "nargs": "+", "help": "Rows, by name or part of a name; all by default."},
        "--columns": {"type": str, "nargs": "+", "help": "Columns, by name or part of a name; all by default."},
        "--seeds": {"type": int, "nargs": "+", "help": "Seeds; by default those of the table."},
        "--scale": {
            "type": float,
            "default": 1.0,
            "help": "Shrink every run: multiply rounds, local epochs and training samples by this, rounded up.",
        },
        "--set": {
            "type": str,
            "nargs": "+",
            "metavar": "KEY=VALUE",
            "help": "Set keys in every run; overrides the table and --scale.",
        },
        "--workers": {"type": int, "default": 1, "help": "Number of runs at a time."},
        "--threads": THREADS,
        "--out": {"type": str | None, "help": "Folder of the runs; runs/reproduce/TABLE by default."},
        "--show": SWITCH | {"help": "Show finished runs without starting any."},
        "--format": {"type": Literal["table", "markdown", "csv"], "default": "table", "help": "Format of the output."},
    },
    "list": {"kind": {"type": str, "nargs": "?", "help": " | ".join(KINDS)}},
    "completion": {
        "shell": {
            "type": Literal["bash", "zsh"],
            "help": 'The shell. To install, add to ~/.bashrc: eval "$(fl-lightning completion bash)"',
        }
    },
}
"""The arguments of each command's parser: flags, and keyword arguments of `add_argument`."""

EXPERIMENTS = ("fit", "partition")
"""Commands that take the keys of an experiment, too."""
PARTITION_DEFAULTS = {"model": "MLP", "algorithm": "FedAvg"}
"""What `partition` does not ask for, because it has no influence on the partition."""

BASELINES = "Settings that --algorithm NAME adds: a mapping by name, the path of one, or a list."
CONFIG = "Config file, or the name of a shipped one. Later files override earlier ones."
TRAINER: dict[str, Option] = {
    "accelerator": {
        "metavar": "NAME",
        "default": "auto",
        "help": "Hardware to train on, such as `cpu`, `gpu`, `mps` or `auto`.",
    },
    "devices": {"metavar": "VALUE", "default": 1, "help": "1 for any device, or a list with one index, such as [2]."},
    "precision": {
        "metavar": "NAME",
        "default": "32-true",
        "choices": ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"],
        "help": "Floating-point precision, such as `bf16-mixed`.",
    },
    "max_epochs": {"metavar": "INT", "default": 1, "help": "Local epochs in each round, unless max_steps is given."},
    "max_steps": {
        "metavar": "INT",
        "default": -1,
        "help": "Maximum of local optimizer steps in each round; -1 for none.",
    },
    "limit_train_batches": {"metavar": "NUMBER", "default": 1.0, "help": "Batches in an epoch, or a fraction of them."},
    "accumulate_grad_batches": {"metavar": "INT", "default": 1, "help": "Batches per optimizer step."},
    "gradient_clip_val": {"metavar": "NUMBER", "help": "Maximum norm or value of the gradient; no limit by default."},
    "gradient_clip_algorithm": {
        "metavar": "TEXT",
        "default": "norm",
        "help": "Clip the gradient's `norm` or each `value`.",
    },
    "deterministic": {
        "metavar": "true|false|warn",
        "default": False,
        "choices": ["true", "false", "warn"],
        "help": "Use deterministic algorithms only; `warn` reports operations that have none.",
    },
    "benchmark": {
        "metavar": "true|false",
        "default": False,
        "choices": ["true", "false"],
        "help": "Let cuDNN search for its fastest algorithms.",
    },
    "detect_anomaly": {
        "metavar": "true|false",
        "default": False,
        "choices": ["true", "false"],
        "help": "Find the operation that makes a gradient NaN. Slow.",
    },
}
"""The options of Lightning's `Trainer` that a client's fit takes. The defaults are what null means there."""


def command_parser(command: str) -> ArgumentParser:
    """Build the parser of a command."""
    from jsonargparse import ArgumentParser  # half a second

    is_experiment = command in EXPERIMENTS
    parser = experiment_parser() if is_experiment else ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for flags, keywords in OPTIONS[command].items():
        parser.add_argument(*flags.split(), **keywords)
    if command == "partition":
        parser.set_defaults(PARTITION_DEFAULTS)
    return parser


@cache
def options_of(command: str) -> dict[str, Option]:
    """Return the options of a command by name."""
    found = _experiment_options() if command in EXPERIMENTS else {}
    for flags, keywords in OPTIONS[command].items():
        if keywords["help"] != SUPPRESS:
            found[flags.rpartition("-")[2]] = _described(flags.split(), keywords)
    if command == "partition":
        for name, default in PARTITION_DEFAULTS.items():
            found[name] = {key: value for key, value in found[name].items() if key != "needed"} | {"default": default}
    return found


def _experiment_options() -> dict[str, Option]:
    homes = ("orchestrator.FederatedOrchestrator", "client.local_training.LocalTraining")
    keys = {one.name: one.option for home in homes for one in parameters(find_class(f"fl_lightning.{home}"))}
    keys = {name: option for name, option in keys.items() if name.partition(".")[0] not in ("training", "trainer")}
    keys["logger"]["default"] = EXPERIMENT_DEFAULTS["logger"]["class_path"].rpartition(".")[2]
    keys["baselines"] = {"metavar": "VALUE", "help": BASELINES}
    keys |= {f"trainer.{name}": option for name, option in TRAINER.items()}
    return {
        "config": {"flags": ["-c", "--config"], "metavar": "FILE", "help": CONFIG},
        "print_config": {"flags": ["--print_config"], "nargs": 0, "help": "Print all settings as a config, and exit."},
        **{name: {"flags": [f"--{name}"], **option} for name, option in keys.items()},
    }


def _described(flags: list[str], keywords: Keywords) -> Option:
    """Return an argument of a parser as an option."""
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
