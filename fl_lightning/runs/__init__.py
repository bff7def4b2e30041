"""Run folders: writing, checking and reading them."""

from fl_lightning.runs.reader import DamagedRun as DamagedRun
from fl_lightning.runs.reader import Run as Run
from fl_lightning.runs.reader import conditions as conditions
from fl_lightning.runs.reader import find as find
from fl_lightning.runs.reader import load as load
from fl_lightning.runs.reader import open_run_folder as open_run_folder
from fl_lightning.runs.reader import open_runs as open_runs
