"""requirements.lock has what pyproject.toml asks for, in versions that suit it, each with hashes and from nowhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXT = (ROOT / "requirements.lock").read_text()
# A package may stand there more than once, with markers of different Pythons.
PINS = re.findall(r"^([a-z0-9-]+)==(\S+)(?: ; (.*?))? \\$", TEXT, re.MULTILINE)
REQUIREMENTS = [
    Requirement(text)
    for extra in (PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values())
    for text in extra
    if not text.startswith("spiderfs[")
]
PYTHONS = ("3.11.0", "3.12.0", "3.13.0", "3.14.0")


def locked(name: str, python: str) -> list[str]:
    environment = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    return [
        version
        for pin, version, marker in PINS
        if pin == name and (not marker or Requirement(f"{pin} ; {marker}").marker.evaluate(environment))
    ]


def test_it_has_one_version_that_suits_of_all_that_is_asked_for() -> None:
    for python in PYTHONS:
        for requirement in REQUIREMENTS:
            if requirement.name != "torch":
                versions = locked(requirement.name, python)
                assert len(versions) == 1, requirement
                assert requirement.specifier.contains(versions[0]), f"{requirement}: run scripts/lock"


def test_lines_are_packages_and_hashes_and_torch_is_pinned_in_another_file() -> None:
    pin = Requirement(PROJECT["tool"]["uv"]["constraint-dependencies"][0])
    version = str(pin.specifier).removeprefix("==")
    assert not re.search(r"^(torch|triton|nvidia-.*|cuda-.*)==", TEXT, re.MULTILINE)
    assert all(asked.specifier.contains(version) for asked in REQUIREMENTS if asked.name == "torch")
    assert [known["version"] for known in PROJECT["tool"]["uv"]["dependency-metadata"]] == [version]
    # Each line is a package, a hash or a comment, so none can name where packages come from.
    allowed = re.compile(r"#.*|[a-z0-9-]+==[\w.]+( ; [\w .'<>=!()]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?")
    assert [line for line in TEXT.splitlines() if not allowed.fullmatch(line)] == []
    assert "//" not in TEXT


def test_requirements_are_bounded_and_the_lock_is_for_every_python() -> None:
    for requirement in REQUIREMENTS:
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators == {">=", "<"}, requirement
    supported = Requirement(f"python{PROJECT['project']['requires-python']}").specifier
    assert [f"3.{minor}.0" for minor in range(8, 20) if supported.contains(f"3.{minor}.0")] == list(PYTHONS)
    extras = PROJECT["project"]["optional-dependencies"]
    (whole,) = map(Requirement, extras["all"])
    assert whole.name == PROJECT["project"]["name"]
    assert whole.extras == extras.keys() - {"all", "demo", "dev", "hnsw", "mount", "pyfuse3"}, "those that have wheels"
