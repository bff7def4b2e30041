"""How the jobs of `sweep` and `reproduce` run `fit`."""

from fl_lightning.analysis.executor import Program
from fl_lightning.cli.main import main

FIT = Program(main, preload=["fl_lightning.cli.commands.fit"])
