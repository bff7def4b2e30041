"""The public names of the package, and the run that `fit` returns."""

import ast
import inspect
import re
import subprocess
import sys
import traceback
from functools import partial
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
import torch
from commands import rows, tiny
from commands import run as command
from experiments import digits, experiment
from lightning.pytorch.callbacks import LearningRateMonitor

import fl_lightning
from fl_lightning import HOMES, FederatedOrchestrator, open_run
from fl_lightning.algorithms import UAPDFL, FedAvg, FedProx
from fl_lightning.analysis.comparison import comparable_runs, compare
from fl_lightning.callbacks import EarlyStopping
from fl_lightning.cli.catalogue import BASES, base, classes
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines import SequentialEngine
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP
from fl_lightning.runs.reader import Run, open_run_folder
from fl_lightning.runs.search import open_runs

ROOT = Path(__file__).parents[2]
PACKAGES = ("algorithms", "callbacks", "data", "engines", "models")


def test_listed_classes_can_be_imported_from_the_package():
    for cls in [cls for kind in BASES for cls in (base(kind), *classes(kind))]:
        assert getattr(fl_lightning, cls.__name__) is cls


def test_public_names_equal_those_of_the_packages():
    for home in PACKAGES:
        found = {name for name, there in HOMES.items() if there == home}
        assert found - {"RoundFigure"} == set(import_module(f"fl_lightning.{home}").__all__)  # it is not listed
    for name, home in HOMES.items():
        assert getattr(fl_lightning, name) is getattr(import_module(f"fl_lightning.{home}"), name)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(fl_lightning.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {"runs"}
    for line in block.body:
        module = import_module(line.module)
        seen |= {name for each in line.names for name in (module.__all__ if each.name == "*" else [each.name])}
        assert all(each.name in ("*", each.asname) for each in line.names)  # else `mypy --strict` takes it for private
    assert seen == set(fl_lightning.__all__)


def imported(code):
    """Yield the names that code imports from the package and its public modules."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            root, _, home = node.module.partition(".")
            if root == "fl_lightning" and (not home or home in HOMES.values()):
                yield from (each.name for each in node.names)


def test_docs_and_examples_import_only_public_names():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    codes = [
        code for page in pages for code in re.findall(r"```python(?: title=.*)?\n(.*?)```", page.read_text(), re.S)
    ]
    codes += [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    names = {name for code in codes for name in imported(code)}
    assert {"FederatedOrchestrator", "MLP", "Digits", "WeightedMean"} <= names
    assert names <= set(fl_lightning.__all__)


def in_a_new_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.thorough
def test_torch_is_imported_with_the_first_name_that_needs_it():
    code = (
        "import sys, fl_lightning; dir(fl_lightning); fl_lightning.ConfigError; fl_lightning.Run; fl_lightning.runs;"
        "from fl_lightning import open_run as _; print('torch' in sys.modules)"
    )
    assert in_a_new_python(code.replace("from fl_lightning import open_run as _; ", "")) == ["False"]
    assert in_a_new_python(code) == ["True"]


@pytest.mark.thorough
def test_everything_can_be_imported_at_once():
    code = (
        "import fl_lightning; print(fl_lightning.models.MLP is fl_lightning.MLP); from fl_lightning import *; "
        "print(FedSKC.__name__, Digits.__name__, runs.__name__, open_run.__name__)"
    )
    assert in_a_new_python(code) == ["True", "FedSKC", "Digits", "fl_lightning.runs", "open_run"]
    assert set(fl_lightning.__all__) <= set(dir(fl_lightning))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'FedSCK'"):
        fl_lightning.FedSCK  # noqa: B018
    with pytest.raises(ImportError, match="FedSCK"):
        from fl_lightning import FedSCK  # noqa: F401


def traceback_of_open_run(run_dir):
    with pytest.raises(ConfigError) as refused:
        open_run(run_dir, trust=True)
    return "".join(traceback.format_exception(refused.value))


def test_an_error_in_a_config_is_shown_without_the_traceback_of_the_parser(tmp_path):
    tiny(tmp_path / "run", "--rounds", "1")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("\nrounds: 1\n", "\nrounds: abc\n"))
    shown = traceback_of_open_run(tmp_path / "run")
    assert shown.endswith("ConfigError: rounds: got 'abc', expected int\n")
    assert "jsonargparse" not in shown


def test_an_error_of_the_users_own_class_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = "from fl_lightning import Algorithm\n\n\nclass Own(Algorithm):\n    def __init__(self) -> None:\n"
    Path("own_for_open_run.py").write_text(f"{head}        super().__init__()\n")
    tiny(tmp_path / "run", "--rounds", "1", "--algorithm", "own_for_open_run.Own")
    monkeypatch.setattr(sys.modules["own_for_open_run"].Own, "family", lambda self: 1 / 0)
    shown = traceback_of_open_run(tmp_path / "run")
    assert "ZeroDivisionError: division by zero" in shown
    assert "in <lambda>" in shown


def test_configs_record_classes_under_stable_paths(tmp_path):
    """Old runs resume and share their group with new ones only if these paths stay the same."""
    tiny(tmp_path / "run", "--algorithm", "MOON", "--rounds", "1", "--callbacks", "[EarlyStopping]")
    config = open_run_folder(tmp_path / "run").config
    assert config["algorithm"]["class_path"] == "fl_lightning.algorithms.MOON"
    assert config["model"]["class_path"] == "fl_lightning.models.MLP"
    assert config["scenario"]["dataset"]["class_path"] == "fl_lightning.data.Digits"
    assert [each["class_path"] for each in config["callbacks"]] == ["fl_lightning.callbacks.EarlyStopping"]
    tiny(tmp_path / "skc", "--rounds", "1", "--model", "fl_lightning.MLP")
    config = open_run_folder(tmp_path / "skc").config
    assert config["algorithm"]["class_path"] == "fl_lightning.FedSKC"
    assert config["model"]["class_path"] == "fl_lightning.models.MLP"


# --- The run that `fit` returns ---


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    return experiment(run_dir, rounds=3, evaluate_every=2, evaluation=Evaluation(target_accuracies=[0.1])).fit(
        {}
    ), run_dir


def test_fit_returns_the_run(done):
    run, run_dir = done
    assert isinstance(run, Run)
    opened = open_run_folder(run_dir)
    assert (run.run_dir, run.rounds, run.summary) == (run_dir, opened.rounds, opened.summary)
    assert run.finished
    assert run.summary["R_0.1"] in (2, 3)


def test_the_history_is_a_table_by_round(done):
    run, run_dir = done
    history = run.history
    assert history.index.name == "round"
    assert history.index.tolist() == [1, 2, 3]
    assert history["global/acc"].isna().tolist() == [True, False, False]
    on_disk = pd.read_csv(run_dir / "metrics.csv", index_col="round")
    pd.testing.assert_frame_equal(history[on_disk.columns], on_disk, rtol=1e-15)  # pandas 2 rounds what it reads
    assert set(history.columns) == set(on_disk.columns)
    assert Run(run_dir, {}, []).history.index.name == "round"


def test_repr_of_a_run_has_a_few_lines(done):
    run, run_dir = done
    first, *figures = repr(run).splitlines()
    assert first == f"run {run_dir}: 3 rounds"
    last, best = run.summary["global/acc_last"], run.summary["global/acc_best"]
    best_round = run.summary["global/acc_best_round"]
    assert f"  global/acc: {last:.4f}, at best {best:.4f} in round {best_round}" in figures
    assert repr(Run(run_dir, {}, run.rounds[:1])) == f"run {run_dir}: 1 round, not ended"  # that was not evaluated
    assert repr(Run(run_dir, {}, run.rounds, {"x_best_round": 1})) == first  # a file that somebody edited


def test_fit_and_resume_return_the_whole_run(tmp_path):
    run = experiment(str(tmp_path / "run"), rounds=1).fit(config={"algorithm": "FedAvg", "seed": 3})
    assert run.setting("seed") == 3
    assert run.settings == open_run_folder(tmp_path / "run").settings
    run = experiment(tmp_path / "run", rounds=2).fit(resume=True)
    assert run.history.index.tolist() == [1, 2]
    assert run.run_dir == tmp_path / "run"


def test_a_run_without_a_config_is_compared_by_its_early_stopping(tmp_path):
    for patience in (1, 2):
        watchers = [EarlyStopping(patience=patience)]
        experiment(tmp_path / str(patience), rounds=1, callbacks=watchers).fit()
    found = compare(comparable_runs(open_runs(tmp_path)))
    assert (found.keys, [len(group.runs) for group in found.groups]) == (["callbacks"], [1, 1])


def test_a_run_without_a_config_is_described_by_its_objects(tmp_path):
    """So `compare` separates runs by method and arguments. The experiment cannot be rebuilt from the description."""
    for seed, algorithm in enumerate([FedAvg(), FedProx(mu=0.1), FedProx(mu=1.0)]):
        run = experiment(tmp_path / f"run{seed}", algorithm, rounds=1, seed=seed).fit()
        assert run.config == open_run_folder(run.run_dir).config
    assert (run.setting("seed"), run.setting("algorithm"), run.setting("mu")) == (2, "FedProx", 1.0)
    assert (run.setting("batch_size"), run.setting("scenario.dataset")) == (64, "Digits")
    found = compare(comparable_runs(open_runs(tmp_path)), by=["algorithm", "mu"])
    assert [group.names["algorithm"] for group in found.groups] == ["FedAvg", "FedProx mu=0.1", "FedProx mu=1"]
    before = (run.run_dir / "config.yaml").read_bytes()
    error = f"{run.run_dir}: started from Python without `config`, so it cannot be rebuilt here. Build its Federated"
    with pytest.raises(ConfigError, match=f"^{error}"):
        open_run(run.run_dir)
    outcome = command("fit", "--resume", run.run_dir)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert outcome.err.startswith(f"fl-lightning: error: {error}")
    resumed = experiment(run.run_dir, FedProx(mu=1.0), rounds=2, seed=2).fit(resume=True)
    assert (resumed.setting("mu"), len(resumed.rounds)) == (1.0, 2)
    assert (run.run_dir / "config.yaml").read_bytes() == before


def test_without_a_folder_each_run_has_a_new_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [experiment(None, algorithm, rounds=1) for algorithm in (FedAvg(), FedAvg(), FedProx())]
    assert not list(tmp_path.iterdir())
    folders = [run.fit().run_dir for run in runs[1:]]
    assert len({run.run_dir for run in runs}) == 3
    assert [len(rows(folder)) for folder in folders] == [1, 1]
    assert [folder.parent.as_posix() for folder in folders] == ["runs/FedAvg", "runs/FedProx"]
    assert {path.parent.name for path in Path("runs").glob("*/*")} == {"FedAvg", "FedProx"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d-[0-9a-f]{6}", folders[0].name)
    with pytest.raises(ConfigError, match=r"run_dir: .*FedAvg.* holds a run already"):
        runs[1].fit()


def test_a_client_that_does_not_exist_has_no_module(tmp_path):
    run = experiment(tmp_path, UAPDFL(), rounds=1)
    run.fit()
    assert run.client_module(5)
    for client in (6, -1):
        with pytest.raises(ConfigError, match=rf"^client: client {client} .* 0 to 5"):
            run.client_module(client)


def test_every_public_object_has_a_docstring():
    for name in HOMES:
        thing = getattr(fl_lightning, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, name  # its own: `inspect.getdoc` would return that of the base class
            assert not thing.__doc__.startswith(f"{name}("), name  # which a dataclass without one gets


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("evaluation", "received"),
        ("evaluation", {"client_model": "received"}),
        ("engine", SequentialEngine),
        ("engine", "sequental"),
        ("trainer", None),
        ("trainer", "gpu"),
        ("optimizer", "SGD"),
        ("optimizer.lr", partial(torch.optim.SGD, lr="0.1")),
        ("optimizer.momentum", partial(torch.optim.SGD, lr=0.1, momentum="9e-1")),
        ("class_weights", torch.ones(10)),
        ("class_weights", {0: 1.0}),
        ("client_callbacks", LearningRateMonitor("epoch")),
        ("batch_size", True),
        ("seed", True),
        ("rounds", "3"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_its_key(key, value):
    with pytest.raises(ConfigError, match=f"^{key}: "):
        experiment(None, **{key.partition(".")[0]: value})


def test_callbacks_and_training_of_another_type_are_refused_by_their_key():
    scenario = digits()
    for key, value in {"callbacks": EarlyStopping(), "training": {"batch_size": 8}}.items():
        with pytest.raises(ConfigError, match=f"^{key}: "):
            FederatedOrchestrator(scenario, MLP, FedAvg(), **{key: value})


def test_text_options_of_an_optimizer_are_no_numbers():
    experiment(None, optimizer=partial(torch.optim.LBFGS, lr=0.1, line_search_fn="strong_wolfe"))
