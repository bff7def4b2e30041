"""`fl-lightning cite`: BibTeX of names and of runs."""

import re

import pytest
import yaml
from commands import TINY, run

from fl_lightning import __version__
from fl_lightning.core.references import parse_references, read_references


def keys(text):
    return [one.key for one in parse_references(text.splitlines())]


def write_run(folder, **settings):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def spec(path, **options):
    return {"class_path": f"fl_lightning.{path}", "init_args": options}


CONFIG = {
    "scenario": {"dataset": spec("data.FC100"), "partition": spec("data.Shards"), "long_tail": 10.0},
    "algorithm": spec("algorithms.FedDyn", aggregator=spec("algorithms.Bucketing", inner=spec("algorithms.Median"))),
    "adversary": spec("attacks.ModelReplacement", data=spec("attacks.LabelFlip")),
    "model": spec("models.MLP"),
    "dp_sgd": {"clip": 1.0},
    "mixup": None,
    "callbacks": [spec("callbacks.MembershipAudit"), {"class_path": "mine.FedProx"}],
}
USED = ["FC100", "Shards", "long_tail", "FedDyn", "Bucketing", "Median", "ModelReplacement", "LabelFlip", "dp_sgd"]


def test_cites_names_in_any_case_and_the_package_last():
    code, out, err = run("cite", "FedProx", "ditto", "FEDPROX", "cifar10", "fl-lightning")
    assert (code, err) == (0, "")
    assert keys(out) == ["li2020federated", "li2021ditto", "krizhevsky2009learning", "fllightning"]
    assert f"note = {{Version {__version__}}}" in out
    assert keys(run("cite").out) == ["fllightning"]


def test_an_entry_lists_the_names_that_it_is_for():
    out = run("cite", "Shards", "FedAvg", "Local", "IID").out
    assert out.startswith("% Shards, FedAvg\n@inproceedings{mcmahan2017communication,")
    assert "% From no paper: Local, IID\n" in out


def test_a_name_with_several_sources():
    assert keys(run("cite", "PeerFedPer").out)[:2] == ["arivazhagan2019federated", "zhu2024uapdfl"]


def test_cites_all_that_a_run_used(tmp_path):
    folder = write_run(tmp_path / "runs" / "one", **CONFIG)
    out = run("cite", folder).out
    expected = {read_references()[name].key for name in [*USED, "MembershipAudit"]}
    assert expected <= {*keys(out)}
    assert "li2020federated" not in keys(out)  # the class of this name is somebody else's
    assert "zhang2018mixup" not in keys(out)
    named = {name for line in re.findall("^% (.+)$", out, re.M) for name in line.split(", ")}
    assert named == {*USED, "MembershipAudit", "fl-lightning"}


def test_cites_each_source_of_several_runs_once(tmp_path):
    write_run(tmp_path / "runs" / "one", algorithm=spec("algorithms.FedAvg"))
    write_run(tmp_path / "runs" / "two", algorithm=spec("algorithms.FedProx"))
    assert keys(run("cite", tmp_path / "runs", "FedAvg").out) == [
        "mcmahan2017communication",
        "li2020federated",
        "fllightning",
    ]


def test_a_finished_run(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    assert run("fit", "-c", tmp_path / "tiny.yaml", "--run_dir", tmp_path / "run", "--rounds", "1").code == 0
    cited = {"wang2025fedskc", "alpaydin1998optical", "hsu2019measuring", "yurochkin2019bayesian", "fllightning"}
    assert {*keys(run("cite", tmp_path / "run").out)} == cited


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("FedPrx", "Did you mean FedProx?"),
        ("hetero", "Did you mean Dirichlet?"),
        ("xyzzy", "See `fl-lightning list`."),
        ("empty", "no run with a config found"),
    ],
)
def test_refuses_unknown_names_and_folders_without_runs(word, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    code, out, err = run("cite", word)
    assert (code, out) == (2, "")
    assert word in err
    assert answer in err
