"""Help, lists, completion and errors in names are answered without importing torch."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from itertools import count, takewhile

import pytest
import torch
import yaml
from argcomplete import CompletionFinder
from commands import TINY, arguments_of, run

import fl_lightning
from fl_lightning.cli import catalogue, help
from fl_lightning.cli import main as cli
from fl_lightning.cli.commands import completion
from fl_lightning.cli.options import TRAINER, command_parser
from fl_lightning.core.trainer_options import TRAINER_KEYS
from fl_lightning.engines.trainer import quiet_trainer

SLOW = {"torch", "lightning", "torchmetrics", "torchvision", "wandb"}
SLOW |= {"numpy", "pandas", "scipy", "sklearn", "matplotlib"}
"""Packages that take long to import."""


def python(code):
    """Return what a new Python process prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def actions():
    """The arguments of `fit` by key, without those that show a help text or read the file of a group."""
    found = arguments_of(command_parser("fit")) | arguments_of(command_parser("multirun"))
    return {key: one for key, one in found.items() if key != "words"}


def lines_of(text):
    """Return the placeholder and the description of each key in a help text."""
    joined = re.sub(r"\n {20,}", "  ", text)
    found = re.findall(r"^  (?:-\w(?: [^-]+)?, )?--([\w.]+)(?: (.+?))?(?:  +(.+))?$", joined, re.M)
    assert len({key for key, *_ in found}) == len(found)
    return {key: (value, words) for key, value, words in found}


# --- Without slow imports ---


EXIT_CODES = {
    **dict.fromkeys(["", "--help", "-h", "--version", "-V", "list", "list algorithms", "completion bash"], 0),
    **{f"{command} --help": 0 for command in cli.COMMANDS},
    **dict.fromkeys(["fit --config nowhere.yaml --help", "fit --help rounds", "fit --algorithm.help"], 0),
    **dict.fromkeys(["fit --algorithm.help FedSKC", "fit --optimizer.help"], 0),
    **dict.fromkeys(["fti", "list nothing", "fit --help nothing"], 2),
}


def test_help_lists_and_completion_import_nothing_slow():
    source = f"""
import sys
from fl_lightning.cli.commands import completion
from fl_lightning.cli.main import main
for line, code in {EXIT_CODES}.items():
    assert main(line.split()) == code, line
    assert not sys.modules.keys() & {SLOW}, line
completion.completion_parser(["fit", "--config", "digits_fedskc.yaml"])
print("end", sys.modules.keys() & {SLOW})
"""
    assert python(source).endswith("end set()\n")


def test_the_package_itself_imports_nothing_slow():
    slow = SLOW | {"jsonargparse"}
    assert python(f"import sys, fl_lightning; print(sys.modules.keys() & {slow})") == "set()\n"


