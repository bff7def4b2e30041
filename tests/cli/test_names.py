"""Misspelled names: they are corrected if that is unambiguous, otherwise the error suggests the right name."""

import re
import shlex
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from commands import TINY, contents, run

from fl_lightning import FederatedOrchestrator
from fl_lightning.cli import main as cli
from fl_lightning.cli.catalogue import CLASS_KEYS, KINDS, descriptions, kind_of, names
from fl_lightning.cli.class_names import as_backbone, builders_of_torchvision, correct_case
from fl_lightning.cli.command_line import join_values
from fl_lightning.cli.commands import fit
from fl_lightning.cli.options import command_parser
from fl_lightning.cli.other_frameworks import CLASSES, COMMANDS, OPTIONS
from fl_lightning.core.config_files import derived_configs, nearest_file, read_configs, shipped
from fl_lightning.core.spelling import fold, match_case, nearest

FIT = "fit --config digits_fedskc.yaml --logger null"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with a config and a run's folder, and a `fit` that runs no round."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FederatedOrchestrator, "fit", lambda *args: SimpleNamespace(summary={}))
    monkeypatch.setattr(fit, "print_results", lambda *args: print("fitted"))
    Path("tiny.yaml").write_text(TINY)
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/config.yaml").write_text(TINY)
    Path("digits_fedavg").mkdir()
    return tmp_path


@pytest.fixture
def configs(monkeypatch):
    """A list that receives the resolved config of each `fit`."""
    seen = []
    plain = fit.plain_config
    monkeypatch.setattr(fit, "plain_config", lambda *args: seen.append(plain(*args)) or seen[-1])
    return seen


@pytest.fixture(scope="module")
def parser():
    return command_parser("fit")


def refusal(line):
    """Return the error of a command line, without the program's name."""
    before = contents(Path())
    code, out, err = run(*shlex.split(line))
    assert (code, out) == (2, "")
    assert re.fullmatch("fl-lightning: error: [^\n]{1,360}\n", err), err
    assert contents(Path()) == before
    return err.removeprefix("fl-lightning: error: ").rstrip("\n")


# --- Refusals, and their fixes ---

