"""The documents say what is: links lead somewhere, commands and flags exist, and tables are those of the code."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import click
from for_all import for_all

from spiderfs import protocol
from spiderfs.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Commands of the system that examples may use besides our own.
SYSTEM = {".", "cat", "cd", "cp", "echo", "find", "grep", "ls", "mkdir", "mount", "pip", "python3", "systemctl", "tail"}
SYSTEM |= {"aws", "git", "rm", "umount"}


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def blocks(document: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(document.read_text()) if kind == language]


def shell_lines() -> list[tuple[str, str]]:
    """Every command of a block of shell, continued lines joined, with the document that it is in."""
    return [
        (name_of(document), line)
        for document in DOCUMENTS
        for block in blocks(document, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def anchors_of(document: Path) -> set[str]:
    """The anchors that its headings have, on the site and where the repository is shown."""
    text = BLOCK.sub("", document.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r" ", "-", re.sub(r"[^\w\- ]", "", heading).strip()) for heading in plain}


@for_all(DOCUMENTS, name_of)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", BLOCK.sub("", document.read_text())):
        path, _, anchor = target.partition("#")
        led_to = document.parent / path if path else document
        assert led_to.exists(), target
        if anchor:
            assert anchor in anchors_of(led_to), target


@for_all([path for path in DOCUMENTS if path.parent != ROOT], name_of)
def test_pages_lead_to_pages(document: Path) -> None:
    """What lies outside of docs/ is not on the site."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", BLOCK.sub("", document.read_text())):
        assert (document.parent / target).resolve().is_relative_to(ROOT / "docs"), target


@for_all(shell_lines(), lambda document, line: f"{document}: {line}")
def test_every_command_exists(document: str, line: str) -> None:
    command, *arguments = line.split()
    if command == ".venv-dev/bin/python":
        if arguments[0] == "-m" and arguments[1].startswith("benchmarks."):
            assert (ROOT / arguments[1].replace(".", "/")).with_suffix(".py").exists()
        elif arguments[0] != "-m":
            assert (ROOT / arguments[0]).exists()
    elif command.startswith(("scripts/", "benchmarks/")):
        assert os.access(ROOT / command, os.X_OK)
    elif "=" in command:  # a variable for the command after it
        assert arguments
    elif command != "spiderfs":
        assert command in SYSTEM, document


@for_all(DOCUMENTS, name_of)
def test_every_script_and_module_that_is_named_exists(document: Path) -> None:
    text = document.read_text()
    for name in re.findall(r"`(scripts/[\w.-]+)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`((?:spiderfs|trainer_hook|benchmarks|tests|mount|systemd)/[\w./@-]+)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"-m (benchmarks[\w.]+)", text):
        assert (ROOT / name.replace(".", "/")).with_suffix(".py").exists(), name


def test_code_and_messages_name_documents_that_exist() -> None:
    named: dict[str, str] = {}
    for room in ("spiderfs", "trainer_hook", "benchmarks", "mount", "scripts", "systemd", "tests", "pyproject.toml"):
        for path in [ROOT / room, *(ROOT / room).rglob("*")]:
            if path.is_file() and path.suffix != ".pyc":
                text = path.read_text(errors="replace")
                named |= {name: name_of(path) for name in re.findall(r"\bdocs/[\w./-]*\w", text)}
    assert len(named) > 20
    assert {name: path for name, path in named.items() if not (ROOT / name).exists()} == {}


def test_every_subcommand_and_its_flags_exist() -> None:
    lines = [line for _, line in shell_lines() if line.startswith("spiderfs ")]
    for document in DOCUMENTS:
        lines += re.findall(r"`(spiderfs [a-z][^`]*)`", BLOCK.sub("", document.read_text()))
    assert {line.split()[1] for line in lines} == {name for name, command in COMMANDS.items() if command.short_help}
    for line in lines:
        subcommand = main.get_command(click.Context(main), line.split()[1])
        assert subcommand is not None
        known = {flag for parameter in subcommand.params for flag in parameter.opts} | {"--help"}
        assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", line)) <= known, line


@for_all(DOCUMENTS, name_of)
def test_every_python_example_is_python(document: Path) -> None:
    for block in blocks(document, "python"):
        ast.parse(block)


@for_all(DOCUMENTS, name_of)
def test_messages_in_examples_have_the_arguments_of_the_protocol(document: Path) -> None:
    for block in blocks(document, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                message = getattr(protocol, node.func.id, None)
                if isinstance(message, type) and issubclass(message, protocol.Message):
                    named = {keyword.arg: ... for keyword in node.keywords if keyword.arg is not None}
                    inspect.signature(message).bind(*node.args, **named)


@for_all(DOCUMENTS, name_of)
def test_lists_and_tables_stand_apart(document: Path) -> None:
    """Without an empty line before them the site shows them as one paragraph."""
    lines = BLOCK.sub("", document.read_text()).splitlines()
    for before, line in itertools.pairwise(lines):
        begins = re.match(r"(- |\d+\. |\|)", line) and not re.match(r"(- |\d+\. |\||  )", before)
        assert not (begins and before.strip()), line


def test_tables_are_those_of_the_code() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/reference.py", "--check"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"run .venv-dev/bin/python scripts/reference.py: {done.stdout}{done.stderr}"


def test_there_are_parts_that_are_written() -> None:
    marks = [mark for path in DOCUMENTS for mark in re.findall(r"<!-- ([\w-]+): written by", path.read_text())]
    assert len(marks) >= 7
    assert len(set(marks)) == len(marks)


def test_every_kept_result_is_named_by_a_document() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    kept = [path.name for path in sorted((ROOT / "docs/results").iterdir()) if path.suffix != ".md"]
    assert [name for name in kept if f"results/{name}" not in text and f"]({name})" not in text] == []
