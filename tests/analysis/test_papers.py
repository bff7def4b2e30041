"""The shipped files of the papers' tables and figures, and the command lines of their cells."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from commands import run, summary
from reduced import reduced

from fl_lightning.analysis.baselines import expand_baseline
from fl_lightning.analysis.study.paper_table import read_table as uncached_read_table
from fl_lightning.cli.experiment import experiment_parser
from fl_lightning.core.config import flatten
from fl_lightning.core.config_files import read_configs
from fl_lightning.evaluation.summary import summarize

FOLDER = Path(__file__).parents[2] / "papers"
CONFIGS = FOLDER.parent / "configs"
TABLES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}

# Every table of accuracies or of rounds, every ablation and every sweep. Some sweeps have no numbers.
FILES = {
    "fedskc": "table1 table2 table3 table4 table5 fig3a fig3b fig3c fig3d fig4c",
    "feddw": "table1 table2 table4 fig6",
    "fedsiam_da": "fig3 fig4 mu",
    "cwfedavg": "table1 table2 fig3",
    "ua_pdfl": "table1 table2 table3 table4 table5 fig13 th_i mu",
}

# For each paper: its name, the class of its method, the number of runs per cell, and the evaluated client model.
NAMES = {"fedskc": "FedSKC", "feddw": "FedDW", "fedsiam_da": "FedSiam-DA", "cwfedavg": "cwFedAVG", "ua_pdfl": "UA-PDFL"}
OWN = {"fedskc": "FedSKC", "feddw": "FedDW", "fedsiam_da": "FedSiamDA", "cwfedavg": "CwFedAvg", "ua_pdfl": "UAPDFL"}
RUNS = dict.fromkeys(NAMES, 3) | {"feddw": 5}
MEASURED = dict.fromkeys(NAMES, "trained") | {"cwfedavg": "received", "ua_pdfl": "both"}

# The settings that a phrase of a title, a column or a row stands for.
NUMBERS = {
    r"(?:alpha|beta) ([\d.]+)": ["scenario.partition.alpha"],
    r"rho (\d+)": ["scenario.long_tail"],
    r"(\d+) clients": ["scenario.clients"],
    r"(\d+) rounds": ["rounds"],
    r"(\d+) rounds of (\d+) epochs": ["rounds", "trainer.max_epochs"],
    r"tau ([\d.]+)": ["algorithm.tau"],
    r"M (\d+)": ["algorithm.similar_clients"],
    r"mu ([\d.]+)": ["algorithm.mu"],
    r"lambda ([\d.]+)": ["algorithm.lam"],
    r"th_I ([\d.]+)": ["algorithm.th_i"],
    r"N_com (\d+)": ["algorithm.n_com"],
}
WORDS = {
    "MNIST": {"scenario.dataset": "MNIST"},
    "EMNIST": {"scenario.dataset": "EMNIST", "scenario.dataset.split": "bymerge"},
    "CIFAR-10": {"scenario.dataset": "CIFAR10", "scenario.long_tail": None},
    "CIFAR-100": {"scenario.dataset": "CIFAR100", "scenario.long_tail": None},
    "CIFAR-10-LT": {"scenario.dataset": "CIFAR10", "scenario.partition.alpha": 0.2},
    "CIFAR-100-LT": {"scenario.dataset": "CIFAR100", "scenario.partition.alpha": 0.2},
    "FC100": {"scenario.dataset": "FC100"},
    "SVHN": {"scenario.dataset": "SVHN"},
    "PathMNIST": {"scenario.dataset": "PathMNIST"},
    "IMDB": {"scenario.dataset": "IMDB"},
    "AG News": {"scenario.dataset": "AGNews"},
    "CNN": {"model": "CNN4"},
    "ResNet-18": {"model": "ResNet18"},
    "VGG-11": {"model": "VGG11", "model.head.hidden": [4096, 4096]},
    "ShuffleNet": {"model": "ShuffleNetV2", "model.head.mapping": [256, 128]},
    "MobileNet": {"model": "MobileNetV2", "model.head.mapping": [256, 128]},
    "IID": {"scenario.partition": "IID"},
    "extreme": {"scenario.partition": "DisjointClasses"},
}
SETTINGS = {
    "feddw": {
        "practical": {"scenario.partition.alpha": 0.5, "clients_per_round": None},
        "pathological": {"scenario.partition.alpha": 0.1, "clients_per_round": 5},
    },
    "cwfedavg": {
        "practical": {"scenario.partition": "Dirichlet", "scenario.partition.alpha": 0.1},
        "pathological": {"scenario.partition": "Pathological"},
    },
}

# The settings of rows whose name is not a class, or for which the paper gives more.
LINEAR = {"model.head.classifier": "linear"}
PEERS = {"algorithm.n_com": 5}
SWITCHES = ("algorithm.lcl", "algorithm.gda", "algorithm.gpr")
ROWS = {
    "fedskc": {
        "FedOPT": {"algorithm": "FedAdam", "algorithm.server_lr": 0.01, "algorithm.tau": 0.001},
        "MOON": {"algorithm": "MOON", "algorithm.tau": 0.5},
        "FedProto": {"algorithm": "FedAvg"},
        "FedRCL": {"algorithm": "FedRCL", "algorithm.tau": 0.05},
        "FedSKC": {"algorithm": "FedSKC", "algorithm.tau": 0.08, **dict.fromkeys(SWITCHES, True)},
        "LCL": {"algorithm": "FedSKC", **dict(zip(SWITCHES, (True, False, False), strict=True))},
        "LCL, GDA": {"algorithm": "FedSKC", **dict(zip(SWITCHES, (True, True, False), strict=True))},
        "LCL, GPR": {"algorithm": "FedSKC", **dict(zip(SWITCHES, (True, False, True), strict=True))},
        "LCL, GDA, GPR": {"algorithm": "FedSKC", **dict.fromkeys(SWITCHES, True)},
        "with": {"algorithm": "FedSKC", "algorithm.similar_clients": 1},
        "without": {"algorithm": "FedSKC", "algorithm.similar_clients": 0},
    },
    "feddw": {
        **{name: {"algorithm": name, **LINEAR} for name in ("FedAvg", "MOON", "FedBABU", "FedProx", "FedRep")},
        **{name: {"algorithm": name, **LINEAR} for name in ("FedProto", "FedALA", "PerFedAvg", "FedPer", "Local")},
        "FedUV": {"algorithm": "FedUV", "algorithm.mu": 0.5, **LINEAR},
        "FedDistill+": {"algorithm": "FedDistillPlus", **LINEAR},
        "FedDistill++DW": {"algorithm": "FedDistillPlus", "algorithm.loss_terms": ["DistillingWeights"]},
        "FedDW": {"algorithm": "FedDW", "model.head.classifier": "bias_free"},
        "MOON+DW": {"algorithm": "FedDW", "algorithm.loss_terms": ["ModelContrast"]},
        "FedUV+DW": {"algorithm": "FedDW", "algorithm.loss_terms": ["ClassifierVariance", "HypersphericalUniformity"]},
        "FedProx+DW": {"algorithm": "FedDW", "algorithm.loss_terms": ["Proximal"]},
    },
    "fedsiam_da": {
        "FedProx": {"algorithm": "FedProx", "algorithm.mu": 0.01},
        "MOON": {"algorithm": "MOON", "algorithm.mu": 1},
        "FedSiam-DA": {"algorithm": "FedSiamDA", "algorithm.mu": 0.1},
    },
    "cwfedavg": {
        "FedProx": {"algorithm": "FedProx", "algorithm.mu": 0.001},
        "FedAMP": {"algorithm": "FedAMP", "algorithm.alpha": 1000, "algorithm.lam": 1, "algorithm.sigma": 0.1},
        "APPLE": {"algorithm": "APPLE", "algorithm.dr_lr": 0.01, "algorithm.mu": 0.1, "algorithm.length": 200},
        "CFL": {"algorithm": "CFL", "algorithm.eps1": 0.4, "algorithm.eps2": 0.9},
        "cwFedAVG w/ Dist.": {"algorithm": "CwFedAvg", "algorithm.lam": 0, "algorithm.distribution": "true"},
        "cwFedAVG w/o WDR": {"algorithm": "CwFedAvg", "algorithm.lam": 0, "algorithm.distribution": "weights"},
        "cwFedAVG w/ WDR": {"algorithm": "CwFedAvg", "algorithm.lam": 10, "algorithm.distribution": "weights"},
    },
    "ua_pdfl": {
        "FedAvg": {"algorithm": "PeerAlgorithm", **PEERS},
        "CriticalFL": {"algorithm": "PeerCriticalFL", **PEERS},
        "FedPer": {"algorithm": "PeerFedPer", **PEERS},
        "DisPFL": {"algorithm": "DisPFL", "algorithm.search_rounds": 150, **PEERS},
        "DFedAvgM": {"algorithm": "DFedAvgM", "rounds": 75, "trainer.max_epochs": 10, **PEERS},
        "UA-PDFL": {"algorithm": "UAPDFL", "algorithm.dropout": True, "algorithm.layerwise": True, **PEERS},
        "Full UA-PDFL": {"algorithm": "UAPDFL", "algorithm.dropout": True, "algorithm.layerwise": True, **PEERS},
        "Without LP": {"algorithm": "UAPDFL", "algorithm.dropout": True, "algorithm.layerwise": False, **PEERS},
        "Without CD": {"algorithm": "UAPDFL", "algorithm.dropout": False, "algorithm.layerwise": True, **PEERS},
    },
}

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Change to a folder without configs, so that names mean the shipped ones."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=TABLES)
def stem(request):
    return request.param


@pytest.fixture
def table(stem):
    return TABLES[stem]


# --- Files -----------------------------------------------------------------------------------------------


def test_each_table_figure_and_sweep_of_the_papers_has_a_file():
    assert set(TABLES) == {f"{paper}_{what}" for paper, names in FILES.items() for what in names.split()}


def test_a_file_has_the_unit_and_the_seeds_of_its_paper(stem, table):
    assert stem.removeprefix(f"{table['paper']}_") in FILES[table["paper"]].split()
    assert table["unit"] == ("rounds" if table["metric"].startswith("R_") else "percent")
    assert table["seeds"] == list(range(RUNS[table["paper"]]))


def test_the_first_line_and_the_title_name_the_table(stem, table):
    first = (FOLDER / f"{stem}.yaml").read_text().splitlines()[0]
    paper, name = table["title"].split(", ")[:2]
    assert re.fullmatch(rf"# {re.escape(f'{paper}, {name}')}: .{{20,}}[.]", first)
    assert paper == NAMES[table["paper"]]
    roman = dict(zip(["I", "II", "III", "IV", "V"], "12345", strict=True))
    plain = re.sub(r"[IV]+$", lambda number: roman[number[0]], name).lower()
    named = re.sub(r"[^a-z0-9]", "", plain)
    what = stem.removeprefix(f"{table['paper']}_")
    assert named == what or (not re.search(r"\d", what) and re.match(r"(section|algorithm|eq)", named))


def test_the_papers_numbers_are_in_their_range(stem, table):
    numbers = read_table(stem).paper_values.values()
    assert len({number.std is None for number in numbers}) <= 1  # deviations everywhere, or nowhere
    for number in numbers:
        assert 1 <= number.mean <= (200 if table["unit"] == "rounds" else 100)
        assert (number.std or 0) >= 0


def test_claims_hold_in_the_papers_own_numbers(stem, table):
    numbers = read_table(stem).paper_values
    for claim in read_table(stem).claims:
        assert claim.better != claim.than
        assert len(claim.columns) == len(set(claim.columns)) > 0
        for column in claim.columns:
            better, than = (numbers.get((column, row)) for row in (claim.better, claim.than))
            if better and than:
                margin = better.mean - than.mean
                assert margin < 0 if table["unit"] == "rounds" else margin > 0, (claim, column)


def test_tables_that_share_cells_agree():
    """A paper prints some numbers twice, and a figure shows numbers of a table."""

    def values(stem, row):
        return TABLES[stem]["paper_values"][row]

    for row in TABLES["fedskc_table1"]["rows"]:
        one, two = values("fedskc_table1", row), values("fedskc_table2", row)
        assert values("fedskc_fig3c", row) == [one[0], one[1], None, one[2], one[3], None]
        assert values("fedskc_fig3d", row) == [*one[4:7], *two[2:]]
    full = [values("fedskc_table1", "FedSKC")[i] for i in (1, 3)]
    assert full == values("fedskc_table5", "LCL, GDA, GPR") == values("fedskc_fig4c", "with")
    assert full == values("fedskc_fig3a", "tau 0.08") == values("fedskc_fig3b", "M 1")
    assert values("ua_pdfl_table1", "UA-PDFL") == values("ua_pdfl_table3", "N_com 5")
    assert values("ua_pdfl_table2", "UA-PDFL") == values("ua_pdfl_table4", "N_com 5")
    without = values("cwfedavg_table1", "cwFedAVG w/o WDR")
    assert values("cwfedavg_fig3", "lambda 0") == without[4:6]
    feddw = values("feddw_table1", "FedDW")
    assert values("feddw_fig6", "mu 0.1") == [feddw[1], None, feddw[5], None]
    assert values("feddw_fig6", "mu 10") == [None, feddw[2], None, feddw[6]]
    assert values("feddw_table4", "FedDW") == [feddw[6]]


# --- Cells ----------------------------------------------------------------------------------------------


def settings_of_name(paper, name):
    """Return the settings that a name stands for; each of its phrases must have a meaning."""
    found = {}
    for phrase in name.split(", "):
        if metric := re.fullmatch(r"R_(\d+)", phrase):
            found["metric"] = f"R_{int(metric[1]) / 100:g}"
            continue
        known = WORDS | SETTINGS.get(paper, {})
        matches = {pattern: match for pattern in NUMBERS if (match := re.fullmatch(pattern, phrase))}
        assert len(matches) + (phrase in known) == 1, f"{phrase!r} of {name!r} has no meaning"
        found |= known.get(phrase, {})
        for pattern, match in matches.items():
            found |= dict(zip(NUMBERS[pattern], map(float, match.groups()), strict=True))
    return found


def settings_of_column(table, column):
    tail = ", ".join(table["title"].split(", ")[2:])
    return settings_of_name(table["paper"], ", ".join(filter(None, [tail, column])))


def settings_of_row(table, row):
    paper = table["paper"]
    if row in ROWS[paper]:
        return ROWS[paper][row]
    if any(re.fullmatch(pattern, row) for pattern in NUMBERS):
        return {"algorithm": OWN[paper]} | settings_of_name(paper, row)
    return {"algorithm": row}


def words(stem, column, row):
    """Return a cell's command line."""
    return (*read_table(stem).words(column, row), "--seed=1")


