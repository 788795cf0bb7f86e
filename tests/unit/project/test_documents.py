"""The documents say what is: links lead somewhere, what they name exists, and tables are those of the code."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
from for_all import for_all

import trainer_hook
from spiderfs import client, protocol
from spiderfs.cli.main import COMMANDS, main
from spiderfs.options.model import default_rows

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
        # What lies outside of docs/ is not on the site.
        assert document.parent == ROOT or led_to.resolve().is_relative_to(ROOT / "docs"), target
        if anchor:
            assert anchor in anchors_of(led_to), target


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


def test_what_documents_code_and_messages_name_exists() -> None:
    named: dict[str, str] = {}
    for document in DOCUMENTS:
        text = document.read_text()
        rooms = r"`((?:scripts|spiderfs|trainer_hook|benchmarks|tests|mount|systemd)/[\w./@-]+)"
        modules = [f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (benchmarks[\w.]+)", text)]
        named |= dict.fromkeys([*re.findall(rooms, text), *modules], name_of(document))
    for room in ("spiderfs", "trainer_hook", "benchmarks", "mount", "scripts", "systemd", "tests", "pyproject.toml"):
        for path in [ROOT / room, *(ROOT / room).rglob("*")]:
            if path.is_file() and path.suffix != ".pyc":
                text = path.read_text(errors="replace")
                named |= {name: name_of(path) for name in re.findall(r"\bdocs/[\w./-]*\w", text)}
    assert len(named) > 20
    assert {name: path for name, path in named.items() if not (ROOT / name).exists()} == {}
    # Messages tell users to install the checkout, because the name on the package index is not ours.
    files = [path for room in ("spiderfs", "trainer_hook", "scripts") for path in (ROOT / room).rglob("*.py")]
    assert [path for path in files if re.search(r"install [\"'`]*spiderfs", path.read_text())] == []


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
def test_examples_are_python_with_messages_of_the_protocol_and_lists_stand_apart(document: Path) -> None:
    for block in blocks(document, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                message = getattr(protocol, node.func.id, None)
                if isinstance(message, type) and issubclass(message, protocol.Message):
                    named = {keyword.arg: ... for keyword in node.keywords if keyword.arg is not None}
                    inspect.signature(message).bind(*node.args, **named)
    # Without an empty line before them the site shows lists and tables as one paragraph.
    lines = BLOCK.sub("", document.read_text()).splitlines()
    for before, line in itertools.pairwise(lines):
        begins = re.match(r"(- |\d+\. |\|)", line) and not re.match(r"(- |\d+\. |\||  )", before)
        assert not (begins and before.strip()), line


def test_tables_are_those_of_the_code_and_results_are_named() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/reference.py", "--check"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"run .venv-dev/bin/python scripts/reference.py: {done.stdout}{done.stderr}"
    marks = [mark for path in DOCUMENTS for mark in re.findall(r"<!-- ([\w-]+): written by", path.read_text())]
    assert len(set(marks)) == len(marks) >= 7
    # Every result that is kept is named by a document.
    text = "".join(document.read_text() for document in DOCUMENTS)
    kept = [path.name for path in sorted((ROOT / "docs/results").iterdir()) if path.suffix != ".md"]
    assert [name for name in kept if f"results/{name}" not in text and f"]({name})" not in text] == []


# -- public names

# Public are what `trainer_hook` and `spiderfs.client` list in `__all__`, the messages of the hook's protocol, and the
# errors: all others may change in any version.
PUBLIC = {"trainer_hook", "spiderfs.client", "spiderfs.errors", "spiderfs.protocol"}
PUBLIC |= {f"{room.__name__}.{name}" for room in (trainer_hook, client) for name in room.__all__}
PUBLIC |= {f"spiderfs.protocol.{name}" for name, found in vars(protocol).items() if not isinstance(found, ModuleType)}
FOR_DEVELOPERS = ("docs/design/", "docs/reference/bindings.md", "CONTRIBUTING.md")


def test_documents_show_users_public_names_alone() -> None:
    shown: dict[str, set[str]] = {}
    for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(FOR_DEVELOPERS):
            continue
        text = path.read_text()
        programs = (
            [text] if path.suffix == ".py" else re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        )
        for program in programs:
            for imported in imports_of(program):
                shown.setdefault(imported, set()).add(name)
    assert len(shown) > 5
    assert {imported: where for imported, where in shown.items() if imported not in PUBLIC} == {}


def imports_of(program: str) -> set[str]:
    """The names of our packages that a program imports, and the attributes of `trainer_hook` that it uses."""
    found = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trainer_hook":
            found.add(f"trainer_hook.{node.attr}")
    return {name for name in found if name.partition(".")[0] in ("spiderfs", "trainer_hook")}


# -- docs/reference/security.md

SECURITY = (ROOT / "docs/reference/security.md").read_text()


def who_may_do_what() -> list[list[str]]:
    """The cells of each line of the tables that say who may do what."""
    found = []
    for block in re.findall(r"^\| who \| may .*\n\|[-|]+\|\n((?:\|.*\n)+)", SECURITY, re.MULTILINE):
        found += [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
    return found


@for_all(who_may_do_what(), lambda row: " ".join(row[:3]))
def test_every_line_names_a_test_that_exists(row: list[str]) -> None:
    assert len(row) == 4, row
    named = re.findall(r"`(tests/[^`]+)`", row[3])
    assert named, f"no test is named for: {row}"
    for name in named:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in functions, name


# -- man pages

MAN = ROOT / "docs/man"


@for_all(["spiderfs.1", "mount.spiderfs.8"])
def test_roff_has_nothing_to_say_of_a_page_that_names_all_there_is(page: str) -> None:
    text = (MAN / page).read_text().replace("\\-", "-")
    assert all(f".B {row.name}=" in text for row in default_rows())
    for name, command in COMMANDS.items():
        assert page != "spiderfs.1" or not command.short_help or f".SS spiderfs {name} " in text
    command = ["groff", "-man", "-Tutf8", "-ww", "-P-c", "-rLL=80n", MAN / page]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert shown.stderr == ""
    assert "\\" not in shown.stdout
