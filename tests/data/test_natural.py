"""Natural partitions: clients given by the data or by index lists in a file, compared to plain loops."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from commands import contents, rows, run, untimed_rows
from experiments import experiment, same_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import write_femnist
from refusals import check_refused, refusal

from fl_lightning.cli.main import main
from fl_lightning.data import (
    FEMNIST,
    IID,
    ByClient,
    ClientSplits,
    Dataset,
    Digits,
    Dirichlet,
    DisjointClasses,
    FederatedData,
    LoadedData,
    Partition,
    Pathological,
    PredefinedSplit,
    QuantitySkew,
    Scenario,
    Shards,
    Table,
)
from fl_lightning.data.transforms import Normalize
from fl_lightning.runs.partition import read_counts, write_counts

NAMES = np.array(["zoe", "ann", "10", "9", "Bert", "ann ", "\x1b[31mred"])


@dataclass
class People(Dataset):
    """Samples whose input is their index, and their clients."""

    train: np.ndarray
    test: np.ndarray | None = None
    n_test: int = 12
    classes: int = 3

    def load(self) -> LoadedData:
        x, x_test = (torch.arange(n).float()[:, None] for n in (len(self.train), self.n_test))
        y, y_test = (values[:, 0].long() % self.classes for values in (x, x_test))
        return LoadedData(
            x, y, x_test, y_test, self.classes, Normalize(), client_train=self.train, client_test=self.test
        )


def built(dataset: Dataset, partition: Partition | None = None, seed: int = 0, **options: Any) -> FederatedData:
    return Scenario(dataset, partition or ByClient(), **options).build(seed)


def trains(data: FederatedData) -> list[list[int]]:
    return [shard.train.tolist() for shard in data.shards]


def own_tests(data: FederatedData, n: int) -> list[list[int]]:
    """Each client's test samples by their place in the test set, which follows n training samples."""
    assert all((shard.test >= n).all() for shard in data.shards)
    return [(shard.test - n).tolist() for shard in data.shards]


# --- ByClient ---


@settings(deadline=None)
@given(
    text=st.booleans(),
    train=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    test=st.none() | st.lists(st.integers(0, 6), min_size=1, max_size=40),
    min_samples=st.integers(1, 4),
)
def test_by_client_equals_a_plain_loop(text: bool, train: list[int], test: list[int] | None, min_samples: int) -> None:
    name_of = (lambda number: str(NAMES[number])) if text else (lambda number: 5 - 3 * number)
    owners, test_owners = ([name_of(k) for k in numbers or ()] for numbers in (train, test))
    parts, tests = {}, {}
    for name in sorted(set(owners)):
        places = [i for i, owner in enumerate(owners) if owner == name]
        if len(places) >= min_samples:
            parts[name] = places
            tests[name] = [i for i, owner in enumerate(test_owners) if owner == name]
    dataset = People(np.array(owners), np.array(test_owners) if test else None, len(test_owners) or 12)
    if not parts:
        assert "scenario.partition.min_samples: " in refusal(lambda: built(dataset, ByClient(min_samples)))
        return
    data = built(dataset, ByClient(min_samples))
    assert list(data.client_ids or ()) == list(parts)
    if any(tests.values()):
        assert trains(data) == list(parts.values())
        assert own_tests(data, len(train)) == list(tests.values())
        assert data.data.x_train[:, 0].tolist() == [*range(len(train)), *range(len(test_owners))]
    else:  # a quarter is held out
        held = [sorted(shard.train.tolist() + shard.test.tolist()) for shard in data.shards]
        assert held == list(parts.values())
        assert [len(shard.test) for shard in data.shards] == [held_out(len(own), 0.25) for own in held]


def held_out(size: int, share: float) -> int:
    return min(round(share * size), size - 1)


SIZES = [3, 9, 4, 1, 7, 5, 6, 5]
OWNERS = np.repeat(np.arange(8), SIZES)


def test_fewer_clients_are_drawn_by_the_seed() -> None:
    all_parts = trains(built(People(OWNERS), local_test=0))
    drawn = [built(People(OWNERS), clients=3, local_test=0, seed=seed) for seed in range(40)]
    for data in drawn:
        assert data.client_ids == sorted(data.client_ids)
        assert trains(data) == [all_parts[k] for k in data.client_ids]
    assert {k for data in drawn for k in data.client_ids} == set(range(8))
    assert built(People(OWNERS), clients=3, seed=5).client_ids == drawn[5].client_ids
    assert built(People(OWNERS), clients=8, local_test=0).client_ids == list(range(8))


