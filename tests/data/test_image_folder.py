"""Image folders with a pattern of class, client and split."""

import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments import finished, same_bytes, untimed
from layouts import SITES, write_image, write_sites
from PIL import Image
from refusals import check_refused, refusal

from fl_lightning import ConfigError
from fl_lightning.data import IID, ByClient, ImageFolder, LoadedData, Scenario, image_files
from fl_lightning.data.lazy import LazySamples
from fl_lightning.engines import ProcessesEngine, SequentialEngine, StackedEngine

FORMS = {
    "{client}/{class}/*": "{site}/{kind}/{i:03}.png",
    "{class}/{client}_*.png": "{kind}/{site}_a_{i:03}.png",
    "scans/*/{client}-{class}-????*": "scans/{i}/{site}-{kind}-{i:03}.png",
    "{split}/{client}/{class}/*": "{split}/{site}/{kind}/{i:03}.png",
    "{client}/{split}/{class}/*": "{site}/{split}/{kind}/{i:03}.png",
}


def labels_by_image(data: LoadedData, split: str) -> dict[int, tuple[int, str]]:
    """Return the label and client of each image of a split; image i of `write_sites` has the value i."""
    values = getattr(data, f"x_{split}")[:, 0, 0, 0].tolist()
    labels, clients = getattr(data, f"y_{split}").tolist(), getattr(data, f"client_{split}").tolist()
    return dict(zip(values, zip(labels, clients, strict=True), strict=True))


