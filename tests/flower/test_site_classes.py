"""A client on its own machine lists the classes of all clients, and may lack samples of some of them."""

import numpy as np
import pytest
import torch
from layouts import write_csv, write_image

from fl_lightning.cli.commands.node import read_site
from fl_lightning.core.errors import ConfigError
from fl_lightning.data.remote import check_same_form
from fl_lightning.flower.node import Node

CLASSES = "[benign, malignant, normal]"


def site(folder, client, dataset, classes=CLASSES):
    """Write and read the file of a client."""
    listed = f"classes: {classes}\n" if classes else ""
    (folder / "client.yaml").write_text(f"client: {client}\ndataset: {dataset}\nlocal_test: 0.5\n{listed}")
    return read_site(folder / "client.yaml")


def photos(folder, *classes):
    for value, name in enumerate(classes):
        for number in range(4):
            write_image(folder / name / f"{number}.png", 10 * value + number)
    return f"{{class_path: ImageFolder, init_args: {{path: {folder}}}}}"


def names(node):
    data = node.data.data
    return {data.class_names[label] for label in torch.cat([data.y_train, data.y_test]).tolist()}


@pytest.mark.parametrize("present", [("benign", "malignant"), ("malignant", "normal"), ("normal",)])
@pytest.mark.parametrize("layout", ["folders", "pattern", "train"])
def test_images_of_some_classes(tmp_path, present, layout):
    dataset = photos(tmp_path / "photos", *present)
    if layout == "pattern":
        dataset = dataset.replace("}}", ", pattern: '{class}/*'}}")
    if layout == "train":
        for split in ("train", "test"):
            dataset = photos(tmp_path / "split" / split, *present)
        dataset = dataset.replace("/test}", "}")
    node = Node(site(tmp_path, 0, dataset), tmp_path / "state", None)
    assert names(node) == {*present}
    assert node.description.classes == ["benign", "malignant", "normal"]
    assert node.description.outputs == 3


def test_clients_with_a_list_fit_together_and_without_it_do_not(tmp_path):
    datasets = [photos(tmp_path / "0", "benign", "malignant"), photos(tmp_path / "1", "malignant", "normal")]
    described = {
        listed: [Node(site(tmp_path, 0, each, listed), tmp_path, None).description for each in datasets]
        for listed in (CLASSES, None)
    }
    check_same_form(described[CLASSES])
    with pytest.raises(ConfigError, match=r"^client 1: .* classes malignant, normal instead of benign, malignant\. "):
        check_same_form(described[None])


def test_a_list_may_have_another_order(tmp_path):
    dataset = photos(tmp_path / "photos", "benign", "malignant")
    node = Node(site(tmp_path, 0, dataset, "[normal, malignant, benign]"), tmp_path, None)
    data = node.data.data
    for split in ("train", "test"):
        images, y = getattr(data, f"x_{split}"), getattr(data, f"y_{split}")
        expected = ["malignant" if image.flatten()[0] >= 10 else "benign" for image in images]
        assert [data.class_names[label] for label in y.tolist()] == expected


def test_arrays_take_names_by_number(tmp_path):
    for split in ("train", "test"):
        np.save(tmp_path / f"x_{split}.npy", np.ones((8, 4), np.float32))
        np.save(tmp_path / f"y_{split}.npy", np.arange(8) % 2)
    arrays = f"{{class_path: Arrays, init_args: {{path: {tmp_path}}}}}"
    assert names(Node(site(tmp_path, 0, arrays), tmp_path, None)) == {"benign", "malignant"}


def test_tables_of_images_may_have_one_class_and_other_tables_have_a_schema(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos(tmp_path, "malignant")
    columns = {"image": [f"malignant/{number}.png" for number in range(4)], "label": ["malignant"] * 4}
    write_csv(tmp_path / "t.csv", columns)
    images = "{class_path: ImageTable, init_args: {path: t.csv, image: image, label: label}}"
    node = Node(site(tmp_path, 0, images), tmp_path, None)
    assert names(node) == {"malignant"}
    assert node.description.outputs == 3
    with pytest.raises(ConfigError, match=r"holds 'malignant' .*, which is not listed under classes"):
        Node(site(tmp_path, 0, images, "[benign, normal]"), tmp_path, None)
    write_csv(tmp_path / "t.csv", {"a": [1.0, 2.0] * 4, "label": ["malignant"] * 8})
    table = "{class_path: Table, init_args: {path: t.csv, label: label}}"
    with pytest.raises(ConfigError, match=r"^classes: .*schema\.json"):
        Node(site(tmp_path, 0, table), tmp_path, None)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ("[benign, normal]", "classes: the data have the class 'malignant', which is not listed. Add it"),
        ("[benign, benign]", "classes: a name is empty, too long or occurs twice"),
        ("['', a]", "classes: a name is empty, too long or occurs twice"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path, classes, message):
    dataset = photos(tmp_path / "photos", "benign", "malignant")
    with pytest.raises(ConfigError, match=message):
        Node(site(tmp_path, 0, dataset, classes), tmp_path, None)


def test_numbers_without_names_need_a_long_enough_list(tmp_path):
    site_of = site(tmp_path, 0, "Digits")
    with pytest.raises(ConfigError, match=r"^classes: .* 10 classes.* 3"):
        Node(site_of, tmp_path, None)
