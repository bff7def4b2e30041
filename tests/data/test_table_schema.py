"""The schema of a table, in run folders and in exported networks."""

import json
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from commands import contents, run, summary, tiny

from fl_lightning import ClientModule, Table, TableSchema, open_run
from fl_lightning.core.errors import ConfigError

TEXT = """
rounds: 3
batch_size: 16
scenario:
  dataset:
    class_path: Table
    init_args:
      path: train.csv
      test_path: test.csv
      label: ill
      client: hospital
      categorical: [ward]
  partition: ByClient
model: {class_path: MLP, init_args: {hidden: [16]}}
algorithm: FedAvg
optimizer: {class_path: SGD, init_args: {lr: 0.2}}
trainer: {max_epochs: 2, accelerator: cpu}
logger: null
"""
CODES = ("--scenario.dataset.encoding", "codes")


def patients(n: int, seed: int) -> pd.DataFrame:
    """Rows whose columns have very different scales; town, ward and two numbers say who is ill."""
    rng = np.random.default_rng(seed)
    town, ward = rng.choice(["Bern", "Chur", "Zug"], n), rng.choice([7, 30, 9], n)
    dose, seconds = rng.normal(3e-4, 1e-4, n), 1_700_000_000 + rng.integers(0, 100, n)
    score = (dose - 3e-4) / 1e-4 + (seconds - 1_700_000_050) / 29 + 2.0 * (town == "Bern") - 2.0 * (ward == 30)
    columns = {"dose": dose, "town": town, "seconds": seconds, "ward": ward, "hospital": rng.choice(["a", "b"], n)}
    return pd.DataFrame(columns | {"ill": np.where(score > 0, "yes", "no")})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schema")
    test = patients(200, 1)
    test.loc[:3, "town"] = "Olten"  # no training row is from there
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patients(300, 0).to_csv("train.csv", index=False)
        test[list(reversed(test.columns))].to_csv("test.csv", index=False)
        (folder / "output").write_text(tiny(folder / "one_hot", text=TEXT).out)
        tiny(folder / "codes", *CODES, text=TEXT)
    return folder