TYPED = {
    # commands
    "fti --config tiny.yaml": "Did you mean fit?",
    "train --config tiny.yaml": "Did you mean fit?",
    "Fit --config tiny.yaml": "Did you mean fit?",
    "run": "Did you mean fit?",
    "validate runs/old": "Did you mean test?",
    "eval runs/old": "Did you mean test?",
    "predict runs/old": "Did you mean test?",
    "resume runs/old": "Did you mean fit --resume?",
    "figure runs/old": "Did you mean plot?",
    "--config tiny.yaml --rounds 3": "Did you mean: fl-lightning fit --config tiny.yaml --rounds 3?",
    # files
    "fit --config digits_fedsck.yaml": "Did you mean digits_fedskc.yaml?",
    "fit --config digits_fedsck": "Did you mean digits_fedskc.yaml?",
    "fit --config tinny.yaml": "Did you mean tiny.yaml?",
    "fit --config ./tinny": "Did you mean ./tiny.yaml?",
    "partition --config digits_fedsck.yaml": "Did you mean digits_fedskc.yaml?",
    "sweep digits_fedskc_tua": "Did you mean digits_fedskc_tau.yaml?",
    "reproduce fedskc_tabel1": "Did you mean fedskc_table1.yaml?",
    "fit digits_fedskc.yaml": "Did you mean --config digits_fedskc.yaml?",
    "fit digits_fedsck": "Did you mean --config digits_fedskc.yaml?",
    "fit runs/old": "Did you mean --resume runs/old?",
    "fit --config runs/old": "runs/old is the folder of a run. Did you mean --resume runs/old?",
    f"{FIT} FedAvg": "Did you mean --algorithm FedAvg?",
    f"{FIT} seed=3": "Did you mean --seed=3?",
    # classes
    f"{FIT} --algorithm FedAvgN": "algorithm: class 'FedAvgN' not found. Did you mean FedAvg?",
    f"{FIT} --model MPL": "Did you mean MLP?",
    f"{FIT} --scenario.dataset CIFAR1O": "Did you mean CIFAR10?",
    f"{FIT} --scenario.partition Dirchlet": "Did you mean Dirichlet?",
    f"{FIT} --scenario.partition noniid": "Did you mean Dirichlet?",
    f"{FIT} --algorithm.aggregator WeightedMaen": "Did you mean WeightedMean?",
    f"{FIT} --algorithm.loss_terms+=Proxmal": "Did you mean Proximal?",
    f"{FIT} --algorithm DFedAvgM --algorithm.graph Rign": "Did you mean Ring?",
    f"{FIT} --callbacks+=EarlyStoping": "Did you mean EarlyStopping?",
    f"{FIT} --optimizer Adm": "Did you mean Adam?",
    f"{FIT} --lr_scheduler StpLR": "Did you mean StepLR?",
    f"{FIT} --round_lr_scheduler exponential": "Did you mean ExponentialLR?",
    f"{FIT} --logger wandb": "Did you mean WandbRoundLogger?",
    f"{FIT} --logger CSVLoger": "Did you mean CSVLogger?",
    f"{FIT} --algorithm xyzzy": "See `fl-lightning list algorithms`.",
    f"{FIT} --callbacks EarlyStopping": "Did you mean --callbacks+=EarlyStopping?",
    f"{FIT} --callbacks early_stoping": "Did you mean --callbacks+=EarlyStopping?",
    f"{FIT} --algorithm.loss_terms Proximal": "Did you mean --algorithm.loss_terms+=Proximal?",
    f"{FIT} --evaluation.target_accuracies 0.5": "Did you mean [0.5]?",
    # options
    f"{FIT} --lr 0.1": "Did you mean --optimizer.lr?",
    f"{FIT} --lr=0.1": "Did you mean --optimizer.lr?",
    f"{FIT} -lr 0.1": "Did you mean --optimizer.lr?",
    "fit --lr 0.1": "Did you mean --optimizer.lr?",
    f"{FIT} --learning-rate 0.1": "Did you mean --optimizer.lr?",
    f"{FIT} --optimizer.learning_rate 0.1": "Did you mean --optimizer.lr?",
    f"{FIT} --algorithm.lr 0.1": "FedSKC has no key 'lr'. Did you mean --optimizer.lr?",
    f"{FIT} --seed_everything 1": "Did you mean --seed?",
    f"{FIT} --scenario.dataset CIFAR10 --data_dir d": "Did you mean --scenario.dataset.data_dir?",
    f"{FIT} --epochs 1": "Did you mean --trainer.max_epochs?",
    f"{FIT} --local-epochs 1": "Did you mean --trainer.max_epochs?",
    f"{FIT} --num_clients 3": "Did you mean --scenario.clients?",
    f"{FIT} --global_rounds 3": "Did you mean --rounds?",
    f"{FIT} -gr 3": "Did you mean --rounds?",
    f"{FIT} -C 0.1": "Did you mean --clients_per_round (a number of clients, no share)?",
    f"{FIT} --fraction-fit 0.1": "Did you mean --clients_per_round (a number of clients, no share)?",
    f"{FIT} --dataset MNIST": "Did you mean --scenario.dataset?",
    f"{FIT} --partition IID": "Did you mean --scenario.partition?",
    f"{FIT} --alpha 0.1": "Did you mean --scenario.partition.alpha?",
    f"{FIT} --scenario.alpha 0.1": "Did you mean --scenario.partition.alpha?",
    f"{FIT} --scenario.partition IID --alpha 1": "--scenario.partition=Dirichlet --scenario.partition.alpha?",
    f"{FIT} --momentum 0.9": "Did you mean --optimizer.momentum?",
    f"{FIT} --optimizer Adam --momentum 0.9": "Did you mean --optimizer=SGD --optimizer.momentum?",
    f"{FIT} --gpus 1": "Did you mean --trainer.accelerator=gpu?",
    f"{FIT} --batch-size 8": "Did you mean --batch_size?",
    f"{FIT} --batch_sise 8": "Did you mean --batch_size?",
    f"{FIT} --precision bf16-mixed": "Did you mean --trainer.precision?",
    f"{FIT} --project p": "Did you mean --logger=WandbRoundLogger --logger.project?",
    "fit --config digits_fedskc.yaml --project p": "Did you mean --logger.project?",
    f"{FIT} --wandb": "Did you mean --logger=WandbRoundLogger?",
    f"{FIT} --tau 1": "Did you mean --algorithm.tau?",
    f"{FIT} --tua 1": "Did you mean --algorithm.tau?",
    f"{FIT} --algorithm FedProx --mu 1": "Did you mean --algorithm.mu?",
    f"{FIT} --hidden [8]": "Did you mean --model.hidden or --model.head.hidden?",
    f"{FIT} --lr 1 --tau 1": "has no key 'lr'. Did you mean --optimizer.lr?",
    f"{FIT} --tau 1 --lr 1e-1": "has no key 'tau'. Did you mean --algorithm.tau?",
    f"{FIT} --xyzzy 1": "See `fl-lightning fit --help`.",
    "partition --config tiny.yaml --alpha 1": "Did you mean --scenario.partition.alpha?",
    "test runs/old --checkpont last": "Did you mean --checkpoint?",
}


