"""`python -m fl_lightning` is `fl-lightning`."""

import os
import sys
from contextlib import suppress

with suppress(FileNotFoundError):  # there is no working folder any more, which `run` tells of
    if sys.path[0] in ("", os.getcwd()):  # `-m` puts it first, where anybody may have put a numpy.py
        del sys.path[0]

from fl_lightning.cli.main import run

run()
