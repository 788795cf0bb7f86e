"""What docs/reference/semantics.md promises: each example, run in a shell against a mount made for it.

The examples are in semantics_examples.txt, below the headings of the page. An example is a fenced ```console block:
`$ command` lines (continued by `> ` lines), each followed by what it prints, in which `...` stands for anything.
"Mounted with `-o ...`" in the paragraph before the block names its options. The shell has SOURCE, MOUNT and CACHE in
its environment, and in SOURCE the files of FILES; `unplug`, `hang` and `replug` set faults of the source.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from mounting import SPIDERFS, options_of, options_text, refused_by_modes, run_spiderfs, settle

from benchmarks.fakes.faulty_source import GONE, HANG, Faults, registering

pytestmark = pytest.mark.opened_and_immutable

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "reference" / "semantics.md"
PROOFS = Path(__file__).with_name("semantics_examples.txt")
FILES = {"cat.txt": "a cat\n", "dog.txt": "a dog\n", "train/1.txt": "one\n", "train/2.txt": "two\n"}

# Examples that wait do so in a loop; this is their deadline.
TIMEOUT_S = 60.0
FENCE = "```"
_OPTIONS = re.compile(r"[Mm]ounted\s+with\s+`-o\s+([^`]+)`")
_MARK = "\x01"
# What a mount says where the disk is smaller than its default capacity.
_SMALL_DISK = re.compile(r"^spiderfs: warning: capacity=10GiB is more than .*\n", re.MULTILINE)
# How an ordinary user is refused in an immutable mount.
_REFUSED = {"OSError: [Errno 30]": "PermissionError: [Errno 13]", "Read-only file system": "Permission denied"}


class Step(NamedTuple):
    command: str
    output: str


class Example(NamedTuple):
    name: str
    options: str
    steps: list[Step]


def steps_of(lines: list[str]) -> list[Step]:
    steps: list[Step] = []
    for line in lines:
        if line.startswith("$ "):
            steps.append(Step(line[2:], ""))
        elif line.startswith("> ") and not steps[-1].output:
            steps[-1] = Step(f"{steps[-1].command}\n{line[2:]}", "")
        else:
            steps[-1] = Step(steps[-1].command, f"{steps[-1].output}{line}\n")
    return steps


def examples_of(text: str) -> Iterator[Example]:
    """Every fenced block of a text; raises ValueError for one that is not an example."""
    heading, count, paragraph = "", 0, ""
    block: list[str] | None = None
    above = False
    for number, line in enumerate(text.splitlines(), 1):
        if block is None:
            if line.startswith("#"):
                heading, count, paragraph = re.sub(r"[^a-z0-9]+", "-", line.lower()).strip("-"), 0, ""
            elif line.startswith(FENCE):
                if line != f"{FENCE}console":
                    raise ValueError(f"line {number}: not an example, so not a test: {line}")
                block, count = [], count + 1
            elif line:
                # A blank line ends the paragraph, but one may stand before the block.
                paragraph = f"{paragraph}\n{line}" if above else line
            above = bool(line)
        elif line == FENCE:
            if not (block and block[0].startswith("$ ")):
                raise ValueError(f"line {number}: an example without a command")
            named = _OPTIONS.search(paragraph)
            yield Example(f"{heading}-{count}", named[1] if named else "", steps_of(block))
            block, paragraph, above = None, "", False
        else:
            block.append(line)


EXAMPLES = list(examples_of(PROOFS.read_text()))
# What these sections promise, the manager and the engine do, and in the last ones the supervisor before it mounts.
ALIKE = ("the-budget", "warm-pin-and-evict", "the-ratio-of-the-sections", "views")
ALIKE += ("unmounting-and-crashes-4", "unmounting-and-crashes-5")
_ALIKE = pytest.mark.not_immutable("does not depend on the mode")
# What is otherwise in an immutable mount; the section on such mounts says how.
OTHERWISE = (
    "an-inode-is-a-version-1",
    "an-inode-is-a-version-3",
    "an-inode-is-a-version-4",
    "provisional-versions-1",
    "open-files-1",
    "read-only-2",
    "read-only-4",
    "unmounting-and-crashes-3",
)
_NOT_IMMUTABLE = pytest.mark.not_immutable("is otherwise in an immutable mount")


# It reads thousands of files.
SLOW = ("the-budget-2",)


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    if name in SLOW:
        return [_ALIKE, pytest.mark.thorough]
    if name.startswith(("immutable-mounts", *ALIKE)):
        return [_ALIKE]
    return [_NOT_IMMUTABLE] if name in OTHERWISE else []


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    yield from places_of(tmp_path, tmp_path / "source")


def places_of(tmp_path: Path, source: Path) -> Iterator[dict[str, str]]:
    """SOURCE with FILES, an empty MOUNT and CACHE; whatever is mounted there is gone afterwards."""
    places = {"SOURCE": source, "MOUNT": tmp_path / "mount", "CACHE": tmp_path / "cache"}
    for place in places.values():
        place.mkdir(exist_ok=True)
    for name, text in FILES.items():
        path = places["SOURCE"] / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    settle(places["SOURCE"])
    if os.geteuid() == 0:
        # Some examples read as another user, who must be able to come here.
        for parent in (*places.values(), *tmp_path.parents, tmp_path):
            if parent.stat().st_uid == 0 and parent.stat().st_mode & 0o011 != 0o011:
                parent.chmod(parent.stat().st_mode | 0o011)
    environment = {
        **os.environ,
        **{name: str(place) for name, place in places.items()},
        "PATH": f"{SPIDERFS.parent}:{os.environ['PATH']}",
        "LC_ALL": "C",
    }
    yield environment
    while os.fsencode(places["MOUNT"]) in Path("/proc/self/mounts").read_bytes():
        if run_spiderfs("umount", places["MOUNT"]).returncode:
            run_spiderfs("umount", "--lazy", places["MOUNT"])
    shutil.rmtree(places["CACHE"], ignore_errors=True)


def run(script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        env=environment,
        cwd=environment["SOURCE"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize(
    "example", [pytest.param(example, id=example.name, marks=marks_of(example.name)) for example in EXAMPLES]
)
def test_the_example_prints_what_it_shows(example: Example, environment: dict[str, str], binding: str) -> None:
    if any("setpriv" in step.command for step in example.steps) and os.geteuid() != 0:
        pytest.skip("only root can read as another user")
    check(example, environment, binding)


def check(example: Example, environment: dict[str, str], binding: str) -> None:
    """Mount as the example says, run its steps, and compare what they print."""
    options = f"cache_dir={environment['CACHE']},{options_text(options_of(binding))},{example.options}"
    faults = Faults.made()
    first = registering(faults)
    mounted = run_spiderfs("mount", environment["SOURCE"], environment["MOUNT"], "-o", options, first=first)
    assert mounted.returncode == 0, mounted.stderr

    # One shell for all steps, since later ones use the variables and descriptors of earlier ones.
    script = "\nprintf '\\001'\n".join([f"cd /\n{_faults_in_shell(faults)}", *(step.command for step in example.steps)])
    printed = run(script, environment).stdout.split(_MARK)[1:]
    assert len(printed) == len(example.steps), "the shell ended early"
    checker = doctest.OutputChecker()
    for step, got in zip(example.steps, printed, strict=True):
        output, got = step.output, _SMALL_DISK.sub("", got)
        if refused_by_modes(binding) and "Permission denied" in got:
            for word, other in _REFUSED.items():
                output = output.replace(word, other)
        expected = doctest.Example(step.command, output)
        assert checker.check_output(output, got, doctest.ELLIPSIS), (
            f"$ {step.command}\n{checker.output_difference(expected, got, doctest.ELLIPSIS)}\nall: {printed}"
        )


def _faults_in_shell(faults: Faults) -> str:
    """Functions of a shell that set the faults, and a `spiderfs` that mounts sources which have them."""
    python, module = shlex.quote(sys.executable), "benchmarks.fakes.faulty_source"
    root = shlex.quote(str(ROOT))
    setting = f"from {module} import Faults; import sys; faults = Faults.at({faults.path!r})"
    words = {"unplug": {GONE: 1}, "hang": {HANG: 1}, "replug": {GONE: 0, HANG: 0}}
    lines = [f'spiderfs() {{ PYTHONPATH={root} {python} -m {module} {faults.path} "$@"; }}']
    for word, settings in words.items():
        code = "; ".join([setting, *(f"faults.set({name!r}, {value})" for name, value in settings.items())])
        lines.append(f"{word}() {{ PYTHONPATH={root} {python} -c {shlex.quote(code)}; }}")
    return "\n".join(lines)


def test_the_first_example_shows_the_files_that_every_example_starts_with() -> None:
    shown = EXAMPLES[0].steps[-1].output
    assert shown == "".join(f"./{name}:{text}" for name, text in FILES.items())


def test_examples_stand_below_headings_of_the_document() -> None:
    text = re.sub(r"^```console$.*?^```$", "", PROOFS.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ .*$", text, re.MULTILINE)
    assert set(headings) <= set(DOCUMENT.read_text().splitlines())
