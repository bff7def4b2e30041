"""A file in a family folder is exported, listed, documented and has a config."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ALGORITHM = '''"""FedHalf: FedAvg with half of the update."""

from fl_lightning.algorithms.aggregators import ServerStep
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.loss_term import LossTerm


class HalfTerm(LossTerm):
    """A term that is zero."""

    def forward(self, step):
        return step.logits.new_zeros(())


class _Private(LossTerm):
    """A class that is not exported."""


class FedHalf(Algorithm):
    """FedAvg whose server goes half of the way.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        lr: The share of the way.
    """

    lr: float = 0.5

    def own_terms(self):
        return [HalfTerm()]

    def own_aggregator(self):
        return ServerStep(self.lr)
'''

LOOKUPS = """
import sys
from fl_lightning.core.public_names import public_classes
from fl_lightning.core.config_files import config_path, shipped
from fl_lightning.cli.catalogue import class_options, groups
assert public_classes()["FedHalf"] == "global_model.fedhalf"
assert "_Private" not in public_classes()
assert "FedHalf" in groups("algorithms")["algorithms, global model"]
assert "HalfTerm" in groups("loss_terms")["loss_terms"]
assert "lr" in class_options("algorithms", "FedHalf")
assert "digits_fedhalf.yaml" in shipped("configs")
assert "algorithm: FedHalf" in open(config_path("digits_fedhalf")).read()
assert "torch" not in sys.modules
"""

RUN = """
from fl_lightning import FedHalf, HalfTerm, algorithms
assert {"FedHalf", "HalfTerm"} <= set(algorithms.__all__)
assert algorithms.FedHalf is FedHalf
assert FedHalf().family() == "global_model"

from fl_lightning.cli.main import main
words = ["fit", "--config", "digits_fedhalf.yaml", "--algorithm.lr", "0.25", "--fast"]
assert main(words) == 0
sys.path.insert(0, sys.argv[1])
import reference
filled = reference.filled(reference.PAGES / "index.md")
assert "| [FedHalf](fedhalf.md) | global model |  | FedAvg whose server goes half of the way. | `model + 8` |" in filled
(kind,) = reference.on_page("fedhalf.md")
assert "| bytes down | `model` |" in reference.facts("fedhalf.md")
assert "| `lr` | `0.5` | The share of the way. |" in reference.options(kind)
assert reference.command(kind) == "fl-lightning fit --config digits_fedhalf.yaml"
"""


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("script", [LOOKUPS, LOOKUPS + RUN], ids=["names", "run and docs"])
def test_a_new_algorithm_needs_only_a_file_in_a_family_folder(tmp_path, script):
    package = tmp_path / "fl_lightning"
    shutil.copytree(ROOT / "fl_lightning", package, ignore=shutil.ignore_patterns("__pycache__"))
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (package / "algorithms" / "global_model" / "fedhalf.py").write_text(ALGORITHM)
    done = subprocess.run(
        [sys.executable, "-c", script, str(docs)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
