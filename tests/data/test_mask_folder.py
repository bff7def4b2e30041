"""Images with masks: folders of sites, the size of both, and docs/segmentation.md."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import rows, run_page
from PIL import Image
from refusals import refusal

from fl_lightning.core.objectives import Segmentation
from fl_lightning.data import Arrays, ByClient, MaskFolder, Scenario

PAGE = (Path(__file__).parents[2] / "docs" / "segmentation.md").read_text()


def write_pair(folder: Path, name: str, value: int, size: tuple[int, int] = (8, 8)) -> None:
    """Write an image whose pixels have this value, and its mask, which is 1 in the left half and else 0."""
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    mask = np.zeros(size, np.uint8)
    mask[:, : size[1] // 2] = 1
    Image.fromarray(np.full(size, value, np.uint8)).save(folder / "images" / f"{name}.png")
    Image.fromarray(mask).save(folder / "masks" / f"{name}.png")


def test_sites_are_clients_and_each_image_has_its_own_mask(tmp_path: Path) -> None:
    for value, (site, name) in enumerate((site, name) for site in ("b", "a") for name in "xyzuv"):
        write_pair(tmp_path / site, name, value)
        mask = np.full((8, 8), value % 3, np.uint8)
        mask[0, 0] = 255
        Image.fromarray(mask).save(tmp_path / site / "masks" / f"{name}.png")
    data = Scenario(MaskFolder(str(tmp_path)), ByClient()).build(0)
    assert data.names.clients == ["a", "b"]
    assert isinstance(data.objective, Segmentation)
    assert data.data.num_classes == 3
    for split in ("train", "test"):
        x, y = getattr(data.data, f"x_{split}"), getattr(data.data, f"y_{split}")
        assert y.dtype == torch.uint8
        assert [int(mask[1, 1]) for mask in y] == [int(image[0, 0, 0]) % 3 for image in x]
        assert all(int(mask[0, 0]) == 255 for mask in y)
    values = {client: data.data.x_train[data.shard(client).train][:, 0, 0, 0].tolist() for client in (0, 1)}
    assert all(value >= 5 for value in values[0])  # site a was written second
    assert all(value < 5 for value in values[1])


def test_masks_are_resized_to_the_nearest_pixel(tmp_path: Path) -> None:
    for name in "abcde":
        write_pair(tmp_path, name, 7, (8, 16))
    data = MaskFolder(str(tmp_path), size=(4, 8)).checked()
    assert data.in_shape == (1, 4, 8)
    expected = torch.zeros(4, 8, dtype=torch.uint8)
    expected[:, :4] = 1
    assert all(torch.equal(mask, expected) for mask in data.y_train)


def damaged(folder: Path, how: str) -> dict[str, Any]:
    """Damage the folder, and return the options of the dataset."""
    mask = folder / "masks" / "a.png"
    if how == "no mask":
        mask.unlink()
    elif how == "no images":
        (folder / "images").rename(folder / "pictures")
    elif how == "colour":
        Image.new("RGB", (8, 8)).save(mask)
    elif how == "no image file":
        mask.write_bytes(b"text")
    elif how == "one size":
        Image.new("L", (4, 4)).save(mask)
    elif how == "0 and 255":
        for path in mask.parent.iterdir():
            Image.fromarray((np.asarray(Image.open(path)) > 0).astype(np.uint8) * 255).save(path)
    elif how == "one class":
        for path in mask.parent.iterdir():
            Image.new("L", (8, 8)).save(path)
    elif how == "two masks":
        Image.new("L", (8, 8)).save(mask.with_suffix(".tif"))
    elif how == "no masks":
        mask.parent.rename(folder / "labels")
    elif how == "all sizes":
        for path in mask.parent.iterdir():
            Image.new("L", (4, 4)).save(path)
    return {"num_classes": 2} if how == "class" else {}


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ("no mask", "scenario.dataset.path"),
        ("no images", "scenario.dataset.path"),
        ("colour", "scenario.dataset.path"),
        ("no image file", "scenario.dataset.path"),
        ("one size", "scenario.dataset.size"),
        ("all sizes", "scenario.dataset.size"),
        ("class", "scenario.dataset: MaskFolder"),
        ("0 and 255", "scenario.dataset: MaskFolder: y_train holds only 0 and 255"),
        ("one class", "scenario.dataset: MaskFolder: y_train holds only 0"),
        ("two masks", "scenario.dataset.path"),
        ("no masks", "scenario.dataset.masks"),
    ],
)
def test_bad_folders_are_refused_by_their_key(how: str, key: str, tmp_path: Path) -> None:
    for name in "abcde":
        write_pair(tmp_path, name, 7)
    if how == "class":
        Image.new("L", (8, 8), 2).save(tmp_path / "masks" / "a.png")
    options = damaged(tmp_path, how)
    assert refusal(lambda: MaskFolder(str(tmp_path), **options).checked()).startswith(key)


@pytest.mark.parametrize("turned", [True, False])
def test_a_mask_that_is_not_turned_with_its_image_is_refused(turned: bool, tmp_path: Path) -> None:
    """A camera stores the orientation beside the pixels, and many programs for masks ignore it."""
    for name in "abcde":
        write_pair(tmp_path, name, 7, (8, 16))
    (tmp_path / "images" / "c.png").unlink()
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    Image.new("L", (16, 8), 7).save(tmp_path / "images" / "c.jpg", exif=exif)
    dataset = MaskFolder(str(tmp_path), size=(4, 8))
    if turned:
        assert refusal(dataset).startswith(f"scenario.dataset.path: {tmp_path / 'masks' / 'c.png'}")
    else:
        assert dataset.checked().in_shape == (1, 4, 8)


@pytest.mark.parametrize("second", ["test", "Validation"])
def test_folders_of_splits_are_no_sites(second: str, tmp_path: Path) -> None:
    for site, value in (("train", 1), (second, 2)):
        for name in "abc":
            write_pair(tmp_path / site, name, value)
    data = MaskFolder(str(tmp_path)).checked()
    assert data.client_train is None
    assert data.x_train.unique().tolist() == [1]
    assert data.x_test.unique().tolist() == [2]


def test_only_a_folder_of_training_images_holds_out_a_share(tmp_path: Path) -> None:
    for name in "abcde":
        write_pair(tmp_path / "train", name, 1)
    data = MaskFolder(str(tmp_path)).checked()
    assert (len(data.x_train), len(data.x_test), data.client_train) == (4, 1, None)


@pytest.mark.parametrize(
    ("used", "unused"), [(("a", "b"), "c"), (("train", "test"), "val"), (("",), "c/images"), (("a", "b"), "c/pictures")]
)
def test_folders_that_are_not_used_are_warned_of(used: tuple[str, ...], unused: str, tmp_path: Path) -> None:
    for site in used:
        for name in "abc":
            write_pair(tmp_path / site, name, 1)
    if unused == "val":
        write_pair(tmp_path / unused, "a", 1)
    (tmp_path / unused).mkdir(parents=True, exist_ok=True)
    with pytest.warns(UserWarning, match=f"the images of {unused.split('/')[0]} are not used"):
        MaskFolder(str(tmp_path), test_share=0.5).checked()


def test_masks_without_an_image_are_warned_of(tmp_path: Path) -> None:
    for name in "abcde":
        write_pair(tmp_path, name, 7)
    (tmp_path / "images" / "c.png").unlink()
    with pytest.warns(UserWarning, match=r"no image of the mask c.png found \(1 of 5 masks"):
        assert len(MaskFolder(str(tmp_path)).checked().x_train) == 3


def test_classes_without_a_pixel_are_warned_of(tmp_path: Path) -> None:
    for name in "abcde":
        write_pair(tmp_path, name, 7)
        mask = tmp_path / "masks" / f"{name}.png"
        Image.fromarray(np.asarray(Image.open(mask)) * 17).save(mask)
    with pytest.warns(UserWarning, match="no pixel has class 1 "):
        assert MaskFolder(str(tmp_path)).checked().num_classes == 18
    assert MaskFolder(str(tmp_path), num_classes=18).checked().num_classes == 18


def test_a_site_may_lack_a_class_that_it_declares(tmp_path: Path) -> None:
    for name in "abcde":
        write_pair(tmp_path, name, 7)
        Image.new("L", (8, 8)).save(tmp_path / "masks" / f"{name}.png")
    assert MaskFolder(str(tmp_path), num_classes=2).checked().num_classes == 2


@pytest.mark.parametrize("num_classes", [None, 2])
def test_arrays_of_0_and_255_are_refused(num_classes: int | None, tmp_path: Path) -> None:
    x, y = np.zeros((4, 8, 8), np.uint8), np.array([0, 255], np.uint8)[np.eye(8, dtype=int)[None].repeat(4, 0)]
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert "holds only 0 and 255" in refusal(Arrays(str(tmp_path / "data.npz"), num_classes=num_classes))


def test_masks_with_a_channel_are_refused_by_their_shape(tmp_path: Path) -> None:
    x, y = np.zeros((4, 8, 8), np.uint8), np.eye(8, dtype=np.uint8)[None, None].repeat(4, 0)
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert "mask (height, width)" in refusal(Arrays(str(tmp_path / "data.npz")))


def test_arrays_of_masks_stay_bytes(tmp_path: Path) -> None:
    masks = np.random.default_rng(0).integers(0, 3, (10, 4, 4)).astype(np.uint8)
    masks[:, 0] = 255
    images = np.zeros((10, 4, 4), np.uint8)
    np.savez(tmp_path / "a.npz", x_train=images, y_train=masks, x_test=images, y_test=masks)
    data = Arrays(str(tmp_path / "a.npz")).checked()
    assert data.num_classes == 3
    assert data.y_train.dtype == torch.uint8
    assert torch.equal(data.y_test, torch.from_numpy(masks))


@pytest.mark.thorough
def test_the_snippets_of_the_page_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(PAGE)
    found = rows(Path("runs/sites"))
    assert len(found) == 10
    assert float(found[-1]["global/iou"]) > 0.8
