"""Run `fl-lightning` as `python -m fl_lightning`."""

import os
import sys
from contextlib import suppress

with suppress(FileNotFoundError):  # the working folder was deleted; `run` reports it
    if sys.path[0] in ("", os.getcwd()):  # `-m` adds it, but it may contain another numpy.py
        del sys.path[0]

from fl_lightning.cli.main import run

run()
