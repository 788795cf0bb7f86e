"""The files for containers: they are what they should be, and the commands in them are those of spiderfs."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import yaml

from spiderfs.cli.main import main
from spiderfs.options.model import Options

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "docs" / "examples" / "containers"


def commands(text: str) -> list[list[str]]:
    """The command lines of spiderfs in a file."""
    parsed: list[Any] = list(yaml.safe_load_all(text))
    found = []
    for value in parsed:
        parsed += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        if isinstance(value, list) and value[:1] == ["spiderfs"]:
            found.append(value)
        elif isinstance(value, list) and value[:2] == ["CMD", "spiderfs"]:
            found.append(value[1:])
        elif isinstance(value, dict) and str(value.get("image", "")).startswith("spiderfs") and "command" not in value:
            found.append(["spiderfs", *value["args"]])
        elif isinstance(value, str) and " exec spiderfs " in value:
            found.append(shlex.split(value.partition("; exec ")[2]))
    return found


def test_every_command_is_one_of_spiderfs(tmp_path: Path) -> None:
    source, point = tmp_path / "source", tmp_path / "mnt"
    source.mkdir()
    point.mkdir()
    for name, count in (("compose.yaml", 2), ("daemonset.yaml", 5)):
        found = commands((FILES / name).read_text())
        assert len(found) == count
        for _, subcommand, *arguments in found:
            command = main.get_command(click.Context(main), subcommand)
            assert command is not None
            context = command.make_context(subcommand, arguments)  # raises UsageError
            if subcommand == "mount":
                given = ",".join(context.params["options"])
                assert context.params["foreground"]
                options = Options.load([given.replace("/var/cache", str(tmp_path / "cache"))], None, source, point)
                assert options.allow_other
                assert options.immutable


def test_a_mount_made_in_a_container_is_seen_outside() -> None:
    service = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]["spiderfs"]
    assert service["volumes"][1]["bind"]["propagation"] == "rshared"
    assert service["pid"] == "host"
    _, daemons = yaml.safe_load_all((FILES / "daemonset.yaml").read_text())
    pod = daemons["spec"]["template"]["spec"]
    assert pod["hostPID"]
    mounts = {volume["name"]: volume for volume in pod["containers"][0]["volumeMounts"]}
    assert mounts["mounts"]["mountPropagation"] == "Bidirectional"
    training = yaml.safe_load((FILES / "training.yaml").read_text())["spec"]["containers"][0]
    assert training["volumeMounts"][0]["mountPropagation"] == "HostToContainer"


def test_the_image_installs_what_there_is() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (FILES / "Containerfile").read_text()
    (installed,) = re.findall(r"/src\[([a-z0-9,]+)\]", text)
    assert set(installed.split(",")) <= extras.keys()
    copied = {name for line in re.findall(r"^COPY (?!--from)(.*) /src.*$", text, re.MULTILINE) for name in line.split()}
    # By names: a virtual environment in the checkout has several GB.
    assert copied >= {"pyproject.toml", "spiderfs", "trainer_hook"}
    assert [name for name in copied if name == "." or not (ROOT / name).exists()] == []