@pytest.mark.thorough
def test_fit_does_not_import_packages_that_the_run_does_not_use(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    unused = {"datasets", "mlflow", "optuna", "pandas", "plotly", "pyarrow", "pydantic", "ray", "sklearn", "wandb"}
    source = f"""
import sys
from fl_lightning.cli.main import main
assert main(["fit", "--config", "{tmp_path}/tiny.yaml", "--run_dir", "{tmp_path}/run"]) == 0
print("end", sys.modules.keys() & {unused})
"""
    assert python(source).endswith("end set()\n")


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_version_prints_the_version_of_the_package(word):
    assert run(word) == (0, f"fl-lightning {fl_lightning.__version__}\n", "")


def test_without_a_command_the_help_is_shown():
    assert run() == run("--help")
    assert run().code == 0


# --- fit --help ---


def test_help_of_fit_has_one_line_per_key_with_its_default(actions, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = run("fit", "--help").out
    assert len(text.splitlines()) < 130
    shown = lines_of(text)
    assert shown.keys() == actions.keys()
    for key, (value, words) in shown.items():
        default = actions[key].default
        if key == "logger":
            assert value == default["class_path"].rpartition(".")[2]
        elif default == [] or key == "print_config" or actions[key].nargs == 0:
            assert key != "evaluation.metrics" or value == "LIST"
        elif isinstance(default, bool | int | float | str | list):
            assert yaml.safe_load(value) == default
        elif key not in {f"trainer.{name}" for name, one in TRAINER.items() if "default" in one}:
            assert re.fullmatch(r"[A-Z]+|[a-z]+(\|[a-z]+|\|[A-Z]+)+|([A-Z]+ )?\[[A-Z=,]+ \.\.\.\]", value), key
        assert words
        assert "required" not in words
        assert ("(needed)" in words) is (key in ("scenario.dataset", "scenario.partition", "model", "algorithm"))


def test_help_shows_the_trainers_actual_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    shown = {key: yaml.safe_load(value) for key, (value, _) in lines_of(run("fit", "--help").out).items() if value}
    trainer = quiet_trainer({"accelerator": "cpu"})
    for key in ("max_epochs", "max_steps", "limit_train_batches", "accumulate_grad_batches", "precision"):
        assert shown[f"trainer.{key}"] == getattr(trainer, key)
    assert shown["trainer.devices"] == trainer.num_devices
    assert shown["trainer.deterministic"] is torch.are_deterministic_algorithms_enabled()
    assert shown["trainer.benchmark"] is torch.backends.cudnn.benchmark
    weights = torch.nn.Parameter(torch.zeros(2))
    weights.grad = torch.tensor([3.0, 4.0])
    clip = trainer.precision_plugin.clip_gradients
    default = inspect.signature(clip).parameters["gradient_clip_algorithm"].default
    clip(torch.optim.SGD([weights], lr=1.0), clip_val=1.0)
    assert shown["trainer.gradient_clip_algorithm"] == default.value
    torch.testing.assert_close(weights.grad, torch.tensor([0.6, 0.8]))


def test_every_key_of_an_experiment_has_a_heading(actions):
    assert {help.find_heading(key) for key in actions} == help.HEADINGS.keys()
    assert help.find_heading("nothing") == "more"
    groups = help.group_by_heading({"nothing": {"help": "No key.", "flags": ["--nothing"], "metavar": "INT"}})
    assert groups == {"more": {"nothing": {"help": "No key", "flags": ["--nothing"], "metavar": "INT"}}}


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ({"help": "Which of two; the first by default."}, "Which of two (the first)"),
        ({"help": "Of Cao et al. 2019, rho: thinned out. More."}, "Of Cao et al. 2019, rho"),
        ({"help": "What is `fresh`. And more.", "needed": True}, "What is fresh (needed)"),
        ({"help": "Where it is.", "choices": ["memory", "disk"]}, "Where it is: memory or disk"),
        ({"help": "In `memory` or on `disk`.", "choices": ["memory", "disk"]}, "In memory or on disk"),
        ({"help": "Whether.", "choices": ["true", "false"]}, "Whether"),
        ({"help": "A share, 0.5 say; x by default.", "default": 0.5}, "A share, 0.5 say"),
        ({"help": 'Factors, such as `{"a": 1, "b": 2}`: by name.'}, 'Factors, such as {"a": 1, "b": 2}'),
    ],
)
def test_help_of_fit_shortens_descriptions(option, line):
    assert help.shorten(option)["help"] == line


def test_help_may_contain_percent_signs():
    option = {"flags": ["--x"], "metavar": "INT", "help": "Half of 95 %s."}
    assert help.help_parser({"": {"x": option}}).format_help().endswith("  Half of 95 %s.\n")


