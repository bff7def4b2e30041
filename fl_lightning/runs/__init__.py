"""Run folders: writing, checking and reading them."""

from fl_lightning.runs.reader import DamagedRun as DamagedRun
from fl_lightning.runs.reader import Run as Run
from fl_lightning.runs.reader import open_run_folder as open_run_folder
from fl_lightning.runs.search import conditions as conditions
from fl_lightning.runs.search import find as find
from fl_lightning.runs.search import open_runs as open_runs
from fl_lightning.runs.tables import load as load
