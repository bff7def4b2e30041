"""Commands that only read runs do not import torch or code of the runs."""

import subprocess
import sys

import pytest
from run_folders import write_run

COMMANDS = ["watch a --once", "compare a", "report a -o page.html", "reproduce fedskc_table1 --show", "plot a"]
CODE = """
import sys
from fl_lightning.cli.main import main
for words in sys.argv[1:]:
    assert main(words.split()) == 0, words
    drawing = "matplotlib.pyplot" if words.startswith("plot") else "matplotlib"
    assert not {"torch", "lightning", "wandb", drawing, "pandas", "evil"} & sys.modules.keys(), words
"""


@pytest.mark.thorough
def test_commands_that_read_runs_do_not_import_torch_or_code_of_runs(tmp_path):
    (tmp_path / "evil.py").write_text("open('ran', 'w')\nclass Method: ...\n")
    write_run(tmp_path / "a", {"algorithm": {"class_path": "evil.Method"}, "rounds": 3})
    done = subprocess.run([sys.executable, "-c", CODE, *COMMANDS], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").exists()
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "runs").exists()
