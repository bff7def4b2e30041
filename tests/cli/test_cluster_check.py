"""`fl-lightning cluster-check` without a cluster: the table, the problems and the exit code."""

import pickle
import platform

import pytest
from commands import TINY, run

import fl_lightning
from fl_lightning.cli.commands import cluster_check
from fl_lightning.engines.ray_cluster import PACKAGES, Machine, version_finder

OURS = version_finder()(PACKAGES) | {"ray": "2.51.0"}  # also where Ray is not installed
GOOD = Machine("10.0.0.1", 8, 1, OURS)


def changed(**versions: str) -> dict[str, str]:
    return OURS | {name.replace("_", "-"): version for name, version in versions.items()}


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (GOOD, []),
        (Machine("b", 1, 0, OURS, dataset=""), []),
        (Machine("b", 1, 0, OURS, dataset="no such file"), ["b: the dataset was not opened (no such file). Copy"]),
        (Machine("b", 1, 0, changed(torch="2.1.0")), ["b: torch 2.1.0 differs from "]),
        (Machine("b", 1, 0, changed(numpy="")), ["b: numpy is missing. Install it there."]),
        (Machine("b", 1, 0, changed(fl_lightning="")), ["b: fl-lightning is missing. Install it there, or send it"]),
        (Machine("b", 1, 0, {}, problem="it is frozen"), ["b: it is frozen. Correct engine.runtime_env, or"]),
        (Machine("b", 1, 0, changed(torch="1", ray="1"), "away"), ["b: torch", "b: ray", "b: the dataset"]),
    ],
)
def test_each_problem_is_a_line_with_its_fix(machine, words):
    lines = machine.problems(OURS)
    assert len(lines) == len(words)
    assert all(line.startswith(beginning) for line, beginning in zip(lines, words, strict=True))


def test_versions_are_found_where_fl_lightning_is_missing():
    assert OURS["python"] == platform.python_version()
    assert OURS["fl-lightning"] == fl_lightning.__version__
    assert version_finder()(["no-such-package"])["no-such-package"] == ""
    with pytest.raises(AttributeError):  # so Ray sends it by value, not by the name of a module
        pickle.dumps(version_finder())


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that checks a cluster of these machines, and the dry runs that were made."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    trained = []
    monkeypatch.setattr(cluster_check, "train_short_round", lambda *_: trained.append(1))
    monkeypatch.setattr(cluster_check, "version_finder", lambda: lambda packages: OURS)

    def check(*machines, engine="--engine=RayEngine"):
        monkeypatch.setattr(cluster_check, "find_machines", lambda *_: list(machines))
        return run("cluster-check", "--config", "tiny.yaml", engine), trained

    return check


def test_machines_without_problems_train_a_short_round(check):
    outcome, trained = check(GOOD)
    assert (outcome.code, outcome.err, trained) == (0, "", [1])
    assert f"10.0.0.1  8     1     {OURS['python']}" in " ".join(outcome.out.splitlines()[-1:]).strip()


def test_a_problem_is_printed_and_the_round_still_trained(check):
    outcome, trained = check(GOOD, Machine("b", 1, 0, OURS, dataset="no such file"))
    assert (outcome.code, trained) == (1, [1])
    assert "problem: b: the dataset was not opened" in outcome.err


def test_nothing_is_trained_if_a_machine_cannot_import_the_package(check):
    outcome, trained = check(GOOD, Machine("b", 1, 0, changed(fl_lightning="")))
    assert (outcome.code, trained) == (1, [])


def test_another_engine_is_refused(check):
    outcome, trained = check(GOOD, engine="--engine=sequential")
    assert outcome.code == 2
    assert "engine: cluster-check needs a Ray cluster" in outcome.err
    assert not trained