SLOW_COMMANDS = ("sweep", "reproduce", "benchmark")


def test_wrong_names_are_refused_without_importing_torch(here):
    lines = [line for line in TYPED if "target_accuracies" not in line and line.split()[0] not in SLOW_COMMANDS]
    Path("all.py").write_text(
        f"import shlex, sys\nfrom fl_lightning.cli.main import main\nfor line in {lines!r}:\n"
        "    code = main(shlex.split(line))\n"
        "    assert code == 2, line\n"
        "    assert not {'torch', 'lightning'} & {*sys.modules}, line\n"
    )
    ended = subprocess.run([sys.executable, "all.py"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("\n") == len(lines)
    for line, message in zip(lines, ended.stderr.splitlines(), strict=True):
        assert TYPED[line] in message


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("line", dict.fromkeys(["fit --lr 0.1", f"{FIT} --hidden [8]", *TYPED]))
def test_a_command_line_works_with_the_suggested_fix(line, here):
    answer = refusal(line)
    assert TYPED[line] in answer
    if line.split()[0] in SLOW_COMMANDS or "Did you mean" not in answer:
        return
    fixed_line = apply_fix(line, answer)
    code, _, err = run(*shlex.split(fixed_line))
    if "has no key" in err:  # there were several
        fixed_line = apply_fix(fixed_line, err)
        code, _, err = run(*shlex.split(fixed_line))
    assert not re.search("Did you mean|has no key|class '|command '|belongs to|neither|expected list", err), err
    if line.startswith(FIT) and not re.search("must be given|expected int", err):
        assert (code, err) == (0, ""), fixed_line


def apply_fix(line, answer):
    fix = re.search(r"Did you mean(?:: fl-lightning)? (.+?)( \(.*| or .*)?\?$", answer)[1]
    if command := re.match("command '(.+?)' not found", answer):
        return fix if command[1] == "--config" else line.replace(command[1], fix, 1)
    if key := re.search("has no key '(.+?)'", answer):
        given = r"([ =][\d.]+)?" if re.search(r"=\w+$", fix) else ""
        return re.sub(rf"(?<!\S)-{{1,2}}([a-z]+\.)?{re.escape(key[1])}(?![\w-]){given}", fix, line)
    if "+=" in fix:
        return re.sub(rf"--{re.escape(fix.partition('+=')[0][2:])} \S+", fix, line)
    if "is the folder of a run" in answer:
        return line.replace("--config runs/old", fix)
    if wrong := re.search(r"class '(.+?)' not found|got '(.+?)'|(\S+) belongs to|--config: (\S+) is neither", answer):
        return re.sub(rf"(?<![^\s=]){re.escape(next(filter(None, wrong.groups())))}(?!\S)", fix, line)
    raise AssertionError(answer)


CHOSEN = "--config digits_fedskc.yaml --scenario.dataset MNIST"
VALUES = {
    "clients_per_round": "2",
    "engine": "stacked",
    "round_lr_scheduler.gamma": "0.9",
    "scenario.partition.alpha": "1",
    "optimizer.momentum": "0.9",
    "scenario.dataset": "Digits",
    "scenario.partition": "IID",
    "algorithm": "FedAvg",
    "model": "CNN",
    "optimizer": "Adam",
    "trainer.accelerator": "cpu",
    "logger": "null",
    "callbacks": "[]",
    "lr_scheduler": "null",
    "optimizer.lr": "0.1",
    "optimizer.weight_decay": "0.1",
    "trainer.gradient_clip_val": "1.0",
}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("fix", sorted({*OPTIONS.values()}))
def test_the_parser_accepts_each_suggested_option(fix, here, parser):
    words = [f"--{option}" for option in fix.partition(" (")[0].split()]
    if "=" not in words[-1]:
        words += [VALUES.get(words[-1].removeprefix("--"), "1")]
    parser.parse_args([*read_configs(join_values("fit", CHOSEN.split())).words, *words])


def test_names_of_other_tools_are_not_ours(parser):
    keys = {key for key, _ in parser.get_defaults().items()}
    assert not keys & {*OPTIONS}
    assert not {*COMMANDS} & {*cli.COMMANDS}
    assert {target.split()[0] for target in COMMANDS.values()} <= {*cli.COMMANDS}
    assert {target.split()[1] for target in COMMANDS.values() if target.startswith("list ")} <= {*KINDS}


def test_suggested_classes_exist():
    known = {name for key in sorted(CLASS_KEYS) for name in names(key)}
    assert {*CLASSES.values()} <= known
    assert {fold(name) for name in CLASSES} == {*CLASSES}
    assert not {*CLASSES} & {fold(name) for name in known} - {"wandblogger"}


# --- Help on a class that does not exist ---


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--algorithm.help FedProxx", "algorithm: class 'FedProxx' not found. Did you mean FedProx?"),
        ("--algorithm.help=FedProxx", "algorithm: class 'FedProxx' not found. Did you mean FedProx?"),
        (
            "--algorithm.aggregator.help Dual",
            "algorithm.aggregator: class 'Dual' not found. See `fl-lightning list aggregators`. "
            "Other classes need an import path (package.module.Class).",
        ),
        ("--algorithm.loss_terms.help Prox", "algorithm.loss_terms: class 'Prox' not found. Did you mean Proximal?"),
        ("--optimizer.help SDG", "optimizer: class 'SDG' not found. Did you mean SGD?"),
    ],
)
def test_help_on_an_unknown_class_is_answered_as_the_class_itself(option, message, here):
    assert refusal(f"fit {option}") == message
    assert refusal(f"fit {option.replace('.help', '').replace('loss_terms', 'loss_terms+')}") == message


