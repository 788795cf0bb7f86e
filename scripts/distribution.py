"""Checks a release's files in a directory, and writes SBOM, provenance and checksums beside them.

    .venv-dev/bin/python scripts/distribution.py dist 0.2.0 COMMIT

The checks are those that an index makes of an upload (valid metadata, a description that it can show), and that wheel
and sdist hold the same modules. `spiderfs-VERSION.cdx.json` is a bill of materials in CycloneDX 1.6: every package that
the wheel needs, and those of its extras, in the versions of this environment. `spiderfs-VERSION.intoto.json`
says that these files were built from a commit: a statement of in-toto with the provenance of SLSA 1.0.
`spiderfs-VERSION.sha256` is for sha256sum(1); its signature attests all of them.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import platform
import sys
import tarfile
import uuid
import zipfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGES = ("spiderfs", "trainer_hook")
# Extras of whoever works on spiderfs: no user installs them.
INTERNAL_EXTRAS = {"demo", "dev"}


class Unfit(Exception):
    """Why a file must not be released, in one line."""


def require(holds: bool, why: str) -> None:
    if not holds:
        raise Unfit(why)


def checked_wheel(wheel: Path, version: str) -> tuple[Metadata, set[str]]:
    """Its metadata and its modules."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = checked_metadata(archive.read(f"{info}/METADATA"), wheel, version)
        for name, checksum, _ in csv.reader(io.StringIO(archive.read(f"{info}/RECORD").decode())):
            if checksum:
                digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
                require(checksum == f"sha256={digest}", f"{wheel}: {name} is not what RECORD says: build it again")
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    tops = {name.partition("/")[0] for name in names}
    require(tops == {*PACKAGES, info}, f"{wheel} has {sorted(tops)}: only {', '.join(PACKAGES)} belong there")
    for needed in (*(f"{package}/py.typed" for package in PACKAGES), f"{info}/licenses/LICENSE"):
        require(needed in names, f"{wheel} lacks {needed}")
    require("spiderfs = spiderfs.__main__:main" in entry_points, f"{wheel} has no command spiderfs")
    return metadata, {name for name in names if name.endswith(".py")}


def checked_metadata(text: bytes, file: Path, version: str) -> Metadata:
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as exc:
        raise Unfit(f"{file}: {'; '.join(map(str, exc.exceptions))}") from exc
    require(
        str(metadata.version) == version, f"{file} has the version {metadata.version}: release that, or build again"
    )
    shown = (metadata.description_content_type or "").startswith("text/markdown") and metadata.description
    require(bool(shown), f"{file} has no description in Markdown: see readme in pyproject.toml")
    require(bool(metadata.summary and metadata.license_expression), f"{file} has no summary or no licence")
    return metadata


def check_sdist(sdist: Path, version: str, modules: set[str]) -> None:
    with tarfile.open(sdist) as archive:
        root = f"spiderfs-{version}/"
        names = {name.removeprefix(root) for name in archive.getnames()}
        metadata = archive.extractfile(f"{root}PKG-INFO")
        assert metadata is not None
        checked_metadata(metadata.read(), sdist, version)
    missing = sorted({*modules, "pyproject.toml", "README.md", "LICENSE"} - names)
    require(not missing, f"{sdist} lacks {', '.join(missing[:3])}")


def needed_by(requirements: Iterable[str], extra: str = "") -> dict[str, set[str]]:
    """The packages that meet these requirements here, with the extras of each that are asked for."""
    found: dict[str, set[str]] = {}
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            found.setdefault(canonicalize_name(requirement.name), set()).update(requirement.extras)
    return found


