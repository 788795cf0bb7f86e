"""`scripts/release`, in a copy of the repository whose tests are said to pass or to fail, and what it releases."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from for_all import for_all
from packaging.requirements import Requirement

from spiderfs import __version__

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


FILES = [
    f"spiderfs-7.1.0{suffix}" for suffix in ("-py3-none-any.whl", ".cdx.json", ".intoto.json", ".sha256", ".tar.gz")
]


@pytest.mark.thorough
def test_a_release_is_made_once_and_whole_or_not_at_all(tmp_path: Path) -> None:
    def run(*command: str, status: int = 0, place: Path = tmp_path) -> str:
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    who = {f"GIT_{role}_{part}": "someone@example" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    environment = {**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull}
    for name in ("pyproject.toml", "README.md", "LICENSE", "spiderfs", "trainer_hook", "scripts"):
        run("cp", "-r", str(ROOT / name), ".")
    (tmp_path / "docs/examples").mkdir(parents=True)
    for name in ("conda", "containers", "helm"):
        run("cp", "-r", str(ROOT / "docs/examples" / name), "docs/examples")
    (tmp_path / ".venv-dev").symlink_to(sys.prefix)
    (tmp_path / ".gitignore").write_text(".venv-dev\n__pycache__\ndist\n*.egg-info\nbuild\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 7.1.0 (unreleased)\n\nNew.\n\n## 7.0.0 (2020-01-01)\n")
    tests = tmp_path / "scripts" / "test"
    run("git", "init", "--quiet")

    def tests_end_with(status: int) -> None:
        # Whoever waits for them goes on working.
        tests.write_text(f"#!/bin/sh\necho >>README.md\ntouch meanwhile.py\nexit {status}\n")
        run("git", "add", ".")
        run("git", "commit", "--quiet", "--message", "a commit")

    def set_aside() -> None:
        run("git", "checkout", "README.md")
        (tmp_path / "meanwhile.py").unlink()

    meanwhile = " M README.md\n?? meanwhile.py\n"
    tests_end_with(1)
    for wrong in (("7",), ("7.1.0", "--dry"), ("7.1.0", "--dry-run", "more")):
        assert "write 'scripts/release VERSION'" in run("scripts/release", *wrong, status=1)
    assert "'## 7.2.0 (unreleased)'" in run("scripts/release", "7.2.0", status=1)
    run("scripts/release", "7.1.0", status=1)
    assert run("git", "status", "--porcelain") == meanwhile, "what fails leaves nothing"
    assert "7.1.0" not in (tmp_path / "docs/examples/conda/recipe.yaml").read_text()
    (tmp_path / "README.md").write_text("changed")
    assert "the working tree has changes" in run("scripts/release", "7.1.0", status=1)
    set_aside()
    tests_end_with(0)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/spiderfs-7.0.0-py3-none-any.whl").write_text("an earlier release")
    said = run("scripts/release", "7.1.0", "--dry-run")
    place = Path(said.split(", in ")[1].strip())
    assert sorted(path.name for path in place.glob("spiderfs*")) == FILES, said
    shutil.rmtree(place)
    assert run("git", "status", "--porcelain") == run("git", "tag") == "", "a dry run neither tests nor leaves anything"
    assert "left to do: git push" in run("scripts/release", "7.1.0")
    assert sorted(path.name for path in (tmp_path / "dist").glob("*7.1*")) == FILES
    assert 'version: "7.1.0"' in (tmp_path / "docs/examples/conda/recipe.yaml").read_text()
    assert "image: spiderfs:7.1.0\n" in (tmp_path / "docs/examples/containers/daemonset.yaml").read_text()
    assert 'appVersion: "7.1.0"' in (tmp_path / "docs/examples/helm/spiderfs/Chart.yaml").read_text()
    run("sha256sum", "--check", "--status", "--strict", "spiderfs-7.1.0.sha256", place=tmp_path / "dist")
    check_materials(json.loads((tmp_path / "dist/spiderfs-7.1.0.cdx.json").read_text()), tmp_path / "dist" / FILES[0])
    check_provenance(tmp_path / "dist", run("git", "rev-parse", "v7.1.0^{commit}").strip())
    with tarfile.open(tmp_path / "dist" / FILES[-1]) as sdist:
        readme = sdist.extractfile("spiderfs-7.1.0/README.md")
        assert readme is not None
        assert readme.read().decode() == run("git", "show", "v7.1.0:README.md"), "what is built is what is tagged"
    assert f"## 7.1.0 ({datetime.now(tz=UTC):%Y-%m-%d})" in (tmp_path / "CHANGELOG.md").read_text()
    assert run("git", "tag") == "v7.1.0\n"
    assert (tmp_path / "dist/spiderfs-7.0.0-py3-none-any.whl").read_text() == "an earlier release"
    assert run("git", "status", "--porcelain") == meanwhile, "what was written beside the tests is not committed"
    assert len(run("git", "worktree", "list").splitlines()) == 1
    set_aside()
    assert "the tag v7.1.0 exists" in run("scripts/release", "7.1.0", status=1)


def check_provenance(dist: Path, commit: str) -> None:
    """The statement that is to be signed names the commit and all files but the sums."""
    statement = json.loads((dist / "spiderfs-7.1.0.intoto.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    digests = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    assert digests == {
        name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in (FILES[0], FILES[1], FILES[4])
    }
    (source,) = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": commit}


def check_materials(found: dict[str, Any], wheel: Path) -> None:
    """The parts of CycloneDX 1.6 that tools look for, and that they are those of this wheel and this environment."""
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", found["serialNumber"])
    own = found["metadata"]["component"]
    assert own["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    listed = {component["name"]: component for component in found["components"]}
    assert "pytest" not in listed
    assert {name for name, component in listed.items() if not component["purl"].startswith("pkg:pypi/")} == set()
    for scope, requirements in (
        ("required", PROJECT["dependencies"]),
        ("optional", PROJECT["optional-dependencies"]["s3"]),
    ):
        for requirement in map(Requirement, requirements):
            component = listed[requirement.name]
            assert component["scope"] == scope
            assert requirement.specifier.contains(component["version"])
            assert component["licenses"]
    # What pydantic needs is not in pyproject.toml.
    assert listed["pydantic-core"]["scope"] == "required"
    references = [component["bom-ref"] for component in found["components"]]
    assert len(set(references)) == len(references)
    edges = {edge["ref"]: edge["dependsOn"] for edge in found["dependencies"]}
    assert edges.keys() == {*references, own["bom-ref"]}
    assert {needed for needs in edges.values() for needed in needs} <= set(references)


METADATA = "spiderfs-7.1.0.dist-info/METADATA"
# What a wheel has instead of what it should have, and what is said of it.
REFUSED = [
    ("spiderfs/errors.py", b"changed", "spiderfs/errors.py is not what RECORD says"),
    ("tests/test_cli.py", b"", "only spiderfs, trainer_hook belong there"),
    (METADATA, b"Metadata-Version: 2.4\nName: spiderfs\nVersion: 7.0.0\n", "the version 7.0.0"),
    (METADATA, b"Metadata-Version: 2.4\nName: spiderfs\nVersion: 7.1.0\n", "no description"),
    (METADATA, b"Metadata-Version: 2.4\nName: ?\nVersion: 7.1.0\n", "'?' is invalid"),
]


@for_all(REFUSED, lambda name, text, why: why)
def test_a_wheel_that_an_index_or_a_user_would_refuse_is_not_released(name: str, text: bytes, why: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        check_refused(Path(place), name, text, why)


def check_refused(place: Path, name: str, text: bytes, why: str) -> None:
    files = {"spiderfs/errors.py": b"", METADATA: b"", name: text}
    empty = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
    files["spiderfs-7.1.0.dist-info/RECORD"] = f"spiderfs/errors.py,sha256={empty},0\n".encode()
    files["spiderfs-7.1.0.dist-info/entry_points.txt"] = b""
    described = b"Metadata-Version: 2.4\nName: spiderfs\nVersion: 7.1.0\nSummary: a\nLicense-Expression: MIT\n"
    described += b"Description-Content-Type: text/markdown\n\nA description.\n"
    files[METADATA] = files[METADATA] or described
    with zipfile.ZipFile(place / FILES[0], "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
    (place / FILES[-1]).touch()
    command = [sys.executable, ROOT / "scripts/distribution.py", place, "7.1.0", "0" * 40]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert done.stderr.startswith("distribution: ")
    assert why in done.stderr
    assert len(list(place.iterdir())) == 2, "it writes nothing"


# The names of packages in conda-forge that differ.
CONDA_NAMES = {"lmdb": "python-lmdb", "msgpack": "msgpack-python", "prometheus-client": "prometheus_client"}
CONDA_NAMES |= {"redis": "redis-py", "xxhash": "python-xxhash"}


def test_the_conda_recipe_asks_for_what_the_wheel_asks_for() -> None:
    recipe = yaml.safe_load((ROOT / "docs/examples/conda/recipe.yaml").read_text())
    asked = recipe["requirements"]["run"]
    assert asked[:2] == ["__linux", f"python {PROJECT['requires-python']}"]
    wanted = {(CONDA_NAMES.get(r.name, r.name), r.specifier) for r in map(Requirement, PROJECT["dependencies"])}
    found = [Requirement(text.replace(" ", "")) for text in asked[2:]]
    assert {(requirement.name, requirement.specifier) for requirement in found} == wanted
    assert len(found) == len(wanted)
    assert recipe["context"]["version"] == __version__
    (program,) = PROJECT["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(program)]
    assert (recipe["about"]["license"], recipe["about"]["summary"]) == (PROJECT["license"], PROJECT["description"])
    assert {"pip", "setuptools >=77"} <= set(recipe["requirements"]["host"])
    # Whoever changes the form should validate it: https://github.com/prefix-dev/recipe-format has the schema.
    assert set(recipe) == {"context", "package", "source", "build", "requirements", "tests", "about"}