# --- A key of a config file ---


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("lr: 0.1", "the config has no key 'lr'. Did you mean optimizer.lr?"),
        ("tau: 0.1", "the config has no key 'tau'. Did you mean algorithm.tau?"),
        ("batch-size: 3", "the config has no key 'batch-size'. Did you mean batch_size?"),
        ("gpus: 1", "the config has no key 'gpus'. Did you mean trainer.accelerator: gpu?"),
        ("callbacks: EarlyStopping", "callbacks: got 'EarlyStopping', expected list. Did you mean [EarlyStopping]?"),
    ],
)
def test_in_a_config_the_fix_is_a_key(more, message, here):
    Path("bad.yaml").write_text(f"{TINY}{more}\n")
    assert refusal("fit --config bad.yaml") == message


@pytest.mark.parametrize("chosen", ["GlobalPeriodReview", "fl_lightning.algorithms.GlobalPeriodReview"])
def test_the_key_that_one_is_already_in_is_not_suggested(chosen, here):
    aggregator = f"{{class_path: {chosen}, init_args: {{aggregator: DualAggregation}}}}"
    Path("bad.yaml").write_text(
        TINY.replace("FedSKC\n", f"{{class_path: FedAvg, init_args: {{aggregator: {aggregator}}}}}\n")
    )
    message = (
        "algorithm.aggregator: GlobalPeriodReview has no key 'aggregator'. "
        "Available: inner, beta, review, similar_clients, reference, knowledge."
    )
    assert refusal("fit --config bad.yaml") == message
    typed = f"--algorithm FedAvg --algorithm.aggregator {chosen} --algorithm.aggregator.aggregator DualAggregation"
    assert refusal(f"fit --config tiny.yaml {typed}") == message


