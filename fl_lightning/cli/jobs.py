"""The program that `sweep` and `reproduce` run for each of their runs: `fit`."""

from fl_lightning.analysis.executor import Program
from fl_lightning.cli.main import main

FIT = Program(main, preload=["fl_lightning.cli.commands.fit"])
