"""Write tiny datasets in the layouts of their authors. Each function returns what it wrote.

Images are random; labels go through the classes in turn, so that every class occurs.
"""

import csv
import hashlib
import json
import pickle
import struct
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from scipy.io import savemat


class Split(NamedTuple):
    x: Any
    y: list[int]


def images(n: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def labels(n: int, classes: int) -> list[int]:
    return list(islice(cycle(range(classes)), n))


def random_split(n: int, classes: int, *shape: int, seed: int) -> Split:
    return Split(images(n, *shape, seed=seed), labels(n, classes))


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_idx(folder: Path, prefixes: tuple[str, str], classes: int, n: tuple[int, int], first: int = 0) -> list[Split]:
    """Write MNIST's files; `prefixes` are the names of the splits, and labels count from `first`."""
    folder.mkdir(parents=True)
    splits = [random_split(size, classes, 28, 28, seed=i) for i, size in enumerate(n)]
    for prefix, (x, y) in zip(prefixes, splits, strict=True):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(x))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.array(y, np.uint8) + first))
    return splits


def write_mnist(root: Path, name: str = "MNIST", n: tuple[int, int] = (60, 20)) -> list[Split]:
    return write_idx(root / name / "raw", ("train", "t10k"), 10, n)


def write_emnist(root: Path, split: str, n: tuple[int, int] = (188, 94)) -> list[Split]:
    classes, first = (26, 1) if split == "letters" else (47, 0)
    return write_idx(root / "EMNIST" / "raw", (f"emnist-{split}-train", f"emnist-{split}-test"), classes, n, first)


def write_cifar(
    root: Path, classes: int, monkeypatch: pytest.MonkeyPatch, n: tuple[int, int] = (200, 100)
) -> list[Split]:
    """Write pickled batches, and replace the published checksums by theirs."""
    source = {10: torchvision.datasets.CIFAR10, 100: torchvision.datasets.CIFAR100}[classes]
    key = {10: "labels", 100: "fine_labels"}[classes]
    folder = root / source.base_folder
    folder.mkdir(parents=True)
    splits = [random_split(size, classes, 3, 32, 32, seed=i) for i, size in enumerate(n)]
    for which, (x, y) in zip(("train_list", "test_list"), splits, strict=True):
        names = [name for name, _ in getattr(source, which)]
        pieces = zip(names, np.array_split(x, len(names)), np.array_split(y, len(names)), strict=True)
        batches = {name: {"data": piece.reshape(-1, 3072), key: own.tolist()} for name, piece, own in pieces}
        monkeypatch.setattr(source, which, [[name, pickled(folder / name, batches[name])] for name in names])
    meta = {source.meta["key"]: [f"class {j}" for j in range(classes)]}
    checksum = pickled(folder / source.meta["filename"], meta)
    monkeypatch.setattr(source, "meta", {**source.meta, "md5": checksum})
    return splits