def test_arguments_of_the_users_own_class_are_checked(here):
    Path("named.py").write_text(
        "from fl_lightning.algorithms import FedAvg, FedProx\n"
        "class Mine(FedAvg):\n    def __init__(self, nu: float = 1):\n        super().__init__()\n"
        "class Extended(FedProx):\n    def __init__(self, nu: float = 1, **more):\n        super().__init__(**more)\n"
    )
    fit_mine = ["fit", "--config", "tiny.yaml", "--algorithm", "named.Mine"]
    assert "algorithm: Mine has no key 'mu'. Available: nu.\n" in run(*fit_mine, "--algorithm.mu", "1").err
    assert "the config has no key 'nu'. Did you mean --algorithm.nu?\n" in run(*fit_mine, "--nu", "1").err
    for elsewhere in ("alpha", "lr"):  # a partition's and an optimizer's
        answer = f"algorithm: Mine has no key '{elsewhere}'. Available: nu.\n"
        assert run(*fit_mine, f"--algorithm.{elsewhere}", "1").err == f"fl-lightning: error: {answer}"
    extended = run("fit", "--config", "tiny.yaml", "--algorithm", "named.Extended", "--algorithm.alpha", "1")
    assert "algorithm: Extended has no key 'alpha'. Available: nu, mu, " in extended.err
    assert run(*fit_mine, "--algorithm.nu", "2").code == 0


def test_case_is_not_corrected_in_a_config(here):
    """Recorded configs are compared letter by letter."""
    Path("bad.yaml").write_text(TINY.replace("FedSKC\n", "fedskc\n"))
    assert refusal("fit --config bad.yaml") == "algorithm: class 'fedskc' not found. Did you mean FedSKC?"


# --- Corrections ---


@pytest.mark.parametrize("key", sorted(CLASS_KEYS))
def test_a_class_may_be_written_in_any_case(key):
    known = names(key)
    if kind := kind_of(key):
        assert known == [*descriptions(kind)]
    assert len({fold(name) for name in known}) == len(known) > 1
    for name in known:
        for typed in (name, name.lower(), name.upper(), f"{name[:3]}_{name[3:]}".lower(), f"{name[:2]}-{name[2:]}"):
            ambiguous = key == "model" and typed != name and typed in builders_of_torchvision()
            expected = typed if ambiguous else name
            assert correct_case([f"--{key}={typed}", f"--seed={typed}"]) == [f"--{key}={expected}", f"--seed={typed}"]
            assert correct_case([f"--{key}+={typed}"]) == [f"--{key}+={expected}"]


def test_the_resolved_config_has_the_corrected_names(here, configs):
    words = "--algorithm fed_skc --model mlp --scenario.partition iid --optimizer adam --engine Sequential"
    assert run(*f"{FIT} {words} --callbacks+=earlystopping".split())[::2] == (0, "")
    config = configs[0]
    assert config["algorithm"]["class_path"] == "fl_lightning.FedSKC"
    assert config["model"]["class_path"] == "fl_lightning.models.MLP"
    assert config["scenario"]["partition"]["class_path"] == "fl_lightning.data.IID"
    assert config["optimizer"]["class_path"] == "torch.optim.Adam"
    assert config["callbacks"][0]["class_path"] == "fl_lightning.callbacks.EarlyStopping"
    assert config["engine"] == "sequential"