@pytest.mark.parametrize("columns", [1, 80, 120])
def test_help_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in cli.COMMANDS:
        code, out, err = run(command, "--help")
        assert (code, err) == (0, "")
        assert max(map(len, out.splitlines())) <= max(columns, 80)


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_help_breaks_no_word_at_a_hyphen(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in cli.COMMANDS:
        _, out, _ = run(command, "--help")
        assert out.isascii() or "\N{NON-BREAKING HYPHEN}" not in out
        assert not [line for line in out.splitlines() if line.endswith("-")]


# --- Help of one key, of names, of a class ---


def test_help_of_a_key_shows_it_in_full_and_the_keys_below():
    code, out, err = run("fit", "--help", "clients_per_round")
    assert (code, err) == (0, "")
    assert list(lines_of(out)) == ["clients_per_round"]
    assert "sampled anew each round. All by default." in " ".join(out.split())
    assert lines_of(run("fit", "--help", "trainer").out).keys() == {f"trainer.{key}" for key in TRAINER_KEYS}
    assert run("fit", "--help", "--rounds").out == run("fit", "--help").out
    assert "--target" in run("compare", "--help", "target").out


def test_help_of_an_unknown_key_suggests_the_nearest():
    code, out, err = run("fit", "--help", "round")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search("--help: .*'round'. Did you mean rounds", err)
    assert "See `fl-lightning list --help`." in run("list", "--help", "zzz").err


@pytest.mark.parametrize(
    "key", ["algorithm", "model", "engine", "scenario.dataset", "scenario.partition", "callbacks", "algorithm.graph"]
)
def test_help_of_a_class_without_a_name_lists_the_names(key):
    code, out, err = run("fit", f"--{key}.help")
    assert (code, err) == (0, "")
    listed = dict(line.strip().split(maxsplit=1) for line in out.splitlines()[1:-1])
    assert listed == catalogue.descriptions(catalogue.kind_of(key))
    assert run("partition", "--rounds", "3", f"--{key}.help", "--seed", "1").out == out


@pytest.mark.parametrize(
    "words",
    [
        ["--algorithm.help", "FedSKC"],
        ["--algorithm.help=FedSKC"],
        ["--algorithm.help", "fedskc"],
        ["--algorithm.help", "fl_lightning.algorithms.FedSKC"],
        ["--rounds", "2", "--algorithm.help", "fl_lightning.algorithms.global_model.fedskc.fedskc.FedSKC"],
    ],
)
def test_help_of_a_class_lists_its_options(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = run("fit", *words)
    assert code == 0
    assert out.startswith(f"FedSKC: {catalogue.descriptions('algorithms')['FedSKC']}\n")
    options = inspect.signature(catalogue.import_module("fl_lightning.algorithms").FedSKC).parameters
    assert [key.removeprefix("algorithm.") for key in lines_of(out)] == list(options)


@pytest.mark.parametrize("words", [["--engine.help", "ray"], ["--engine.help=Ray"], ["--engine.help", "RayEngine"]])
def test_help_of_an_engine_takes_its_short_name(words):
    code, out, _ = run("fit", *words)
    assert (code, out.partition(":")[0]) == (0, "RayEngine")
    assert "--engine.address" in out


def test_help_of_a_class_without_options_says_so():
    assert "It has no options." in run("fit", "--algorithm.graph.help", "Complete").out


@pytest.mark.parametrize("path", ["mine.FedSKC", "fl_lightning.data.FedSKC", "FedSKCC", "fl_lightning.FedSKC"])
def test_help_of_classes_outside_the_package_is_left_to_jsonargparse(path):
    assert help.requested_help("fit", ["--algorithm.help", path]) is None


def test_help_ignores_keys_that_a_command_does_not_have():
    assert help.requested_help("sweep", ["a.yaml", "--algorithm.help"]) is None
    assert help.requested_help("fit", ["--rounds", "3", "--nothing.help"]) is None
    assert help.requested_help("fit", ["--config", "help", "--algorithm", "help"]) is None


# --- Completion ---

BASH = r"""
eval "$(fl-lightning completion bash)"
while IFS= read -r line; do
    COMP_LINE="$line" COMP_POINT=${#line} COMP_TYPE=9
    COMPREPLY=()
    _python_argcomplete fl-lightning
    printf '%s\n' "${COMPREPLY[*]}"
done
"""

COMPLETED = {
    "fl-lightning wa": "watch",
    "fl-lightning --v": "--version",
    "fl-lightning fit --client_s": "--client_sampler --client_store",
    "fl-lightning fit --client_store ": "memory disk",
    "fl-lightning fit --compile ": "true false",
    "fl-lightning fit --algorithm FedSK": "FedSKC",
    "fl-lightning fit --algorithm=FedSK": "FedSKC",
    "fl-lightning fit --optimizer Ada": "Adadelta Adagrad Adam Adamax AdamW",
    "fl-lightning fit --engine s": "sequential stacked",
    "fl-lightning fit --algorithm FedSKC --algorithm.ta": "--algorithm.tau",
    "fl-lightning fit --config digits_fedskc.yaml --algorithm.ta": "--algorithm.tau",
    "fl-lightning fit --algorithm FedSKC --algorithm.preset ": "paper reference",
    "fl-lightning fit --config digits_fedskc.yaml --scenario.partition.al": "--scenario.partition.alpha",
    "fl-lightning fit --config own.yaml --algorithm.m": "--algorithm.mu",
    "fl-lightning fit --config own.yaml --algorithm FedSKC --algorithm.m": "",
    "fl-lightning fit --config nowhere.yaml --algorithm.ta": "",
    "fl-lightning fit --config nowhere.yaml --client_s": "--client_sampler --client_store",
    "fl-lightning fit --config digits_fedsk": "digits_fedskc.yaml",
    "fl-lightning fit -c ow": "own.yaml",
    "fl-lightning fit --seeds 0 1 --multirun scenario.par": "scenario.partition=",
    "fl-lightning fit --seeds 0 --format la": "latex",
    "fl-lightning test ow": "own.yaml",
    "fl-lightning list eng": "engines",
    "fl-lightning completion z": "zsh",
    "fl-lightning reproduce fedskc_table1": "fedskc_table1.yaml",
    "fl-lightning nothing --alg": "",
}


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("bash"), reason="bash not found")
def test_bash_completes_commands_options_names_and_configs(tmp_path):
    (tmp_path / "own.yaml").write_text("algorithm: {class_path: FedProx, init_args: {mu: 1}}")
    (tmp_path / "fl-lightning").write_text(f"#!/bin/sh\nexec '{sys.executable}' -m fl_lightning \"$@\"\n")
    (tmp_path / "fl-lightning").chmod(0o700)
    lines = "\n".join(COMPLETED) + "\n"
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", BASH], input=lines, capture_output=True, text=True, cwd=tmp_path, env=os.environ | path
    )
    assert done.stderr == ""
    answers = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert dict(zip(COMPLETED, answers, strict=True)) == COMPLETED


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_completion_script_is_valid_shell_code(shell):
    code, out, err = run("completion", shell)
    assert (code, err) == (0, "")
    assert "fl-lightning" in out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=out, text=True, check=True)


def test_completion_refuses_other_shells():
    code, _, err = run("completion", "csh")
    assert code == 2
    assert "csh" in err
    assert "bash" in err


def test_completion_without_argcomplete_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    code, _, err = run("completion", "bash")
    assert code == 2
    assert err.startswith("fl-lightning: error: completion: it needs argcomplete (")
    assert err.endswith(". Run: pip install 'fl-lightning[completion]'\n")


def test_every_option_of_fit_can_be_completed(actions):
    finder = CompletionFinder(completion.completion_parser(["fit"]), always_complete_options="long")
    completed = set(takewhile(bool, (finder.rl_complete("fit --", state) for state in count())))
    assert completed >= {f"fit --{key}" for key in actions}


# --- Garbage ---


def test_only_the_console_script_freezes_imports_for_the_garbage_collector():
    source = """
import gc, sys
from fl_lightning.cli import main as cli
from fl_lightning.cli.commands import list as command
command.main = lambda *_: print(gc.get_freeze_count() > 1000) or 0
cli.main(["list"])
sys.argv = ["fl-lightning", "list"]
cli.run()
"""
    assert python(source).split() == ["False", "True"]
