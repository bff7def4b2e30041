"""The recipes are short, are in the navigation, and their files and commands work."""

import re
import shlex
from pathlib import Path

import pytest
from commands import run, run_page

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
REDUCED = " --rounds 1 --trainer.max_steps 1 --trainer.limit_train_batches 1 --logger null"


def commands(page):
    """Return the command lines in a page's text blocks, without continuation lines, loops and background jobs."""
    blocks = re.findall(r"```text\n(.*?)```", page.read_text(), re.S)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return [re.sub(r"^CUDA_VISIBLE_DEVICES=\d |( &| > .*)$", "", line) for line in lines if "fl-lightning " in line]


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_is_short_and_in_the_navigation(page):
    text = page.read_text()
    assert len(text.split()) <= 200
    assert f"recipes/{page.name}" in (ROOT / "mkdocs.yml").read_text()
    if page.stem != "index":
        title = text.partition("\n")[0].removeprefix("# ")
        assert f"[{title}]({page.name})" in (page.parent / "index.md").read_text()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_the_files_and_commands_of_a_recipe_work(page, tmp_path, monkeypatch):
    """Run bash blocks. The options of `fit` in the other blocks, which need GPUs, data or hours, must exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = page.read_text()
    text = re.sub(r"```yaml\n", "```yml\n", text)  # a part of a config is no file
    run_page(text, lambda block: re.sub(r"(fit .+)", rf"\1{REDUCED}", block))
    for command in commands(page):
        words = shlex.split(command)[1:]
        if words[0] == "fit" and not {"--resume", "--multirun", "--seeds"} & set(words):
            with pytest.raises(SystemExit) as end:  # after it has printed the resolved config
                raise AssertionError(f"{command}\n{run(*words, '--print_config').err}")
            assert end.value.code in (0, None), command