def test_a_baseline_is_found_in_any_case(here, configs):
    Path("baselines.yaml").write_text(f"{TINY}baselines: {{MOON: {{algorithm.mu: 7}}}}\n")
    assert run("fit", "--config", "baselines.yaml", "--algorithm", "moon")[::2] == (0, "")
    assert configs[0]["algorithm"]["init_args"]["mu"] == 7


def test_ambiguous_names_are_not_corrected():
    assert match_case("resnet_18", ["ResNet18", "Resnet18"]) == "resnet_18"
    assert match_case("Ab", ["Ab", "AB"]) == "Ab"
    assert correct_case(["--model=resnet18"]) == ["--model=resnet18"]
    assert correct_case(["--model=RESNET18"]) == ["--model=ResNet18"]


def test_values_that_are_not_class_names_are_not_corrected():
    words = ["--run_dir=mlp", "--algorithm.preset=fedavg", "fedskc", "--callbacks=[earlystopping]", "--resume"]
    assert correct_case(words) == words


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("option", ["-c digits_fedavg", "--config=tiny", "-c ./tiny", "--config digits_fedskc"])
def test_the_ending_of_a_config_may_be_left_out(option, here):
    """A folder with the config's name makes no difference."""
    for command in ("fit --logger null", "partition"):
        code, out, err = run(*command.split(), *option.split())
        assert (code, err) == (0, "")
        if command.startswith("fit"):
            name = Path(re.split("[ =]", option)[1]).name
            assert f"run: runs/{name}/" in out


def test_a_file_in_the_working_folder_comes_before_a_shipped_one(here, configs):
    shutil.copy("tiny.yaml", "digits_fedavg.yaml")
    assert run("fit", "--config", "digits_fedavg", "--seed", "4")[::2] == (0, "")
    assert configs[0]["rounds"] == yaml.safe_load(TINY)["rounds"]


def test_the_ending_of_a_sweep_or_table_may_be_left_out(here):
    from fl_lightning.analysis.study.paper_table import read_table
    from fl_lightning.analysis.study.sweep_file import sweep_path

    assert sweep_path("digits_fedskc_tau") == sweep_path("digits_fedskc_tau.yaml")
    assert read_table("fedskc_table1") == read_table("fedskc_table1.yaml")


@pytest.mark.parametrize("kind", ["configs", "sweeps", "papers"])
def test_a_misspelled_shipped_file_is_found(kind, here):
    folder = Path(str(files(f"fl_lightning.{kind}")))
    derived = derived_configs() if kind == "configs" else {}
    assert shipped(kind) == sorted([*derived, *(path.name for path in folder.glob("*.yaml"))])
    for name in shipped(kind):
        stem = name.removesuffix(".yaml")
        middle = len(stem) // 2
        assert nearest_file(f"{stem[:middle]}{stem[middle + 1 :]}", kind) in shipped(kind)
        assert nearest_file(stem.upper(), kind) == name
        assert nearest_file(stem.replace("_", "-"), kind) == name


def test_a_misspelled_file_is_looked_for_in_its_own_folder(here):
    (here / "zzqx_fedavg.yaml").touch()
    assert nearest_file("zzqx_fedvag.yaml", "configs") == "zzqx_fedavg.yaml"
    assert nearest_file("./zzqx_fedvag.yaml", "configs") == "./zzqx_fedavg.yaml"
    assert "zzqx" not in (nearest_file("/zzqx_fedvag.yaml", "configs") or "")


@pytest.mark.parametrize("name", ["", "/", "no/such/folder/x.yaml", "x" * 5000, "a\0b"])
def test_invalid_file_names_are_refused_in_one_line(name, here):
    code, _, err = run("fit", "--config", name)
    assert code == 2
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["fit", "digits_fedsck.yaml"], "Did you mean --config digits_fedskc.yaml?"),
        (
            ["partition", "--config", "digits_fedavg.yaml", "--export", "true"],
            "true belongs to no option. Leave it out.",
        ),
    ],
)
def test_a_suggestion_is_a_word_that_exists(words, fix, here):
    code, _, err = run(*words)
    assert code == 2
    assert fix in err


