"""docs/your-data.md: its snippets run in their order, on files laid out as it shows."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from commands import rows, run
from layouts import table, write_csv, write_image_folder, write_image_table, write_sites, write_text_table

from fl_lightning.cli.catalogue import descriptions
from fl_lightning.core.config_files import shipped_text
from fl_lightning.data import Table, TorchDataset
from fl_lightning.data.datasets import LoadedData

PAGE = (Path(__file__).parents[2] / "docs" / "your-data.md").read_text()
BLOCKS = re.findall(r'```(bash|python|yaml)(?: title="(.+?)")?\n(.*?)```', PAGE, re.S)
QUICK = ["--trainer.accelerator=cpu", "--trainer.precision=32-true", "--trainer.max_steps=1", "--logger=null"]
QUICK += ["--scenario.clients=2", "--rounds=1"]


def write_files_of_the_page() -> None:
    write_image_folder(Path("photos"), n=30)
    columns = table()
    shown = {"age": "age", "income": "income", "town": "town", "clinic": "hospital", "label": "ill"}
    names = shown | {"flu": "flu", "cold": "cold"}
    write_csv(Path("patients.csv"), {names[name]: columns[name] for name in names})
    write_text_table(Path("reviews.csv"))
    write_sites(Path("xray"), n=120)
    write_image_table(Path("images.csv"))


@pytest.mark.thorough
def test_the_snippets_of_the_page_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets").disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write_files_of_the_page()
    names: dict[str, object] = {}
    commands = 0
    for kind, title, block in BLOCKS:
        if title:
            Path(title).write_text(block)
        elif kind == "python":
            exec(block, names)
        if kind == "bash":
            for command in block.replace("\\\n", " ").splitlines():
                words = shlex.split(command)
                assert words[0] == "fl-lightning"
                code, _, err = run(*words[1:], *QUICK, "--run_dir", f"run{commands}")
                assert code == 0, f"{command}\n{err}"
                assert len(rows(Path(f"run{commands}"))) == 1
                commands += 1
    assert commands == 11


@pytest.mark.thorough
def test_the_configs_of_the_page_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files_of_the_page()
    several, fake = (yaml.safe_load(block)["scenario"]["dataset"] for kind, _, block in BLOCKS if kind == "yaml")
    data = Table(**several["init_args"]).load()
    assert data.y_train.shape[1] == 2
    assert data.in_shape == (5,)
    assert fake["class_path"] == TorchDataset.__name__
    Path("fake.yaml").write_text(yaml.safe_dump({"scenario": {"dataset": fake}}))
    configs = ["--config", "digits_fedavg.yaml", "--config", "fake.yaml"]
    code, out, err = run("fit", *configs, *QUICK, "--run_dir", "run")
    assert code == 0, out + err


def test_the_configs_for_your_own_data_train_in_mixed_precision() -> None:
    configs = re.findall(r"^\| .* \| `(\w+_fedavg\.yaml)` \|$", PAGE, re.M)
    assert len(configs) == 8
    for config in configs:
        assert yaml.safe_load(shipped_text(config, "configs"))["trainer"]["precision"] == "bf16-mixed"
    assert "`trainer.precision: bf16-mixed`" in PAGE


def test_the_page_lists_the_datasets_and_the_fields_of_loaded_data() -> None:
    own = ["ImageFolder", "ImageTable", "Table", "TextTable", "HuggingFace", "TorchDataset", "Arrays"]
    own[4:4] = ["TextFile", "InstructionFile"]
    assert re.findall(r"\| \[`(\w+)`\]\([#l]", PAGE) == own
    assert set(own) <= set(descriptions("datasets"))
    fields = " ".join(re.findall(r"^\| (`[xynpacs][a-z_`, ]+) \|", PAGE.partition("field of `LoadedData`")[2], re.M))
    assert set(re.findall(r"\w+", fields)) == set(LoadedData.__dataclass_fields__) - {"cut", "evaluate"}