@pytest.mark.parametrize("pattern", FORMS)
def test_a_pattern_gives_each_image_its_class_client_and_split(pattern: str, tmp_path: Path) -> None:
    has_split = "{split}" in pattern
    write_sites(tmp_path, FORMS[pattern], split=has_split)
    data = ImageFolder(str(tmp_path), pattern=pattern).checked()
    train, test = (labels_by_image(data, split) for split in ("train", "test"))
    assert train | test == {i: (i // 3 % 2, SITES[i % 3]) for i in range(60)}
    assert len(train) + len(test) == 60
    if has_split:
        assert set(test) == {i for i in range(60) if i // 6 % 3 == 2}
    else:
        assert len(test) == 12
    assert data.class_names == ["cat", "dog"]


def test_sites_become_clients(tmp_path: Path) -> None:
    write_sites(tmp_path)
    built = Scenario(ImageFolder(str(tmp_path), pattern="{client}/{class}/*"), ByClient()).build(0)
    assert built.client_ids == list(SITES)
    assert built.class_counts("train").sum() + built.class_counts("test").sum() == 60


def test_a_pattern_can_have_no_client_and_val_replaces_a_missing_test(tmp_path: Path) -> None:
    write_sites(tmp_path, "{split}/{kind}/{i:03}.png", split=True)
    pattern = "{split}/{class}/*"
    data = ImageFolder(str(tmp_path), pattern=pattern).checked()
    plain = ImageFolder(str(tmp_path)).checked()
    assert data.client_train is None
    assert np.array_equal(data.x_train, plain.x_train)
    write_image(tmp_path / "val" / "cat" / "x.png", 99)
    with pytest.warns(UserWarning, match=r"^scenario\.dataset\.pattern: .* 1 images of the split val"):
        assert 99 not in ImageFolder(str(tmp_path), pattern=pattern).checked().x_train
    shutil.rmtree(tmp_path / "test")
    assert ImageFolder(str(tmp_path), pattern=pattern).checked().x_test.unique().tolist() == [99]


def test_files_that_do_not_match_and_clients_without_a_class_are_told(tmp_path: Path) -> None:
    write_sites(tmp_path)
    shutil.rmtree(tmp_path / "east" / "dog")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "west" / "cat" / "more").mkdir()
    (tmp_path / "west" / "cat" / ".hidden.png").write_text("")
    make = partial(ImageFolder, str(tmp_path), pattern="{client}/{class}/*")
    with pytest.warns(UserWarning, match=r"scenario\.dataset\.") as caught:
        data = make().checked()
    left_out, lacks = (str(one.message) for one in caught)
    assert re.match(r"scenario\.dataset\.pattern: .* 2 of 52 files, such as notes\.txt$", left_out)
    assert re.match(r"scenario\.dataset\.path: client east .* dog$", lacks)
    assert len(data.y_train) + len(data.y_test) == 50
    (tmp_path / "notes.txt").unlink()
    (tmp_path / "west" / "cat" / "more").rmdir()
    shutil.rmtree(tmp_path / "north" / "dog")
    with pytest.warns(UserWarning, match=r"class dog \(2 of 3 clients"):
        make().checked()


def rename_folders(name: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        for path in list(root.glob(f"**/{name}")):
            path.rename(path.with_name(new))

    return change


def do_nothing(root: Path) -> None:
    pass


def keep_only(name: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        for path in root.iterdir():
            if path.name != name:
                shutil.rmtree(path)

    return change


SPLIT = "{split}/{client}/{class}/*"


def remove_two_sites(root: Path) -> None:
    for part in ("train", "test"):
        for name in ("east", "west"):
            shutil.rmtree(root / part / name)


BAD: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "unknown field": ("{site}/{class}/*", do_nothing, "has an unknown field, {site}"),
    "field twice": ("{class}/{class}/*", do_nothing, "has {class} twice"),
    "no class": ("{client}/*", do_nothing, "has no {class}"),
    "no match": ("{client}/{class}/*.jpg", do_nothing, "matches no file in mine. It contains, for example, test/east/"),
    "a dot is a dot": ("{split}/{client}/{class}/0.*", do_nothing, "matches no file in mine"),
    "no files": (SPLIT, keep_only("nothing"), "matches no file in mine. It contains no files"),
    "one class": ("*/{class}/*/*", remove_two_sites, "finds only the class north"),
    "other split": (
        SPLIT,
        rename_folders("test", "second"),
        "finds the split 'second' in mine/second/east/cat/012.png",
    ),
    "no test": (SPLIT, keep_only("train"), "finds no image of the split test"),
    "no train": (SPLIT, keep_only("test"), "finds no image of the split train"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_pattern_that_does_not_fit_the_folder_is_refused(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    pattern, change, expected = BAD[case]
    monkeypatch.chdir(tmp_path)
    write_sites(tmp_path / "mine", "{split}/{site}/{kind}/{i:03}.png", split=True)
    change(tmp_path / "mine")
    check_refused(lambda: ImageFolder("mine", pattern=pattern), "dataset.pattern", f": '{pattern}' {expected}")


def test_a_class_only_in_the_test_images_is_refused(tmp_path: Path) -> None:
    write_sites(tmp_path, "{split}/{site}/{kind}/{i:03}.png", split=True)
    write_image(tmp_path / "test" / "east" / "cow" / "x.png", 0)
    make = partial(ImageFolder, str(tmp_path), pattern=SPLIT)
    check_refused(make, "dataset.path", f": {tmp_path}/test/east/cow/x.png: ")


@pytest.mark.parametrize("split", [False, True])
def test_folders_of_clients_without_a_pattern_are_refused_with_the_pattern(split: bool, tmp_path: Path) -> None:
    write_sites(tmp_path, f"{'{split}/' * split}{{site}}/{{kind}}/{{i:03}}.png", split=split)
    message = refusal(lambda: ImageFolder(str(tmp_path)))
    assert "east: has folders, such as cat" in message
    pattern = message.split("'")[1]
    assert ImageFolder(str(tmp_path), pattern=pattern).checked().class_names == ["cat", "dog"]


NAMES = {
    "Kaggle": ("Training", "Testing"),
    "short": ("trn", "tst"),
    "sets": ("train_set", "Test-Set"),
    "validation": ("TRAIN", "validation"),
    "dev": ("training", "dev"),
}


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("pattern", [None, "{split}/{class}/*"])
def test_folders_of_the_splits_have_several_names(case: str, pattern: str | None, tmp_path: Path) -> None:
    write_sites(tmp_path / "plain", "{split}/{kind}/{i:03}.png", split=True)
    plain = ImageFolder(str(tmp_path / "plain")).checked()
    shutil.copytree(tmp_path / "plain", tmp_path / "mine")
    for old, new in zip(("train", "test"), NAMES[case], strict=True):
        (tmp_path / "mine" / old).rename(tmp_path / "mine" / new)
    data = ImageFolder(str(tmp_path / "mine"), pattern=pattern).checked()
    assert np.array_equal(data.x_train, plain.x_train)
    assert np.array_equal(data.x_test, plain.x_test)
    assert data.class_names == ["cat", "dog"]


LEFT_BEHIND = (
    *("__MACOSX/train/cat/._000.png", ".DS_Store", "train/.DS_Store", "train/cat/Thumbs.db", "test/dog/desktop.ini"),
    *(
        "train/dog/._006.png",
        "test/cat/@eaDir/000.png",
        "$RECYCLE.BIN/x",
        "train/.ipynb_checkpoints/a",
        "train/cat/~$a",
    ),
)


@pytest.mark.parametrize("pattern", [None, "{split}/{class}/*"])
def test_what_archives_and_file_managers_leave_behind_is_ignored(pattern: str | None, tmp_path: Path) -> None:
    write_sites(tmp_path, "{split}/{kind}/{i:03}.png", split=True)
    plain = ImageFolder(str(tmp_path), pattern=pattern).checked()
    for name in LEFT_BEHIND:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    data = ImageFolder(str(tmp_path), pattern=pattern).checked()
    assert np.array_equal(data.x_train, plain.x_train)
    assert data.class_names == ["cat", "dog"]


def test_an_archive_with_one_folder_names_this_folder(tmp_path: Path) -> None:
    write_sites(tmp_path / "photos", "{split}/{kind}/{i:03}.png", split=True)
    (tmp_path / "__MACOSX").mkdir()
    check_refused(lambda: ImageFolder(str(tmp_path)), "dataset.path", "has 1 folder(s)", f"{tmp_path}/photos?")


def test_folders_that_are_not_used_are_warned_of(tmp_path: Path) -> None:
    write_sites(tmp_path, "{split}/{kind}/{i:03}.png", split=True)
    for name in ("val", "unlabelled"):
        write_image(tmp_path / name / "cat" / "x.png", 99)
    with pytest.warns(UserWarning, match=r"^scenario.dataset.path: .* unlabelled, val "):
        data = ImageFolder(str(tmp_path)).checked()
    assert 99 not in data.x_train
    assert 99 not in data.x_test


def only_capital_training(root: Path) -> None:
    shutil.rmtree(root / "test")
    (root / "train").rename(root / "Training")


SPLITS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "two names": (lambda root: write_image(root / "Training/cat/x.png", 0), "has the folders Training and train"),
    "no train": (lambda root: shutil.rmtree(root / "train"), "has a folder test but no train"),
    "no test": (only_capital_training, "has a folder Training but no test"),
    "new class": (lambda root: write_image(root / "test" / "cow" / "x.png", 0), "/test/cow: "),
}


@pytest.mark.parametrize("case", SPLITS)
def test_folders_of_splits_that_do_not_fit_are_refused(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    change, expected = SPLITS[case]
    monkeypatch.chdir(tmp_path)
    write_sites(tmp_path / "mine", "{split}/{kind}/{i:03}.png", split=True)
    change(tmp_path / "mine")
    check_refused(lambda: ImageFolder("mine"), "dataset.path", ": mine", expected)


@pytest.mark.parametrize(
    "form", ["{site}/{split}/{kind}/{i:03}.png", "{kind}/{split}/{i:03}.png", "{split}/{site}/{kind}/{i:03}.png"]
)
@pytest.mark.parametrize("names", [("train", "test"), ("Training", "Testing")])
def test_the_pattern_in_the_message_knows_names_of_splits(form: str, names: tuple[str, str], tmp_path: Path) -> None:
    write_sites(tmp_path, form, split=True)
    for old, new in zip(("train", "test"), names, strict=True):
        rename_folders(old, new)(tmp_path)
    pattern = refusal(lambda: ImageFolder(str(tmp_path))).split("'")[1]
    data = ImageFolder(str(tmp_path), pattern=pattern).checked()
    assert data.class_names == ["cat", "dog"]
    assert sorted(data.x_test[:, 0, 0, 0].tolist()) == [i for i in range(60) if i // 6 % 3 == 2]


# --- Images that are decoded when batches need them ---


def write_noise(root: Path) -> Path:
    """Write 60 images of random pixels and of several sizes, in two classes, and return their folder."""
    rng = np.random.default_rng(0)
    for i in range(60):
        path = root / ("cat", "dog")[i % 2] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6 + i % 3, 8, 3), dtype=np.uint8)).save(path)
    return root


def lazy_run(tmp_path: Path, name: str, **options: Any) -> Any:
    dataset = ImageFolder(str(tmp_path / "images"), size=6, lazy=name != "eager", augment="per_sample")
    scenario = Scenario(dataset, IID(), 3)
    return finished(tmp_path / name, scenario=scenario, rounds=2, clients_per_round=2, batch_size=8, **options)


@pytest.mark.parametrize("engine", [SequentialEngine(), pytest.param(StackedEngine(), marks=pytest.mark.thorough)])
def test_images_decoded_on_demand_give_the_same_bytes(tmp_path: Path, engine: Any) -> None:
    write_noise(tmp_path / "images")
    eager, lazy = (lazy_run(tmp_path, name, engine=engine) for name in ("eager", "lazy"))
    assert isinstance(lazy.data.data.x_train, LazySamples)
    assert same_bytes(lazy.state["model"], eager.state["model"])
    assert untimed(lazy.csv.rows) == untimed(eager.csv.rows)


@pytest.mark.thorough
def test_worker_processes_decode_images_too(tmp_path: Path) -> None:
    write_noise(tmp_path / "images")
    lazy, processes = lazy_run(tmp_path, "lazy"), lazy_run(tmp_path, "processes", engine=ProcessesEngine(2))
    assert same_bytes(lazy.state["model"], processes.state["model"])


def test_only_the_images_of_a_batch_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []

    def counted(image: image_files.EncodedImage, shape: image_files.ImageShape) -> Any:
        decoded.append(image.name)
        return original(image, shape)

    original = image_files.decode
    monkeypatch.setattr(image_files, "decode", counted)
    options = {"mean": [0.5] * 3, "std": [0.2] * 3, "size": 6}
    lazy = ImageFolder(str(write_noise(tmp_path)), lazy=True, **options).load()
    assert len(decoded) == 1  # for the shape
    batch = lazy.x_train.index_select(0, torch.arange(5))
    assert len(decoded) == 6
    assert torch.equal(batch, ImageFolder(str(tmp_path), **options).load().x_train[:5])
    assert torch.equal(pickle.loads(pickle.dumps(lazy.x_train)).index_select(0, torch.arange(5)), batch)


def test_an_image_that_disappears_is_named_when_it_is_read(tmp_path: Path) -> None:
    lazy = ImageFolder(str(write_noise(tmp_path)), size=6, lazy=True).load()
    shutil.rmtree(tmp_path / "cat")
    with pytest.raises(ConfigError, match=r"^scenario\.dataset\.path: .*/cat/"):
        lazy.x_train.index_select(0, torch.arange(len(lazy.x_train)))


def test_a_cache_of_images_that_are_decoded_on_demand_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^scenario\.dataset\.lazy: "):
        ImageFolder(str(tmp_path), lazy=True, cache=str(tmp_path / "cache"))