def test_min_samples_applies_before_clients_are_drawn() -> None:
    for seed in range(10):
        assert set(built(People(OWNERS), ByClient(5), seed=seed, clients=5).client_ids) == {1, 4, 5, 6, 7}
    assert built(People(OWNERS), ByClient(5)).client_ids == [1, 4, 5, 6, 7]
    assert built(People(OWNERS), ByClient(9)).client_ids == [1]


@pytest.mark.parametrize(
    ("partition", "options", "key", "facts"),
    [
        (ByClient(10), {}, "partition.min_samples", (": 10,", "more than 9 ")),
        (ByClient(), {"clients": 9}, "clients", (": 9,", "8 clients")),
        (ByClient(5), {"clients": 6}, "clients", (": 6,", "5 clients")),
    ],
)
def test_more_clients_than_the_data_have_are_refused(partition: Partition, options: Any, key: str, facts: Any) -> None:
    check_refused(lambda: built(People(OWNERS), partition, **options), key, *facts)


def test_data_without_client_ids_are_refused() -> None:
    check_refused(lambda: built(Digits()), "partition", "ByClient", "client_train")


def test_a_client_column_that_the_partition_does_not_use_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("age,label,clinic\n" + "".join(f"{n},{n % 2},{'ab'[n % 3 == 0]}\n" for n in range(40)))
    dataset = Table(str(path), "label", client="clinic")
    with pytest.warns(UserWarning, match="^scenario.dataset.client: IID .* clinic"):
        Scenario(dataset, IID(), clients=2).build(0)
    Scenario(dataset, ByClient()).build(0)  # warnings are errors
    Scenario(Table(str(path), "label", exclude=["clinic"]), IID(), clients=2).build(0)


def test_local_test_is_the_clients_own_a_share_or_official() -> None:
    own = np.repeat(np.arange(8), 3)
    data = People(OWNERS, own, n_test=24)
    n = len(OWNERS)
    assert own_tests(built(data), n) == [[3 * k, 3 * k + 1, 3 * k + 2] for k in range(8)]
    shares = built(data, local_test=0.5)
    assert [len(shard.test) for shard in shares.shards] == [held_out(size, 0.5) for size in SIZES]
    assert all((shard.test < n).all() for shard in shares.shards)
    official = built(data, local_test="official")
    assert sorted(chain(*own_tests(official, n))) == list(range(24))
    assert own_tests(official, n) != own_tests(built(data), n)
    assert trains(official) == trains(built(data))


def test_large_client_ids_are_not_rounded() -> None:
    far = 2**53
    data = built(People(np.array([far, far + 1, far, far + 1]), np.array([far + 1, far]), n_test=2))
    assert data.client_ids == [far, far + 1]
    assert (trains(data), own_tests(data, 4)) == ([[0, 2], [1, 3]], [[1], [0]])


@pytest.mark.parametrize("options", [{"train_samples": 20}, {"long_tail": 4}])
def test_a_reduced_dataset_keeps_the_client_of_each_sample(options: dict[str, Any]) -> None:
    data = built(People(OWNERS), local_test=0, **options)
    assert 0 < len(data.data.x_train) < len(OWNERS)
    kept = data.data.x_train[:, 0].long().numpy()
    wanted = sorted(set(OWNERS[kept].tolist()))
    assert list(data.client_ids) == wanted
    for name, shard in zip(wanted, data.shards, strict=True):
        assert set(OWNERS[kept[shard.train.numpy()]].tolist()) == {name}


def test_the_digest_depends_on_the_partition_and_not_on_names() -> None:
    one, named = (built(People(ids)).digest() for ids in (OWNERS, np.array([f"user {k}" for k in OWNERS])))
    assert one == named
    other = OWNERS.copy()
    other[[0, -1]] = other[[-1, 0]]
    changed = built(People(other)).digest()
    assert {part for part in one if one[part] != changed[part]} == {"partition"}


# --- PredefinedSplit ---

