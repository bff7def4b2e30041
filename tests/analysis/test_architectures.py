"""Clients with different networks in the commands: `compare --architectures`, `export`, names, and the page."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from commands import rows, run

from fl_lightning import ClientModule, ResizedFeatures, open_run
from fl_lightning.cli.commands.compare import architecture_columns
from fl_lightning.core.errors import ConfigError
from fl_lightning.evaluation.summary import architectures_of, better_goal, label_of, model_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "clients-that-differ.md").read_text()
QUICK = ["--rounds", "2", "--trainer.max_steps", "2", "--scenario.clients", "3", "--logger", "null"]
MIXED = (
    "[MLP, {class_path: MLP, init_args: {hidden: [12], norm: batch}}, {class_path: CNN, init_args: {feature_dim: 9}}]"
)
FIT = ["fit", "--config", "digits_fedproto_mixed.yaml", "--model.models", MIXED, *QUICK]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of two methods and two seeds with three networks."""
    place = tmp_path_factory.mktemp("runs")
    for method in ("FedProto", "Local"):
        for seed in ("0", "1"):
            words = ["--algorithm", method, "--seed", seed, "--run_dir", place / f"{method}-{seed}"]
            assert run(*FIT, *words).code == 0
    return place


def last(folder, name, column):
    return float(rows(folder / name)[-1][column])


def test_architectures_are_the_columns_of_a_comparison(folder):
    header, *lines = run("compare", folder, "--architectures", "--format", "csv").out.splitlines()
    assert header == "algorithm,CNN,MLP_0,MLP_1"
    for line in lines:
        method, *cells = line.split(",")
        for name, cell in zip(("CNN", "MLP_0", "MLP_1"), cells, strict=True):
            values = [last(folder, f"{method}-{seed}", f"architecture/{name}/acc_mean") for seed in (0, 1)]
            assert float(cell.split(" ± ")[0]) == pytest.approx(sum(values) / 2, abs=6e-5)
    assert len(lines) == 2
    percent = run("compare", folder, "--architectures", "--percent").out
    assert "architecture/*/acc_mean in percent" in percent
    one = run("compare", folder, "--architectures", "--metric", "client/acc_mean", "--where", "algorithm=Local").out
    assert one.splitlines()[0].split() == ["group", "CNN", "MLP_0", "MLP_1"]


def test_without_different_networks_architectures_are_refused(folder):
    code, _, err = run("compare", folder, "--architectures", "--across", "seed")
    assert code == 2
    assert "--architectures: " in err
    with pytest.raises(ConfigError, match=r"^--architectures: "):
        architecture_columns([], None)


def test_the_columns_of_architectures_are_metrics_of_models():
    columns = {"client/acc_mean": 0.5, "architecture/CNN/acc_mean": 0.4, "architecture/A_1/auroc_mean": 0.3}
    assert model_metrics([columns]) == ["acc", "auroc"]
    assert architectures_of([{}, columns]) == ["A_1", "CNN"]
    assert better_goal("architecture/CNN/acc_mean_last") == "maximize"
    assert better_goal("architecture/CNN/mae_mean") == "minimize"
    assert label_of("architecture/CNN/acc_mean") == "client acc, CNN"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("client", [2, 0, 1])
def test_the_network_of_a_client_is_exported_and_built_again(folder, client, tmp_path):
    file = tmp_path / "client.ckpt"
    assert run("export", folder / "FedProto-0", "--client", str(client), "--out", file).code == 0
    module, original = ClientModule.load_from_checkpoint(file), open_run(folder / "FedProto-0").client_module(client)
    assert type(module.backbone) is ResizedFeatures
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(module.eval()(x), original.eval()(x))


def test_a_network_of_its_own_size_is_exported_without_resizing(tmp_path):
    words = ["--algorithm", "FedDistill", "--model.feature_dim", "null", "--run_dir", tmp_path / "run"]
    assert run(*FIT, *words).code == 0
    assert run("export", tmp_path / "run", "--client", "2", "--out", tmp_path / "cnn.ckpt").code == 0
    assert type(ClientModule.load_from_checkpoint(tmp_path / "cnn.ckpt").backbone).__name__ == "CNN"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("assign foo", "model.assign: got 'foo', expected round_robin | random | list"),
        ("assign [3]", "model.assign: 3 is no network"),
        ("feature_dim 0", "model.feature_dim: 0 is below 1"),
        ("models [MLP, CNNN]", "model.models: class 'CNNN' not found. Did you mean CNN?"),
        ("models [MLP, {class_path: CNN, init_args: {feature: 3}}]", "model.models: CNN has no key 'feature'"),
        ("models [MLP, torchvision.models.resnet18]", "model: torchvision.models.resnet.resnet18 is a function"),
        ("models MLP", "model.models: got 'MLP', expected list"),
        ("models []", "model.models: the list is empty"),
        ("models [MLP, LeNet]", "model.models.1: "),
    ],
)
def test_wrong_options_are_answered_in_one_line(tmp_path, monkeypatch, option, message):
    monkeypatch.chdir(tmp_path)
    name, value = option.split(" ", 1)
    code, _, err = run("fit", "--config", "digits_fedproto_mixed.yaml", f"--model.{name}", value, *QUICK)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_help_and_the_list_show_mixed():
    assert "Mixed" in run("list", "models").out
    assert "--model.feature_dim" in run("fit", "--model.help", "Mixed").out


@pytest.mark.thorough
def test_the_snippets_of_the_page_run_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind, block in re.findall(r"```(bash|python|yaml)\n(.*?)```", PAGE, re.S):
        if kind == "python":
            exec(block, {})
        elif kind == "yaml":
            Path("own.yaml").write_text(block)
            assert run("fit", "--config", "digits_fedavg.yaml", "--config", "own.yaml", *QUICK).code == 0
        else:
            for command in block.splitlines():
                words = shlex.split(command)[1:]
                code, _, err = run(*words, *(QUICK if words[0] == "fit" else []))
                assert code == 0, f"{command}\n{err}"
    (message,) = re.findall(r"^(fl-lightning: error: .*) Methods that work", PAGE, re.M)
    assert run("fit", "--config", "digits_fedproto_mixed.yaml", "--algorithm", "FedAvg").err.startswith(message)