parser, read_table = cache(experiment_parser), cache(uncached_read_table)


@cache
def parsed(cell):
    return parser().parse_args(expand_baseline(read_configs(cell)).words)


def config_of(cell):
    """Return the config of a command line by dotted key, with classes by name."""
    flat = flatten(parsed(cell).as_dict(), name=class_name)
    terms = [class_name(term["class_path"]) for term in flat["algorithm.loss_terms"] or []]
    lists = {key: list(value) for key, value in flat.items() if isinstance(value, tuple)}
    return flat | lists | {"algorithm.loss_terms": terms}


def class_name(path):
    return path.rpartition(".")[2]


@cache
def baselines_of(config):
    return yaml.safe_load((CONFIGS / config).read_text())["baselines"]


@cache
def covering_cells():
    """Return cells that cover every column, and every row with each of its configs' baselines."""
    seen, chosen = set(), {}
    for stem, table in TABLES.items():
        for column, options in table["columns"].items():
            baselines = baselines_of(options["config"])
            for row, keys in table["rows"].items():
                of_column, of_row = settings_of_column(table, column), settings_of_row(table, row)
                parts = {f"{of_column}{options}", f"{of_row}{baselines}{keys}"}
                if not parts <= seen:
                    chosen.setdefault(stem, []).append((column, row))
                    seen |= parts
    return chosen


