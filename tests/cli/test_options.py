"""Arguments that are read from the sources agree with the imported classes."""

import inspect
from argparse import SUPPRESS

import pytest
import torch
from commands import arguments_of
from jsonargparse import ArgumentParser
from lightning.pytorch import loggers

import fl_lightning
from fl_lightning.analysis.export import FORMATS
from fl_lightning.cli import catalogue
from fl_lightning.cli.command_line import join_values
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.options import OPTIONS, TRAINER, command_parser, key_of, options_of
from fl_lightning.cli.signatures import NO_DEFAULT, Parameter, parameters
from fl_lightning.core.trainer_options import TRAINER_KEYS
from fl_lightning.loggers import wandb as wandb_logger


def plain(default):
    """Return a default as the help shows it."""
    if isinstance(default, list | tuple):
        return list(default)
    path = default.get("class_path") if isinstance(default, dict) else getattr(default, "class_path", None)
    return path.rpartition(".")[2] if path else default


@pytest.mark.parametrize("kind", catalogue.BASES)
def test_classes_and_options_from_the_sources_equal_the_imported_ones(kind):
    key = catalogue.BASES[kind][2]
    imported = {cls.__name__: cls for cls in catalogue.classes(kind)}
    assert catalogue.kind_of(key) == kind
    assert catalogue.names(key) == list(imported) == list(catalogue.descriptions(kind))
    several = catalogue.SEVERAL.get(kind, ())
    assert all(issubclass(cls, catalogue.base(kind)) or name in several for name, cls in imported.items())
    for name, cls in imported.items():
        found = catalogue.classes_of(kind)[name]
        assert found.module.name == cls.__module__
        only = f" Only in {cls.only_in}." if getattr(cls, "only_in", None) else ""
        assert found.summary == inspect.getdoc(cls).partition("\n")[0] + only
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls, fail_untyped=False)
        arguments, read = arguments_of(parser), {one.name: one for one in parameters(found)}
        assert list(read) == list(arguments)
        for option, argument in arguments.items():
            assert read[option].help == " ".join(argument.help.split())
            top = inspect.signature(cls).parameters[option.partition(".")[0]]
            needed = top.default is inspect.Parameter.empty
            assert (read[option].default is NO_DEFAULT) is (needed and "." not in option)
            if not needed:
                assert read[option].default == plain(argument.default)


def test_options_of_models_exclude_arguments_from_the_data():
    assert not any(
        {"in_shape", "num_classes"} & catalogue.class_options("models", name).keys()
        for name in catalogue.names("model")
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_of_a_command_equal_its_parsers(command):
    arguments, options = arguments_of(command_parser(command)), options_of(command)
    if command == "fit":  # its options for several runs have a parser of their own
        several = arguments_of(command_parser("multirun"))
        arguments |= {name: argument for name, argument in several.items() if name != "words"}
    assert options.keys() == arguments.keys()
    for name, option in options.items():
        flags = [flag for flag in arguments[name].option_strings if not flag.endswith("+")]
        assert option.get("flags", []) == flags
        default = plain(arguments[name].default)
        if not name.startswith("trainer.") and default not in (None, [], "", False, "==SUPPRESS=="):
            assert option["default"] == default


@pytest.mark.parametrize("command", COMMANDS)
def test_placeholders_of_a_commands_own_options_say_what_to_type(command):
    """Such as RUN, FILE or FOLDER: no type, and not just the option's name in capitals."""
    for flags, keywords in OPTIONS[command].items():
        if keywords["help"] == SUPPRESS or keywords.get("action") == "store_true":
            continue
        option = options_of(command)[key_of(flags)]
        assert option["metavar"] not in ("TEXT", "INT", "NUMBER", "VALUE") or key_of(flags) == "target", flags
        if key_of(flags) not in ("run", "table", "name", "seed"):
            assert option["metavar"] != key_of(flags).upper(), flags


def test_help_has_the_trainers_options_and_the_formats_of_export():
    assert TRAINER.keys() == TRAINER_KEYS
    assert all(suffix in OPTIONS["export"]["-o --out"]["help"] for suffix in FORMATS)


@pytest.mark.parametrize(
    ("types", "metavar"),
    [
        (["int"], "INT"),
        (["int", "float"], "NUMBER"),
        (["list"], "LIST"),
        (["str", "dict", "list"], "VALUE"),
        (["float", ("official",)], "VALUE"),
        (["bool"], "true|false"),
        (["bool", ("warn",)], "true|false|warn"),
        (["SGD", ("a", "b")], "NAME"),
        ([], "VALUE"),
    ],
)
def test_each_type_has_a_placeholder(types, metavar):
    assert Parameter("", tuple(types), None, "").metavar == metavar


def test_listed_classes_of_other_packages_exist():
    homes = {"optimizer": torch.optim, "lr_scheduler": torch.optim.lr_scheduler, "logger": loggers}
    for key, home in homes.items():
        places = (home, wandb_logger, fl_lightning)
        assert all(any(hasattr(place, name) for place in places) for name in catalogue.names(key))
    assert catalogue.names("round_lr_scheduler") == catalogue.names("lr_scheduler")
    assert catalogue.names("rounds") == []
    assert catalogue.kind_of("rounds") is catalogue.kind_of("graph") is None


JOINED = {
    "-c a.yaml --config b.yaml -c=c.yaml": "--config=a.yaml --config=b.yaml --config=c.yaml",
    "--rounds 2 --optimizer.lr -1e3 --model=": "--rounds=2 --optimizer.lr=-1e3 --model=",
    "--callbacks+ Timer --callbacks+=Timer": "--callbacks+=Timer --callbacks+=Timer",
    "--fast --trust --print_config --rounds 2": "--fast --trust --print_config --rounds=2",
    "--seeds 0 1 -m a=1,2 --out runs": "--seeds 0 1 -m a=1,2 --out=runs",
    "--rounds --seed 1 stray --config": "--rounds --seed 1 stray --config",
    "-x 1 --unknown 2 --": "-x 1 --unknown=2 --",
}


@pytest.mark.parametrize("line", JOINED)
def test_an_option_and_its_value_become_one_word(line):
    assert join_values("fit", line.split()) == JOINED[line].split()
    assert join_values("fit", JOINED[line].split()) == JOINED[line].split()
