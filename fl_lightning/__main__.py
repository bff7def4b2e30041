"""`python -m fl_lightning` is `fl-lightning`."""

import os
import sys

if sys.path[0] in ("", os.getcwd()):  # `-m` puts the working folder first, where anybody may have put a numpy.py
    del sys.path[0]

from fl_lightning.cli import run

run()