def check(stem, column, row):
    table = TABLES[stem]
    found = config_of(words(stem, column, row))
    expected = {key: value for key, value in settings_of_column(table, column).items() if key != "metric"}
    expected |= settings_of_row(table, row) | {"evaluation.client_model": MEASURED[table["paper"]], "seed": 1}
    assert {key: found.get(key, "missing") for key in expected} == expected, (column, row)


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
def test_a_cell_has_the_settings_of_its_column_and_row(stem, table):
    for column, row in covering_cells().get(stem, []):
        check(stem, column, row)


@pytest.mark.slow
def test_every_cell_has_the_settings_of_its_column_and_row(stem, table):
    for column in table["columns"]:
        for row in table["rows"]:
            check(stem, column, row)


def test_a_column_sets_only_what_its_name_says(table):
    for column, options in table["columns"].items():
        expected = settings_of_column(table, column)
        assert options.keys() - {"config", "metric"} <= expected.keys(), column
        assert expected.get("metric", table["metric"]) == options.get("metric", table["metric"])


def test_a_row_sets_only_what_its_name_says(table):
    """Hyper-parameters of baselines are in configs/baselines/."""
    for row, options in table["rows"].items():
        expected = settings_of_row(table, row)
        own = expected.keys() if expected["algorithm"] == OWN[table["paper"]] else set()
        assert options.keys() - own <= {"algorithm", "metric", "evaluation.personal_on_global"}, row


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("stem", [stem for stem in TABLES if stem.startswith("cwfedavg")])
def test_classes_and_clusters_are_those_of_the_data_set(stem):
    """Appendix C: 2 classes a client, of CIFAR-100 10; and Table 4: IFCA's clusters."""
    clusters = {"MNIST": 4, "CIFAR10": 2, "CIFAR100": 8, "AGNews": 2}
    table = TABLES[stem]
    for column in table["columns"]:
        found = config_of(words(stem, column, list(table["rows"])[-1]))
        dataset = found["scenario.dataset"]
        if "IFCA" in table["rows"]:
            assert config_of(words(stem, column, "IFCA"))["algorithm.clusters"] == clusters[dataset]
            assert config_of(words(stem, column, "FedFomo"))["algorithm.models"] >= found["scenario.clients"] - 1
        if found["scenario.partition"] == "Pathological":
            assert found["scenario.partition.classes_per_client"] == (10 if dataset == "CIFAR100" else 2)


