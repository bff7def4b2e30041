"""The commands of `fl-lightning`, one file each.

`main(given, parser)` runs a command. If a file has a function `expand(line)`, it completes the command line before it
is parsed. The file `multirun` implements `fit` with `--seeds` or `--multirun`.
"""

COMMANDS = {
    "fit": "Run an experiment, or resume one.",
    "test": "Evaluate a checkpoint of a run.",
    "watch": "Follow a running experiment in the terminal.",
    "partition": "Show how the data are partitioned among clients.",
    "deploy": "Write a Flower app that runs an experiment on the clients' own machines.",
    "node": "Train a client of a federation on this machine, with its own data.",
    "compare": "Compare groups of runs.",
    "plot": "Draw a figure of runs for a paper.",
    "report": "Write runs as an HTML report.",
    "export": "Write a run's model to a file.",
    "sweep": "Run a W&B sweep file on this machine, without a server.",
    "benchmark": "Tune methods with equal budgets, and compare them.",
    "reproduce": "Run a paper's table and compare with its numbers.",
    "new": "Write a small project: a method, a config, a sweep, a test.",
    "cite": "Print BibTeX of methods and data, or of all that a run used.",
    "list": "List the names that a config can use.",
    "completion": "Print the script for shell completion.",
}

NEED_TORCH = ("fit", "test", "partition", "deploy", "node", "export")
"""Commands that import torch, which takes seconds."""
