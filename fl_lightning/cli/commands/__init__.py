"""The commands of `fl-lightning`, one file each: `parser()` builds its arguments, `main(given, parser)` runs it."""

COMMANDS = {
    "fit": "Run an experiment, or go on with one.",
    "test": "Evaluate a run's checkpoint again.",
    "watch": "Follow a running experiment in the terminal.",
    "partition": "Show and draw which client holds what.",
    "compare": "Set groups of runs side by side.",
    "report": "Draw runs as one HTML page.",
    "export": "Write a run's model to a file.",
    "sweep": "Carry a W&B sweep file out here, without a server.",
    "reproduce": "Run a paper's table, and show it beside the paper's.",
    "list": "List what can be named in a config.",
    "completion": "Print what makes a shell complete commands, options and names.",
}