@pytest.fixture(autouse=True)
def _change_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def outputs(path: Path, name: str, rows: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return an exported network's outputs for a table's raw rows, and the schema that is exported with it."""
    if path.suffix == ".onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
        held = session.get_modelmeta().custom_metadata_map["schema.json"]
        return torch.from_numpy(session.run(None, {"input": rows.numpy()})[0]), held
    if path.suffix == ".ts":
        files = {"schema.json": ""}
        return torch.jit.load(str(path), _extra_files=files)(rows), files["schema.json"].decode()
    if path.suffix == ".ckpt":
        held = torch.load(path, weights_only=True)["hyper_parameters"]["schema"]
        network = ClientModule.load_from_checkpoint(path)
    else:
        held = path.with_suffix(".schema.json").read_text()
        network = open_run(name).worker.modules.build().backbone
        network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()(TableSchema.from_json(held).encode(rows)), held


@pytest.mark.parametrize("name", ["one_hot", "codes"])
@pytest.mark.parametrize("suffix", [".ts", ".onnx", ".pt", ".ckpt"])
@pytest.mark.fast_cases(1)
def test_an_exported_network_is_as_accurate_on_raw_rows_as_the_run(suffix, name, tmp_path):
    path = tmp_path / f"model{suffix}"
    outcome = run("export", name, "-o", path)
    assert outcome.code == 0, outcome.err
    if suffix in (".onnx", ".ts"):
        assert "it takes raw rows" in outcome.out
        assert "float64 (batch, 4)" in outcome.out
    schema = TableSchema.from_json(Path(name, "schema.json").read_text())
    frame = pd.read_csv("test.csv")
    with torch.no_grad():
        logits, held = outputs(path, name, schema.rows(frame))
    assert held == Path(name, "schema.json").read_text()
    predicted = np.array(schema.classes)[logits.argmax(dim=1).numpy()]
    accuracy = float((predicted == frame["ill"]).mean())
    assert accuracy == pytest.approx(summary(Path(name))["global/acc_last"], abs=1e-9)
    assert accuracy > 0.8
    whole = open_run(name)
    with torch.no_grad():
        own = whole.worker.modules.build_shared(whole.state["model"]).eval()(whole.data.data.x_test)
    torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["one_hot", "codes"])
def test_a_traced_schema_works_on_another_device(name):
    schema = TableSchema.from_json(Path(name, "schema.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constants of the trace, and that it is deprecated
        traced = torch.jit.trace(schema.encode, schema.examples(2))
    assert traced(schema.examples(5).to("meta")).device.type == "meta"


def test_the_schema_of_a_run_names_its_columns():
    schema = json.loads(Path("one_hot/schema.json").read_text())
    dose, town, seconds, ward = schema.pop("columns")
    train = pd.read_csv("train.csv")
    assert (dose["name"], dose["dtype"], dose["categories"]) == ("dose", "float64", None)
    assert (dose["mean"], dose["scale"]) == pytest.approx((train["dose"].mean(), train["dose"].std(ddof=0)))
    assert (town["name"], town["categories"]) == ("town", ["Bern", "Chur", "Zug"])
    assert (seconds["name"], seconds["dtype"]) == ("seconds", "int64")
    assert ward == {"name": "ward", "dtype": "int64", "categories": [7, 9, 30], "mean": 0.0, "scale": 1.0}
    assert schema == {"encoding": "one_hot", "label": ["ill"], "classes": ["no", "yes"], "client": "hospital"}


def test_fit_and_partition_name_the_features():
    line = "features: dose, town, seconds, ward; label: ill; client: hospital"
    assert Path("output").read_text().splitlines()[2] == line
    outcome = run("partition", "--config", "one_hot.yaml")
    assert (outcome.code, outcome.out.splitlines()[0]) == (0, line)


def test_the_summary_names_the_first_of_many_features(tmp_path):
    frame = pd.DataFrame({f"x{i}": [*range(10)] * 2 for i in range(30)} | {"label": [0, 1] * 10})
    frame.to_csv(tmp_path / "wide.csv", index=False)
    schema = Table(str(tmp_path / "wide.csv"), "label").checked().schema
    assert schema.summary() == "features: x0, x1, x2, x3, x4, x5, x6, x7 and 22 more; label: label"
    assert TableSchema.from_json(schema.to_json()) == schema


@pytest.mark.thorough
def test_a_resumed_run_writes_its_schema_again(tmp_path):
    tiny(tmp_path / "run", "--rounds", "1", text=TEXT)
    written = (tmp_path / "run" / "schema.json").read_text()
    (tmp_path / "run" / "schema.json").write_text("damaged")
    outcome = run("fit", "--resume", tmp_path / "run", "--rounds", "2")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "run" / "schema.json").read_text() == written


def test_label_names_follow_the_kind_of_label(tmp_path):
    frame = patients(40, 0).assign(flu=[0, 1] * 20, cold=[0, 1] * 20)
    frame.to_csv(tmp_path / "t.csv", index=False)
    several = Table(str(tmp_path / "t.csv"), ["flu", "cold"], ["dose"]).checked().schema
    assert (several.label, several.classes) == (["flu", "cold"], None)
    number = Table(str(tmp_path / "t.csv"), "dose", ["town"]).checked().schema
    assert (number.label, number.classes) == (["dose"], None)
    classes = Table(str(tmp_path / "t.csv"), "ward", ["town"]).checked().schema
    assert classes.classes == [7, 9, 30]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"dose": None}, "^dose: 5 of 5 values are missing, first in row 1"),
        ({"dose": "much"}, "^dose: .* (object|str)"),
        ({"dose": [1.0, 2.0, 1e300, np.inf, 3.0]}, "^dose: 2 values are not finite"),
    ],
)
def test_rows_with_missing_or_invalid_values_are_refused(change, error):
    schema = TableSchema.from_json(Path("one_hot/schema.json").read_text())
    with pytest.raises(ConfigError, match=error):
        schema.rows(patients(5, 0).assign(**change))


def test_a_missing_column_is_named():
    schema = TableSchema.from_json(Path("one_hot/schema.json").read_text())
    with pytest.raises(ConfigError, match=r"^town: .* dose, town, seconds, ward"):
        schema.rows(patients(5, 0).drop(columns="town"))


@pytest.mark.parametrize("text", ["", "{}", '{"columns": 3}', '{"columns": [], "more": 1}'])
def test_json_that_is_not_a_schema_is_refused(text):
    with pytest.raises(ConfigError, match=r"^schema: "):
        TableSchema.from_json(text)


def test_an_existing_schema_file_is_not_overwritten(tmp_path):
    (tmp_path / "model.schema.json").write_text("mine")
    before = contents(tmp_path)
    outcome = run("export", "one_hot", "-o", tmp_path / "model.pt")
    assert (outcome.code, contents(tmp_path)) == (2, before)
    assert "model.schema.json already exists" in outcome.err


def write_tables(tmp_path):
    """Write a table of all sites, and that of one site, which has one class, fewer towns and other ages."""
    frame = pd.DataFrame({"age": [20, 30, 40, 50], "town": ["A", "B", "C", "B"], "sick": ["no", "yes", "no", "yes"]})
    whole, part = tmp_path / "whole.csv", tmp_path / "part.csv"
    pd.concat([frame] * 5).to_csv(whole, index=False)
    frame[frame.sick == "yes"].assign(age=[80, 90]).to_csv(part, index=False)
    schema = Table(str(whole), "sick").load().schema
    (tmp_path / "schema.json").write_text(schema.to_json())
    return part, schema


def test_a_table_with_a_schema_is_encoded_like_the_table_that_it_comes_from(tmp_path):
    part, schema = write_tables(tmp_path)
    loaded = Table(str(part), "sick", test_share=0.5, schema=str(tmp_path / "schema.json")).load()
    assert loaded.num_classes == 2
    assert loaded.class_names == ["no", "yes"]
    assert loaded.y_train.tolist() + loaded.y_test.tolist() == [1, 1]
    rows = schema.rows(pd.read_csv(part))
    assert sorted(torch.cat([loaded.x_train, loaded.x_test]).tolist()) == sorted(schema.encode(rows).tolist())
    assert loaded.schema == schema


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"features": ["age"]}, "^scenario.dataset.schema: .* features$"),
        ({"encoding": "codes", "standardize": False}, "^scenario.dataset.schema: .* encoding, standardize$"),
        ({"label": "town"}, "^scenario.dataset.label: town .* sick$"),
        ({"schema": "other.json"}, "^scenario.dataset.schema: other.json: no such file"),
    ],
)
def test_options_that_do_not_fit_a_schema_are_refused(tmp_path, options, error):
    part, _ = write_tables(tmp_path)
    with pytest.raises(ConfigError, match=error):
        Table(**{"path": str(part), "label": "sick", "schema": str(tmp_path / "schema.json")} | options).load()


def test_a_label_that_the_schema_does_not_know_is_refused(tmp_path):
    part, _ = write_tables(tmp_path)
    part.write_text(part.read_text().replace("yes", "maybe", 1))
    with pytest.raises(ConfigError, match=r"^scenario.dataset.label: .* 'maybe' in row 1 of "):
        Table(str(part), "sick", schema=str(tmp_path / "schema.json")).load()


def write_codes(path, codes):
    """Write a table with five rows of each code, the code once more in the column `same`, and a label."""
    path.write_text("code,same,label\n" + "".join(f"{code},{code},{'ab'[i % 2]}\n" for i, code in enumerate(codes * 5)))
    return str(path)


def test_codes_of_digits_stay_text_if_the_schema_has_text(tmp_path):
    whole, part = write_codes(tmp_path / "whole", ["01", "2", "A1"]), write_codes(tmp_path / "part", ["01", "2"])
    schema = Table(whole, "same", features=["code"], categorical=["code"]).load().schema
    (tmp_path / "schema.json").write_text(schema.to_json())
    loaded = Table(part, "same", schema=str(tmp_path / "schema.json")).load()
    assert loaded.class_names == ["01", "2", "A1"]
    assert loaded.x_train.argmax(dim=1).tolist() == loaded.y_train.tolist()
    assert loaded.x_train.sum(dim=0).tolist() == [4, 4, 0]


@pytest.mark.parametrize("letter_in", ["train", "test"])
def test_codes_of_digits_are_text_if_the_other_file_has_text(tmp_path, letter_in):
    codes = {name: ["01", "2"] + ["A1"] * (name == letter_in) for name in ("train", "test")}
    train, test = (write_codes(tmp_path / name, codes[name]) for name in codes)
    loaded = Table(train, "label", features=["code"], categorical=["code"], test_path=test).load()
    assert loaded.schema.columns[0].categories == codes["train"]
    assert loaded.x_test[:, :2].sum(dim=0).tolist() == [5, 5]


@pytest.mark.parametrize("with_schema", [False, True])
def test_a_column_of_unknown_categories_is_warned_of(tmp_path, with_schema):
    train, test = write_codes(tmp_path / "train", ["x", "yy"]), write_codes(tmp_path / "test", ["x", "Y", "ZZ"])
    table = partial(Table, label="label", features=["code"])
    if with_schema:
        (tmp_path / "schema.json").write_text(table(train).load().schema.to_json())
        table = partial(Table, test, "label", schema=str(tmp_path / "schema.json"))
    else:
        table = partial(table, train, test_path=test)
    with pytest.warns(UserWarning, match="^scenario.dataset.features: column 'code': 10 of 15 rows .*: x, yy$") as seen:
        table().load()
    assert len(seen) == 1
    Path(test).write_text(Path(test).read_text().replace("ZZ", "yy"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table().load()
