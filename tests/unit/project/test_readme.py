"""README.md says what is: its options are those of the table in config.py, and what it tells people to run exists."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import pytest

from spiderfs.cli.main import COMMANDS, main
from spiderfs.options.model import default_rows
from spiderfs.vfs.control_files import FILES

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "README.md").read_text()
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))

# Commands of the system that examples may use besides our own.
SYSTEM = {".", "cat", "cp", "echo", "mount", "systemctl"}


def shell_lines() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    section = TEXT.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_it_begins_with_the_two_commands() -> None:
    assert shell_lines()[:2] == ["scripts/demo", "scripts/test"]


def test_its_options_are_the_options() -> None:
    assert table("Options") == [
        [f"`{row.name}`", row.value, "yes" if row.live else "", row.help] for row in default_rows()
    ]


def test_its_control_files_are_the_control_files() -> None:
    assert [row[0] for row in table("Control files")] == [f"`{os.fsdecode(file.name)}`" for file in FILES]
    written = [row[0] for row in table("Control files") if row[2]]
    assert written == [f"`{os.fsdecode(file.name)}`" for file in FILES if file.mode & 0o200]


@pytest.mark.parametrize("line", shell_lines())
def test_every_command_exists(line: str) -> None:
    command = line.split()[0]
    if command.startswith("scripts/"):
        assert os.access(ROOT / command, os.X_OK)
    elif command != "spiderfs":
        assert command in SYSTEM


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bscripts/[\w-]+", TEXT))))
def test_every_script_exists(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)


def test_every_subcommand_and_its_flags_exist() -> None:
    lines = [
        line for line in [*shell_lines(), *re.findall(r"`(spiderfs [^`]*)`", TEXT)] if line.startswith("spiderfs ")
    ]
    assert {line.split()[1] for line in lines} == {name for name, command in COMMANDS.items() if command.short_help}
    for line in lines:
        subcommand = main.get_command(click.Context(main), line.split()[1])
        assert subcommand is not None
        known = {flag for parameter in subcommand.params for flag in parameter.opts}
        assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", line)) <= known, line


@pytest.mark.parametrize("document", [ROOT / "README.md", *DOCUMENTS], ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target
