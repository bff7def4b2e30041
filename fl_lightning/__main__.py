"""`python -m fl_lightning` is `fl-lightning`."""

from fl_lightning.cli import run

run()
