"""Man pages and docs name the options that exist, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import cachexfs
from cachexfs.cli.main import COMMANDS, MODEL_COMMANDS, cli
from cachexfs.cli.mount_help import MEANINGS
from cachexfs.cli.options import OPTIONS

DOCS = Path(cachexfs.__file__).parents[1] / "docs"
NAMES = [*COMMANDS, *MODEL_COMMANDS]
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def options_of(name: str) -> set[str]:
    """Long options of a command, hidden ones left out."""
    command = cli.get_command(click.Context(cli), name)  # type: ignore[attr-defined]
    assert command is not None
    found = set()
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            found |= {o for o in (*parameter.opts, *parameter.secondary_opts) if o.startswith("--")}
    return found


def manual_of(name: str) -> str:
    text = (DOCS / "man" / f"cachexfs-{name}.1").read_text()
    if text.startswith(".so "):
        text = (DOCS / "man" / Path(text.split()[1]).name).read_text()
    return text.replace("\\-", "-")


@pytest.mark.parametrize("name", NAMES)
def test_the_manual_has_every_option_and_no_other(name: str) -> None:
    text = manual_of(name)
    options = options_of(name)
    everywhere = {option for other in NAMES for option in options_of(other)} | {"--help"}
    assert options - set(_OPTION.findall(text)) == set()
    own = text.partition(".SH OPTIONS")[2].partition(".SH ")[0]
    heads = {o for line in own.splitlines() if line.startswith((".B", ".BI", ".BR")) for o in _OPTION.findall(line)}
    assert heads <= everywhere  # one page may describe two commands


@pytest.mark.parametrize("name", NAMES)
def test_the_manual_has_the_sections_that_people_look_for(name: str) -> None:
    text = manual_of(name)
    for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "SEE ALSO"):
        assert f".SH {section}" in text or f'.SH "{section}"' in text, section
    assert f"cachexfs-{name}" in text


def test_the_main_manual_names_every_command() -> None:
    text = (DOCS / "man" / "cachexfs.1").read_text().replace("\\-", "-")
    assert [name for name in NAMES if f"cachexfs-{name}" not in text and name not in text] == []


def test_the_page_of_commands_names_only_what_exists() -> None:
    text = (DOCS / "commands.md").read_text().partition("## Not here yet")[0]
    everywhere = {option for name in NAMES for option in options_of(name)} | {"--help", "--version", "--refresh"}
    assert set(_OPTION.findall(text)) - everywhere == set()
    for name in COMMANDS:
        for line in text.splitlines():
            if line.startswith(f"| `cachexfs {name} "):
                assert set(_OPTION.findall(line.partition("`")[2].partition("`")[0])) <= options_of(name), line


def test_the_help_of_mount_names_each_option() -> None:
    assert list(MEANINGS) == list(OPTIONS)