def closure(direct: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Every package that these need, themselves included, with the packages that each of them needs."""
    edges: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    left = [(name, extra) for name, extras in direct.items() for extra in ("", *extras)]
    while left:
        name, extra = left.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            inner = needed_by(importlib.metadata.requires(name) or (), extra)
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise Unfit(f"{name} is not installed here: run scripts/setup") from None
        edges.setdefault(name, set()).update(inner)
        left += [(needed, more) for needed, extras in inner.items() for more in ("", *extras)]
    return edges


def component(name: str, scope: str) -> dict[str, Any]:
    metadata = importlib.metadata.metadata(name)
    expression, text = ((metadata.get_all(key) or [""])[0] for key in ("License-Expression", "License"))
    found = [value for value in metadata.get_all("Classifier") or () if value.startswith("License :: ")]
    licences: list[dict[str, Any]] = []
    if expression:
        licences = [{"expression": expression}]
    elif found or text:
        # Some write the whole text there; its first line is its title.
        titles = [value.rpartition(" :: ")[2] for value in found] or [text.strip().splitlines()[0]]
        licences = [{"license": {"name": title}} for title in titles]
    made: dict[str, Any] = {"type": "library", "bom-ref": reference(name), "name": name}
    made |= {"version": importlib.metadata.version(name), "scope": scope, "purl": reference(name)}
    return made | ({"licenses": licences} if licences else {})


def reference(name: str) -> str:
    # A local version has a plus sign, which a purl encodes.
    return f"pkg:pypi/{name}@{importlib.metadata.version(name).replace('+', '%2B')}"


def bill_of_materials(metadata: Metadata, wheel: Path, now: datetime) -> dict[str, Any]:
    """The SBOM of a wheel as CycloneDX 1.6 has it."""
    asked = [str(requirement) for requirement in metadata.requires_dist or ()]
    base, direct = needed_by(asked), needed_by(asked)
    for extra in set(metadata.provides_extra or ()) - INTERNAL_EXTRAS:
        for name, extras in needed_by(asked, extra).items():
            # One extra is all the others.
            if name != metadata.name:
                direct.setdefault(name, set()).update(extras)
    required, edges = closure(base), closure(direct)
    digest = sha256_of(wheel)
    own = f"pkg:pypi/{metadata.name}@{metadata.version}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": now.isoformat(timespec="seconds"),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": metadata.name,
                "version": str(metadata.version),
                "purl": own,
                "licenses": [{"expression": metadata.license_expression}],
                "hashes": [{"alg": "SHA-256", "content": digest}],
            },
        },
        "components": [component(name, "required" if name in required else "optional") for name in sorted(edges)],
        "dependencies": [
            {"ref": own, "dependsOn": sorted(map(reference, direct))},
            *({"ref": reference(name), "dependsOn": sorted(map(reference, edges[name]))} for name in sorted(edges)),
        ],
    }


def provenance(files: Iterable[Path], version: str, commit: str, now: datetime) -> dict[str, Any]:
    """The statement that these files are of this commit, as in-toto 1 and SLSA 1.0 have it."""
    builder = "urn:spiderfs:scripts/release"
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": file.name, "digest": {"sha256": sha256_of(file)}} for file in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": builder,
                "externalParameters": {"version": version},
                "internalParameters": {
                    "python": platform.python_version(),
                    "setuptools": importlib.metadata.version("setuptools"),
                },
                "resolvedDependencies": [{"name": "spiderfs", "digest": {"gitCommit": commit}}],
            },
            "runDetails": {"builder": {"id": builder}, "metadata": {"finishedOn": f"{now:%Y-%m-%dT%H:%M:%SZ}"}},
        },
    }


def sha256_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def run() -> int:
    parser = argparse.ArgumentParser(prog="scripts/distribution.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("version")
    parser.add_argument("commit")
    given = parser.parse_args()
    wheel = given.directory / f"spiderfs-{given.version}-py3-none-any.whl"
    sdist = given.directory / f"spiderfs-{given.version}.tar.gz"
    try:
        for file in (wheel, sdist):
            require(file.exists(), f"{file} is missing: build it")
        metadata, modules = checked_wheel(wheel, given.version)
        check_sdist(sdist, given.version, modules)
        now = datetime.now(tz=UTC)
        materials = bill_of_materials(metadata, wheel, now)
    except Unfit as exc:
        print(f"distribution: {exc}", file=sys.stderr)
        return 1
    sbom = given.directory / f"spiderfs-{given.version}.cdx.json"
    sbom.write_text(json.dumps(materials, indent=2) + "\n")
    statement = given.directory / f"spiderfs-{given.version}.intoto.json"
    files = (wheel, sdist, sbom)
    statement.write_text(json.dumps(provenance(files, given.version, given.commit, now), indent=2) + "\n")
    sums = "".join(f"{sha256_of(file)}  {file.name}\n" for file in (*files, statement))
    (given.directory / f"spiderfs-{given.version}.sha256").write_text(sums)
    print(f"{len(modules)} modules in {wheel.name}, {len(materials['components'])} packages in {sbom.name}")
    return 0


if __name__ == "__main__":
    sys.exit(run())