LISTS = [[5, 3], [0], [7, 1, 2]]
TESTS = [[4, 1], [], [1, 0]]


def write(path: Path, content: Any) -> PredefinedSplit:
    if path.suffix == ".npz":
        np.savez(path, **content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return PredefinedSplit(str(path))


def both(name: str) -> dict[str, Any]:
    """The lists with test lists, by names that are not in alphabetical order."""
    pairs = [{"train": train, "test": test} for train, test in zip(LISTS, TESTS, strict=True)]
    return {f"{name}{k}": pair for k, pair in zip((10, 9, 1), pairs, strict=True)}


FORMS: dict[str, tuple[str, Any, list[Any]]] = {
    "a list of lists": ("a.json", LISTS, [0, 1, 2]),
    "lists by name": ("a.json", dict(zip(("zoe", "ann", "Ä"), LISTS, strict=True)), ["zoe", "ann", "Ä"]),
    "a list of pairs": ("a.json", list(both("").values()), [0, 1, 2]),
    "pairs by name": ("a.json", both("client "), ["client 10", "client 9", "client 1"]),
    "arrays": ("a.npz", {f"c{k}": np.array(own, np.uint8) for k, own in zip((10, 9, 1), LISTS, strict=True)}, []),
    "pairs of arrays": (
        "a.npz",
        {f"a/{k}/{part}": np.array(own, int) for k, pair in both("x/").items() for part, own in pair.items()},
        ["a/x/10", "a/x/9", "a/x/1"],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_file_gives_its_lists(form: str, tmp_path: Path) -> None:
    name, content, ids = FORMS[form]
    data = built(People(OWNERS), write(tmp_path / name, content), **({} if "pair" in form else {"local_test": 0}))
    assert trains(data) == [sorted(own) for own in LISTS]
    if "pair" in form:
        assert own_tests(data, len(OWNERS)) == [sorted(own) for own in TESTS]
    assert list(data.client_ids) == (ids or list(content))


def test_clients_can_share_test_samples_and_a_number_is_a_share(tmp_path: Path) -> None:
    split = write(tmp_path / "a.json", [{"train": [0, 1], "test": [3]}, {"train": [2, 3], "test": [3, 4]}])
    assert own_tests(built(People(OWNERS), split), len(OWNERS)) == [[3], [3, 4]]
    with pytest.warns(UserWarning, match=r"scenario\.local_test"):  # many configs set it
        shards = built(People(OWNERS), split, local_test=0).shards
    assert [shard.test.tolist() for shard in shards] == [[], []]


def test_fewer_clients_of_a_file_are_drawn_by_the_seed(tmp_path: Path) -> None:
    split = write(tmp_path / "a.json", [[k] for k in range(30)])
    drawn = [built(People(OWNERS), split, seed=seed, clients=4) for seed in (0, 0, 1)]
    for data in drawn:
        assert trains(data) == [[k] for k in data.client_ids]
        assert data.client_ids == sorted(data.client_ids)
    assert drawn[0].client_ids == drawn[1].client_ids != drawn[2].client_ids
    check_refused(lambda: built(People(OWNERS), split, clients=31), "clients", ": 31,", f"{split.path} has 30 clients")


BAD = {
    "index too large": ([[0, 40]], "assigned sample 40, but there are 40"),
    "negative index": ([[0, -1]], "assigned sample -1, but there are 40"),
    "sample of two clients": ([[0, 5], [5]], "assigned sample 5 twice"),
    "test index too large": ([{"train": [0], "test": [12]}], "assigned test sample 12, but there are 12"),
    "test index twice": ([{"train": [0], "test": [1, 1]}], "assigned test sample 1 twice"),
    "empty client": ({"ann": [0], "bert": []}, "client 'bert' has no training samples"),
    "no train": ([{"test": [1]}], "client 0 has 'test'."),
    "another part": ([{"train": [1], "val": [2]}], "client 0 has 'train', 'val'."),
    "boolean": ([[True]], "client 0 is not a list of integers"),
    "number": ([3], "client 0 is not a list of integers"),
    "huge": ([[10**30]], "too large"),
    "no clients": ([], "has no clients"),
    "no lists": (7, "it holds int."),
    "not JSON": ("[[1], [2", "not a readable JSON file (Expecting"),
    "duplicate name": ('{"ann": [1], "bert": [2], "ann": [3]}', "'ann' occurs twice"),
    "deep": ("[" * 100_000, "not a readable JSON file (maximum recursion depth"),
    "not text": (b"\xff\xfe\x00", "not a readable JSON file"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_list_is_refused_by_key_and_file(case: str, tmp_path: Path) -> None:
    content, expected = BAD[case]
    path = tmp_path / "a.json"
    path.write_bytes(content) if isinstance(content, bytes) else write(path, content)
    split = PredefinedSplit(str(path))
    check_refused(lambda: built(People(OWNERS), split), "partition.path", f": {path}: ", expected)


def save(**arrays: Any) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **arrays)


BAD_ARCHIVES: dict[str, tuple[Callable[[Path], object], str]] = {
    "objects": (save(ann=np.array([{}])), "not a readable .npz file ("),
    "floats": (save(ann=np.array([0.5])), "client 'ann' has float64 of shape (1,)"),
    "a table": (save(ann=np.eye(2, dtype=int)), "client 'ann' has int64 of shape (2, 2)"),
    "booleans": (save(ann=np.array([True])), "client 'ann' has bool of shape (1,)"),
    "only test": (save(**{"ann/test": np.arange(2)}), "client 'ann' has 'test'."),
    "two forms": (save(**{"ann": np.arange(2), "ann/test": np.arange(2)}), "not a readable file"),
    "missing": (lambda path: None, "no such file"),
}


@pytest.mark.parametrize("case", BAD_ARCHIVES)
def test_a_bad_archive_is_refused_by_key_and_file(case: str, tmp_path: Path) -> None:
    make, expected = BAD_ARCHIVES[case]
    make(tmp_path / "a.npz")
    split = PredefinedSplit(str(tmp_path / "a.npz"))
    check_refused(lambda: built(People(OWNERS), split), "partition.path", f": {split.path}: ", expected)


@pytest.mark.parametrize(("key", "value"), [("train_samples", 10), ("long_tail", 2)])
def test_options_that_reduce_the_dataset_are_refused(key: str, value: float, tmp_path: Path) -> None:
    split = write(tmp_path / "a.json", LISTS)
    check_refused(lambda: Scenario(People(OWNERS), split, **{key: value}), key, "PredefinedSplit")


def test_a_dataset_that_draws_its_test_samples_is_refused(tmp_path: Path) -> None:
    split = write(tmp_path / "a.json", [[0, 1], [2, 3]])
    table = "number,label,part\n" + "".join(f"{i},{'ab'[i % 2]},{'train' if i < 8 else 'test'}\n" for i in range(10))
    (tmp_path / "t.csv").write_text(table)
    path, options = str(tmp_path / "t.csv"), {"features": ["number"], "standardize": False}
    check_refused(lambda: built(Table(path, "label", **options), split), "partition.path", f": {split.path}: ", "Table")
    data = built(Table(path, "label", split="part", **options), split, local_test=0)
    assert [data.data.x_train[part].flatten().tolist() for part in trains(data)] == [[0, 1], [2, 3]]


# --- A custom partition of the whole dataset ---


@dataclass
class FixedSplits(Partition):
    """Returns given splits."""

    splits: ClientSplits

    def split(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        raise AssertionError

    def split_dataset(
        self, data: LoadedData, labels: np.ndarray, clients: int | None, rng: np.random.Generator
    ) -> ClientSplits:
        return self.splits


def test_a_custom_partition_can_return_test_samples_and_client_ids() -> None:
    splits = ClientSplits([np.array([3]), np.array([0, 2])], [np.array([], int), np.array([5])], ["b", "a"])
    data = built(People(OWNERS), FixedSplits(splits))
    assert (trains(data), own_tests(data, 40), data.client_ids) == ([[3], [0, 2]], [[], [5]], ["b", "a"])
    built(People(OWNERS), FixedSplits(splits), local_test="official")
    assert [part.tolist() for part in splits.test or ()] == [[], [5]]  # not changed


# --- Labels that are not classes ---


@dataclass
class UncheckedLabels(People):
    """Labels that are not classes; they are not checked."""

    y: Any = torch.float32

    def checked(self, objective=None) -> LoadedData:
        data = self.load()
        shape, dtype = ((2,), torch.uint8) if self.y == "labels" else ((), torch.float32)
        data.y_train, data.y_test = (torch.ones((len(y), *shape), dtype=dtype) for y in (data.y_train, data.y_test))
        return data


@pytest.mark.parametrize("y", ["labels", "numbers"])
@pytest.mark.parametrize("partition", [Dirichlet(), Shards(), Pathological(), DisjointClasses()])
def test_a_partition_by_class_needs_classes(partition: Partition, y: str) -> None:
    objective, name = "MultiLabel" if y == "labels" else "Regression", type(partition).__name__
    check_refused(lambda: built(UncheckedLabels(OWNERS, y=y), partition, clients=2), "partition", name, objective)


def test_a_long_tail_needs_classes() -> None:
    check_refused(lambda: built(UncheckedLabels(OWNERS), IID(), clients=2, long_tail=2), "long_tail", "Regression")


@pytest.mark.parametrize("y", ["labels", "numbers"])
@pytest.mark.parametrize("local_test", [None, 0.5, "official"])
@pytest.mark.parametrize("partition", [IID(), QuantitySkew(0.5, 2), ByClient()])
def test_other_partitions_need_no_classes(partition: Partition, local_test: Any, y: str, tmp_path: Path) -> None:
    clients = None if isinstance(partition, ByClient) else 4
    data = built(UncheckedLabels(OWNERS, y=y), partition, clients=clients, local_test=local_test, train_samples=30)
    held = data.class_counts("train") + data.class_counts("test")
    assert held.shape == (len(data.shards), 1)
    assert held.sum() == (42 if local_test == "official" else 30)
    write_counts(tmp_path / "partition.csv", data)
    assert (tmp_path / "partition.csv").read_text().startswith("client,split,samples")
    assert read_counts(tmp_path / "partition.csv").counts.tolist() == data.class_counts().tolist()


# --- Runs ---

NATURAL: dict[str, Any] = {"clients_per_round": 3, "rounds": 1, "batch_size": 8}


def femnist(folder: Path) -> Scenario:
    if not (folder / "femnist").exists():
        write_femnist(folder)
    return Scenario(FEMNIST(str(folder)), ByClient())


def test_a_run_without_a_number_of_clients_has_those_of_the_data(tmp_path: Path) -> None:
    silent = experiment(tmp_path / "silent", scenario=femnist(tmp_path), **NATURAL)
    stated = experiment(tmp_path / "stated", scenario=Scenario(femnist(tmp_path).dataset, ByClient(), 6), **NATURAL)
    assert silent.fit().summary == stated.fit().summary
    assert (silent.clients, silent.clients_per_round, silent.engine.fits) == (6, 3, 3)
    assert same_bytes(silent.state["model"], stated.state["model"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clients_per_round": 7}, "clients_per_round: 7 is not between 1 and 6, "),
        ({"clients_per_round": 0}, "clients_per_round: 0 is not between 1 and 6, "),
        ({"min_clients": 4}, "min_clients: 4 is above the 3 clients of a round"),
    ],
)
def test_impossible_numbers_of_clients_are_refused_before_anything_is_written(
    options: dict[str, int], expected: str, tmp_path: Path
) -> None:
    late = experiment(tmp_path / "run", scenario=femnist(tmp_path), **NATURAL | options)
    assert refusal(late.fit).startswith(expected)
    assert not (tmp_path / "run").exists()
    known = Scenario(femnist(tmp_path).dataset, ByClient(), 6)
    early = refusal(lambda: experiment(tmp_path / "run", scenario=known, **NATURAL | options))
    assert early.startswith(expected)


# --- The command line ---

FEMNIST_RUN = """# FedAvg on FEMNIST, in a second.
rounds: 2
clients_per_round: 3
batch_size: 8
scenario: {dataset: {class_path: FEMNIST, init_args: {data_dir: leaf}}, partition: ByClient}
model: {class_path: MLP, init_args: {hidden: [8]}}
algorithm: FedAvg
optimizer: {class_path: SGD, init_args: {lr: 0.1}}
trainer: {accelerator: cpu, max_epochs: 2}
evaluation: {client_model: received, max_clients: 4}
logger: null
"""
SPLIT = ["--scenario.dataset=Digits", "--scenario.partition=PredefinedSplit", "--scenario.partition.path=split.json"]
FIT = ["fit", "--config", "one.yaml"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_femnist(Path("leaf"))
    Path("one.yaml").write_text(FEMNIST_RUN)
    Path("split.json").write_text(json.dumps({f"site {k}": list(range(k, 1000, 7)) for k in range(7)}))
    return folder


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.parametrize(
    ("method", "words"),
    [("FedRep", []), ("PeerAlgorithm", []), ("FedAvg", SPLIT)],
    ids=["FedRep", "peers", "PredefinedSplit"],
)
@pytest.mark.fast_cases(1)
def test_a_run_without_scenario_clients_resumes_to_the_same_bytes(words: list[str], method: str, here: Path) -> None:
    more = [*words, f"--algorithm={method}"]
    for name, rounds in (("whole", 2), ("half", 1)):
        assert run(*FIT, *more, "--run_dir", name, f"--rounds={rounds}").code == 0
    outcome = run("fit", "--resume", "half", "--rounds=2")
    assert outcome.code == 0, outcome.err
    assert untimed_rows(Path("half")) == untimed_rows(Path("whole"))
    one, other = contents(Path("half")), contents(Path("whole"))
    assert [yaml.safe_load(each["config.yaml"])["scenario"]["clients"] for each in (one, other)] == [None, None]
    states = [name for name in one if name.endswith(("state.pt", ".safetensors", "partition.csv", "clients.csv"))]
    assert len(states) > 3
    assert [name for name in states if one[name] != other.get(name)] == []


def test_a_run_does_not_resume_with_another_partition(here: Path) -> None:
    assert run(*FIT, *SPLIT, "--run_dir", "run", "--rounds=1").code == 0
    lists = json.loads(Path("split.json").read_text())
    lists["site 0"].pop()
    Path("split.json").write_text(json.dumps(lists))
    code, _, err = run("fit", "--resume", "run", "--rounds=2")
    assert code == 2
    assert "scenario.partition: changed" in err


def test_client_names_are_in_partition_csv_and_printed(here: Path) -> None:
    assert run(*FIT, "--run_dir", "run", "--rounds=1").code == 0
    lines = rows(Path("run"), "partition.csv")
    ids = sorted(f"f{7 * k:04}_{k:02}" for k in range(6))
    assert [line["name"] for line in lines] == ids * 2
    assert [line["client"] for line in lines] == list("012345") * 2
    assert read_counts(Path("run/partition.csv")).counts.sum(axis=1).tolist() == [int(0.8 * (15 + k)) for k in range(6)]
    code, out, err = run("partition", "--config", "one.yaml")
    assert (code, err) == (0, "")
    for k, name in enumerate(ids):
        train = int(0.8 * (15 + k))
        (line,) = [line.split() for line in out.splitlines() if name in line]
        assert [line[0], *line[-3:]] == [str(k), str(train), str(15 + k - train), name]


def test_names_with_markup_and_control_characters_are_escaped(here: Path, tmp_path: Path) -> None:
    lists = {"[red]a[/red]": [0, 1], "b\n9,train,\x1b[31m": [2, 3], "\ud800": [4, 5]}
    Path("split.json").write_text(json.dumps(lists))
    code, out, err = run("partition", "--config", "one.yaml", *SPLIT, "--out", "out")
    assert (code, err) == (0, "")
    assert "[red]a[/red]" in out
    assert "\x1b" not in out
    lines = rows(Path("out"), "partition.csv")
    assert [line["name"] for line in lines[:3]] == ["[red]a[/red]", "b 9,train,\ufffd[31m", "\ufffd"]
    assert read_counts(Path("out/partition.csv")).counts.shape == (3, 10)


def test_partition_accepts_the_config_that_fit_prints(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*FIT, "--print_config"])
    printed = capsys.readouterr().out
    assert "resume: null" in printed
    assert "clients: null" in printed
    Path("printed.yaml").write_text(printed)
    one, other = (run("partition", "--config", name) for name in ("one.yaml", "printed.yaml"))
    assert one == other
    assert one.code == 0
    assert main(["partition", "--help"]) == 0
    assert "--resume" not in capsys.readouterr().out