def pickled(path: Path, content: dict[str, Any]) -> str:
    """Pickle as Python 2 and numpy 1 do, as in the real files; return the checksum."""
    old = pickle.dumps(content, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    path.write_bytes(old.replace(b"\x89\x88\x87", b"K\x00K\x01\x87"))
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_svhn(root: Path, monkeypatch: pytest.MonkeyPatch, n: tuple[int, int] = (60, 20)) -> list[Split]:
    """Write MATLAB files with channels before samples and the digit 0 as class 10."""
    splits = [random_split(size, 10, 3, 32, 32, seed=i) for i, size in enumerate(n)]
    known = dict(torchvision.datasets.SVHN.split_list)
    for name, (x, y) in zip(("train", "test"), splits, strict=True):
        path = root / f"{name}_32x32.mat"
        digits = np.array([digit or 10 for digit in y], np.uint8)[:, None]
        savemat(path, {"X": x.transpose(2, 3, 1, 0), "y": digits})
        known[name] = [known[name][0], path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", known)
    return splits


def write_pathmnist(root: Path, n: tuple[int, int] = (54, 18)) -> list[Split]:
    splits = [random_split(size, 9, 28, 28, 3, seed=i) for i, size in enumerate(n)]
    arrays = {}
    for name, (x, y) in zip(("train", "test"), splits, strict=True):
        arrays |= {f"{name}_images": x, f"{name}_labels": np.array(y, np.uint8)[:, None]}
    validation = {"val_images": images(9, 28, 28, 3), "val_labels": np.zeros((9, 1), np.uint8)}
    np.savez_compressed(root / "pathmnist.npz", **arrays, **validation)
    return splits


def write_tiny_imagenet(root: Path, classes: int = 200, n: tuple[int, int] = (1, 1)) -> list[Split]:
    """Write JPEGs of one colour, some grey; `n` is the number of training and test images per class."""
    folder = root / "tiny-imagenet-200"
    (folder / "val" / "images").mkdir(parents=True)
    names = [f"n{j:08d}" for j in np.random.default_rng(0).permutation(classes)]
    (folder / "wnids.txt").write_text("\n".join(names) + "\n")
    train, test, rows = Split([], []), Split([], []), []
    for j, name in enumerate(names):
        own = folder / "train" / name / "images"
        own.mkdir(parents=True)
        for i in range(n[0]):
            train.x.append(jpeg(own / f"{name}_{i}.JPEG", j, i))
            train.y.append(j)
        (folder / "train" / name / f"{name}_boxes.txt").write_text("0\t0\t62\t62\n")
    for number in range(n[1] * classes):
        j = number % classes
        test.x.append(jpeg(folder / "val" / "images" / f"val_{number}.JPEG", j, 100 + number))
        test.y.append(j)
        rows.append(f"val_{number}.JPEG\t{names[j]}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(rows))
    return [train, test]


def jpeg(path: Path, label: int, number: int) -> tuple[int, int, int]:
    """Write an image of one colour. Grey images have one channel."""
    grey = number % 3 == 0
    colour = (label % 256,) * 3 if grey else (label % 256, number % 256, 80)
    image = Image.new("L" if grey else "RGB", (64, 64), colour[0] if grey else colour)
    image.save(path, quality=100, subsampling=0)
    return colour


NEWS = ["peace talks", "cup final", "shares rise", "new planet"]


def write_ag_news(root: Path, n: tuple[int, int] = (40, 16)) -> list[Split]:
    """Write quoted csv rows of class from 1, title, description; some with commas, quotes and line breaks inside."""
    folder = root / "ag_news_csv"
    folder.mkdir()
    splits = []
    for name, size in zip(("train", "test"), n, strict=True):
        y = labels(size, 4)
        rows = [(str(j + 1), f"{NEWS[j]}, {i}", f'they said: "{name} {NEWS[j]}"\nagain') for i, j in enumerate(y)]
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
        splits.append(Split([f"{title} {text}" for _, title, text in rows], y))
    return splits


def write_imdb_folder(root: Path, n: tuple[int, int] = (20, 10)) -> list[Split]:
    """Write `n` training and test reviews per class, and an unlabelled one."""
    splits = []
    for name, size in zip(("train", "test"), n, strict=True):
        split = Split([], [])
        for label, (mood, word) in enumerate((("neg", "dreadful"), ("pos", "splendid"))):
            folder = root / "aclImdb" / name / mood
            folder.mkdir(parents=True)
            for i in range(size):
                text = f"A {word} film.<br /><br />Café number {i}"
                (folder / f"{i}_{1 + 9 * label}.txt").write_text(text, encoding="utf-8")
        for label, mood in enumerate(("neg", "pos")):
            paths = sorted((root / "aclImdb" / name / mood).iterdir())
            split.x.extend(path.read_text(encoding="utf-8") for path in paths)
            split.y.extend([label] * len(paths))
        splits.append(split)
    unlabelled = root / "aclImdb" / "train" / "unsup"
    unlabelled.mkdir()
    (unlabelled / "0_0.txt").write_text("unsupervised")
    return splits


def write_imdb_csv(root: Path, n: int = 24) -> list[Split]:
    y = labels(n, 2)
    texts = [f'review {i}, "{("dreadful", "splendid")[j]}"' for i, j in enumerate(y)]
    with (root / "IMDB Dataset.csv").open("w", newline="") as file:
        moods = [("negative", "positive")[j] for j in y]
        csv.writer(file).writerows([("review", "sentiment"), *zip(texts, moods, strict=True)])
    return [Split(texts[: n // 2], y[: n // 2]), Split(texts[n // 2 :], y[n // 2 :])]


def write_arrays(path: Path) -> None:
    train, test = random_split(60, 3, 8, 8, seed=0), random_split(30, 3, 8, 8, seed=1)
    np.savez(path, x_train=train.x, y_train=train.y, x_test=test.x, y_test=test.y)


LeafUser = tuple[list[Any], list[Any]]
LINES = {
    "THE_TRAGEDY_OF_HAMLET_HAMLET": "To be, or not to be: that is the question:\n",
    "THE_TRAGEDY_OF_HAMLET_OPHELIA": "My lord, I have remembrances of yours;\n",
    "TWELFTH_NIGHT_DUKE": "If music be the food of love, play on!\n",
    "TWELFTH_NIGHT_CURIO": "Will you go hunt, my lord?\n",
    "TWELFTH_NIGHT_MALVOLIO": "A\n",
}


def leaf_file(users: dict[str, LeafUser], hierarchies: list[str] | None, taken_out: str) -> str:
    """Return a file of LEAF's split by samples. A removed user is left in it without data."""
    content: dict[str, Any] = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in {**users, taken_out: ([], [])}.items()},
    }
    return json.dumps(content if hierarchies is None else content | {"hierarchies": hierarchies})


def write_leaf(
    root: Path, name: str, users: dict[str, LeafUser], train: float = 0.8, plays: bool = False
) -> list[dict[str, LeafUser]]:
    """Write files as `preprocess.sh -s niid -t sample --tf 0.8` does: two parts per user, two users per file."""
    splits: list[dict[str, LeafUser]] = [{}, {}]
    for user, (x, y) in users.items():
        cut = max(1, int(train * len(y)))
        splits[0][user], splits[1][user] = (x[:cut], y[:cut]), (x[cut:], y[cut:])
    for split, held in zip(("train", "test"), splits, strict=True):
        folder = root / name / "data" / split
        folder.mkdir(parents=True)
        for number in range(0, len(held), 2):
            own = dict(list(held.items())[number : number + 2])
            hierarchies = [*(user.rsplit("_", 1)[0] for user in own), "CYMBELINE"] if plays else None  # left whole
            text = leaf_file(own, hierarchies, f"gone_{number}")
            (folder / f"all_data_{number // 2}_niid_0_keep_0_{split}_8.json").write_text(text)
    return splits


def write_femnist(root: Path, writers: int = 6, each: int = 15, classes: int = 10) -> list[dict[str, LeafUser]]:
    """Write one noisy image per sample; each class has its own image, and writer k has `each + k` samples."""
    chance = np.random.default_rng(0)
    base_images, users = chance.integers(0, 256, (classes, 784)), {}
    for k in range(writers):
        y = chance.integers(0, classes, each + k).tolist()
        noisy = np.where(chance.random((len(y), 784)) < 0.3, 255, base_images[y])
        users[f"f{7 * k % 100:04}_{k:02}"] = ((noisy / 255).tolist(), y)
    return write_leaf(root, "femnist", users)


def write_shakespeare(root: Path) -> list[dict[str, LeafUser]]:
    """Write LEAF's windows of 80 characters over each role's lines, which begin with 80 spaces."""
    users = {}
    for role, line in LINES.items():
        padded = " " * 80 + line
        users[role] = ([padded[i : i + 80] for i in range(len(line))], list(line))
    return write_leaf(root, "shakespeare", users, plays=True)


def write_sent140(root: Path, each: int = 12) -> list[dict[str, LeafUser]]:
    users = {}
    for k, user in enumerate(("ann", "Zoë", "_bert_", "carl12")):
        y = labels(each + k, 2)
        tweets = [f"@{user} a {('dreadful', 'splendid')[label]} day, no. {i}!" for i, label in enumerate(y)]
        date = "Mon Apr 06 22:19:45 PDT 2009"
        users[user] = ([[str(1467810369 + i), date, "NO_QUERY", user, text] for i, text in enumerate(tweets)], y)
    return write_leaf(root, "sent140", users)


# --- Custom data ---


def write_image_folder(
    root: Path, splits: tuple[str, ...] = ("train", "test"), mode: str = "RGB", n: int = 10, ending: str = "png"
) -> dict[str, Split]:
    """Write a folder per class below each split, or below the root if its name is empty; two classes of n images."""
    written = {}
    for seed, split in enumerate(splits):
        x = images(2 * n, 8, 6, *((3,) if mode == "RGB" else ()), seed=seed)
        for i, pixels in enumerate(x):
            folder = root / split / ("cat", "dog")[i // n]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{i:03}.{ending}")
        written[split] = Split(x.transpose(0, 3, 1, 2) if mode == "RGB" else x[:, None], [0] * n + [1] * n)
    return written


SITES = ("east", "north", "west")


def write_image(path: Path, number: int) -> None:
    """Write an image of 6x8 pixels, all of which are the number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (6, 8), number).save(path)


def write_masks(root: Path, n: int = 10) -> None:
    """Write n images of 16x16 pixels for each of two sites, with masks of two classes."""
    for seed, site in enumerate(SITES[:2]):
        x, masks = images(n, 16, 16, seed=seed), images(n, 16, 16, seed=seed + 2) > 127
        for i in range(n):
            for kind, pixels in (("images", x[i]), ("masks", masks[i].astype(np.uint8))):
                (root / site / kind).mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(root / site / kind / f"{i:03}.png")


def write_sites(root: Path, form: str = "{site}/{kind}/{i:03}.png", n: int = 60, split: bool = False) -> None:
    """Write n images of the value i under paths of the form, with the sites and the classes `cat` and `dog` in turn."""
    for i in range(n):
        part = ("train", "train", "test")[i // 6 % 3] if split else ""
        write_image(root / form.format(site=SITES[i % 3], kind=("cat", "dog")[i // 3 % 2], i=i, split=part), i)


STYLES = ("art", "photo", "sketch")


def write_domains(root: Path, n: int = 10) -> None:
    """Write n images of two classes for each domain, as in PACS; image i of domain d has the value 20 d + i."""
    for d, domain in enumerate(STYLES):
        for i in range(n):
            write_image(root / domain / ("cat", "dog")[i % 2] / f"{i:02}.png", 20 * d + i)


def write_image_table(path: Path, n: int = 36) -> dict[str, list[Any]]:
    """Write a table of images, and the images beside it; image i has the value i."""
    columns: dict[str, list[Any]] = {
        "path": [f"scans/{i:03}.png" for i in range(n)],
        "label": [("ill", "well")[i // 3 % 2] for i in range(n)],
        "site": [SITES[i % 3] for i in range(n)],
        "split": [("train", "train", "test")[i // 6 % 3] for i in range(n)],
        "flu": [i % 2 for i in range(n)],
    }
    write_csv(path, columns)
    for i, name in enumerate(columns["path"]):
        write_image(path.parent / name, i)
    return columns


def table(n: int = 40, seed: int = 0) -> dict[str, list[Any]]:
    """Return columns: numbers, a category, a client and three kinds of labels."""
    rng = np.random.default_rng(seed)
    return {
        "age": rng.integers(20, 80, n).tolist(),
        "income": rng.normal(30_000, 5_000, n).tolist(),
        "town": [("Bern", "Basel", "Chur")[i % 3] for i in range(n)],
        "clinic": [f"clinic {i % 4}" for i in range(n)],
        "label": [("no", "yes")[i % 2] for i in range(n)],
        "flu": [i % 2 for i in range(n)],
        "cold": [i // 2 % 2 for i in range(n)],
        "days": rng.normal(5, 2, n).tolist(),
    }


def write_csv(path: Path, columns: dict[str, list[Any]], separator: str = ",") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerows([list(columns), *zip(*columns.values(), strict=True)])


def write_table(path: Path, n: int = 40) -> dict[str, list[Any]]:
    write_csv(path, columns := table(n))
    return columns


def write_text_table(path: Path, n: int = 40) -> dict[str, list[Any]]:
    moods = ("good", "bad")
    columns = {
        "text": [f"a {moods[i % 2]} film, number {i}" for i in range(n)],
        "label": [moods[i % 2] for i in range(n)],
        "author": [i % 5 for i in range(n)],
    }
    write_csv(path, columns)
    return columns


def write_texts(folder: Path, n: int = 20) -> None:
    """Write n sentences for each of two clients, of different lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    for site in SITES[:2]:
        (folder / f"{site}.txt").write_text("\n".join(f"{site} has {'many ' * (i % 4)}texts" for i in range(n)))


def write_instructions(path: Path, n: int = 20) -> None:
    """Write n prompts with responses for each of two clients."""
    lines = [{"client": site, "prompt": f"Say {i}", "response": f"{i} {site}"} for site in SITES[:2] for i in range(n)]
    path.write_text("\n".join(map(json.dumps, lines)))


def write_hugging_face(path: Path, n: int = 40) -> Split:
    """Save a dataset of images in one split."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    x, y = images(n, 8, 8, 3), labels(n, 2)
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
    rows = {"image": [Image.fromarray(pixels) for pixels in x], "label": y}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(path))
    return Split(x.transpose(0, 3, 1, 2), y)


def save_dataset(path: Path, train: Any, test: Any = None) -> str:
    """Save one Hugging Face dataset, or two splits; return the path."""
    datasets = pytest.importorskip("datasets")
    (train if test is None else datasets.DatasetDict(train=train, test=test)).save_to_disk(str(path))
    return str(path)


def same(x: torch.Tensor, expected: np.ndarray) -> bool:
    return x.dtype == torch.uint8 and np.array_equal(x.numpy(), expected)


def save_arrays(folder: Path, shape: tuple[int, ...] = (3, 8, 8), **more: np.ndarray) -> dict[str, np.ndarray]:
    """Write a folder of `.npy` files, and an `.npz` file of the same arrays beside it."""
    folder.mkdir()
    arrays = {"x_train": images(20, *shape), "x_test": images(6, *shape, seed=1)}
    arrays |= {"y_train": np.arange(20) % 3, "y_test": np.arange(6) % 3, **more}
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    np.savez(folder.with_suffix(".npz"), **arrays)
    return arrays


class Pairs(torch.utils.data.Dataset):
    """A map-style dataset of n pairs; `x` and `y` map an index to an input and a label."""

    def __init__(self, n: int = 20, x: Any = None, y: Any = None) -> None:
        self.n, self.x, self.y = n, x, y

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.x(i) if callable(self.x) else torch.full((4,), float(i)), self.y(i) if callable(self.y) else i % 3