@pytest.mark.fast_cases(1)
def test_the_metric_of_a_cell_is_in_the_summary(stem, table):
    """R_acc needs the target in the config, and global metrics need a global model."""
    for column, row in covering_cells().get(stem, []):
        cell = words(stem, column, row)
        found, figure = config_of(cell), read_table(stem).figure(column, row)
        logged = {"round": 1, "client/acc_mean": 0.5, "client/acc_weighted": 0.5}
        logged |= {"global/acc": 0.5} if one_model(cell) else {}
        logged |= {"personal_on_global/acc_mean": 0.5} if found["evaluation.personal_on_global"] else {}
        assert figure in summarize([logged], found["evaluation.target_accuracies"]), (column, row)
        assert one_model(cell) or not figure.startswith("R_"), (column, row)


@cache
def one_model(cell):
    return parser().instantiate(parsed(cell)).algorithm.one_model


def cells_of_methods():
    """Return a cell for each method of each paper and each set of its options."""
    found = {}
    for stem, table in TABLES.items():
        for row, options in table["rows"].items():
            column = next(iter(table["columns"]))
            found.setdefault((table["paper"], options["algorithm"], *options), (stem, column, row))
    return [*found.values(), ("fedskc_table1", "FC100, alpha 0.2", "FedProto")]


@pytest.mark.slow
@pytest.mark.parametrize(("stem", "column", "row"), cells_of_methods())
def test_a_cell_runs(stem, column, row, tmp_path, monkeypatch):
    small = reduced(TABLES[stem]["columns"][column]["config"], tmp_path, monkeypatch)
    if "algorithm.n_com" not in config_of(words(stem, column, row)):
        small = [word for word in small if not word.startswith("--algorithm.n_com")]
    if row == "IFCA":
        small.append("--algorithm.clusters=2")
    outcome = run("fit", *words(stem, column, row), *small, "--run_dir", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert read_table(stem).figure(column, row) in summary(tmp_path / "run")