@pytest.mark.parametrize("text", ["rounds: [", "- 1", "a: 1\na: 2"])
def test_a_damaged_config_of_a_run_is_named_without_an_option_that_was_not_given(text, here):
    """Commands such as `test RUN` have no option `--config`."""
    (here / "run").mkdir()
    (here / "run" / "config.yaml").write_text(text)
    for words in (["test", "run"], ["export", "run", "-o", "a.pt"], ["fit", "--resume", "run"]):
        code, _, err = run(*words)
        assert code == 2
        assert err.startswith("fl-lightning: error: run/config.yaml")


def test_nothing_is_suggested_for_a_name_unlike_any_other():
    assert nearest("xyzzy", ["FedAvg", "FedSKC"]) is None
    assert nearest("x", []) is None


# --- Models of torchvision ---


def test_a_model_of_torchvision_works_with_the_suggested_options(here, configs):
    for given in ("torchvision.models.resnet18", "resnet18"):
        line = refusal(f"{FIT} --model {given}")
        assert ("ResNet18, or torchvision's, " in line) == (given == "resnet18")
        words = re.search(r"(--model FromModule .+?)( \(as many as there are classes\))\?$", line)[1]
        assert words == (
            "--model FromModule --model.module torchvision.models.resnet18 --model.head fc "
            "--model.module_args.num_classes 10"
        )
        assert run(*shlex.split(f"{FIT} {words}"))[::2] == (0, "")
        assert configs.pop()["model"]["init_args"]["module_args"] == {"num_classes": 10}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("builder", ["mobilenet_v3_small", "densenet121", "shufflenet_v2_x0_5"])
def test_the_suggested_head_is_the_last_layer(builder):
    from torchvision import models

    from fl_lightning.models import FromModule

    head = re.search(r"--model\.head (\S+)", as_backbone(builder))[1]
    options = {"num_classes": 7}
    backbone = FromModule((3, 224, 224), 7, f"torchvision.models.{builder}", head, options)
    assert backbone.head.out_features == 7
    whole = models.get_model(builder, num_classes=7)
    assert [*whole.state_dict()][-1].rpartition(".")[0] == head


@pytest.mark.parametrize("builder", ["regnet_y_400mf", "squeezenet1_0"])
def test_the_user_is_asked_for_a_head_that_cannot_be_found(builder):
    assert "--model.head NAME_OF_ITS_LAST_LAYER" in as_backbone(builder)


# --- Null for an option within an argument of a class ---


def test_null_is_accepted_within_an_argument(here, configs):
    words = f"{FIT} --model.head.prediction null --model.head.projection=8 --algorithm.beta null"
    assert run(*words.split())[::2] == (0, "")
    head = configs[0]["model"]["init_args"]["head"]
    assert (head["prediction"], head["projection"]) == (None, 8)
    assert configs[0]["algorithm"]["init_args"]["beta"] is None


def test_null_replaces_the_value_of_a_config(here, configs):
    Path("head.yaml").write_text(TINY.replace("hidden: [8]", "hidden: [8], head: {prediction: 4, projection: 6}"))
    assert run("fit", "--config", "head.yaml", "--model.head.prediction=null")[::2] == (0, "")
    head = configs[0]["model"]["init_args"]["head"]
    assert (head["prediction"], head["projection"]) == (None, 6)


def test_only_nulls_that_jsonargparse_loses_are_rewritten():
    words = ["--scenario.few_shot.ways=null", "--evaluation.max_clients=null", "--algorithm.beta=null"]
    assert correct_case(words) == words
    assert correct_case(["--scenario.dataset.few_shot.ways=null"]) == ["--scenario.dataset.few_shot={ways: null}"]
    assert correct_case(["--model.head.prediction=null", "x"]) == ["--model.head={prediction: null}", "x"]
