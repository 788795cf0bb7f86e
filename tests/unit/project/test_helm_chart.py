"""The Helm chart, rendered by the few actions of Go's templates that it uses, and by helm itself where that is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from spiderfs import __version__

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "docs/examples/helm/spiderfs"
RELEASE = "spiderfs-imagenet"


def value_of(term: str, scope: dict[str, Any]) -> Any:
    if term.startswith('"'):
        return json.loads(term)
    found: Any = scope
    for key in term.removeprefix(".").split("."):
        found = found[key]  # a value that the chart has not is a KeyError, as helm lint warns
    return found


def evaluated(expression: str, scope: dict[str, Any]) -> str:
    match expression.split():
        case [term]:
            return str(value_of(term, scope))
        case [term, "|", "default", other]:
            return str(value_of(term, scope) or value_of(other, scope))
        case ["toJson", term]:
            return json.dumps(value_of(term, scope))
    raise AssertionError(f"this test does not know {{{{ {expression} }}}}")


def tokens(text: str) -> Iterator[tuple[str, str]]:
    """Text and actions, in turns; `{{-` takes the white space before it."""
    for part in re.split(r"(\s*\{\{- [^}]* ?\}\}|\{\{ [^{}]* \}\})", text):
        action = re.fullmatch(r"\s*\{\{-? (.*?) \}\}", part)
        yield ("action", action[1]) if action else ("text", part)


def rendered(scope: dict[str, Any]) -> str:
    templates = sorted((CHART / "templates").iterdir())
    return "\n---\n".join(rendered_template(template.read_text(), scope) for template in templates)


def rendered_template(template: str, scope: dict[str, Any]) -> str:
    written: list[str] = []
    # Whether each block that is open is shown.
    shown: list[bool] = []
    for kind, content in tokens(template):
        if kind == "action" and content.startswith("if "):
            *negation, term = content.split()[1:]
            shown.append(bool(value_of(term, scope)) != (negation == ["not"]))
        elif kind == "action" and content == "else":
            shown[-1] = not shown[-1]
        elif kind == "action" and content == "end":
            shown.pop()
        elif all(shown):
            written.append(content if kind == "text" else evaluated(content, scope))
    assert not shown
    return "".join(written)


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {**values, **changes}
    nested = {key for key in changes if isinstance(changes[key], dict) and isinstance(values.get(key), dict)}
    return both | {key: merged(values[key], changes[key]) for key in nested}


def objects(release: str = RELEASE, **changes: Any) -> list[Any]:
    """What is installed for a release, with changed values."""
    values = merged(yaml.safe_load((CHART / "values.yaml").read_text()), changes)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    scope = {"Values": values, "Release": {"Name": release}, "Chart": {"AppVersion": chart["appVersion"]}}
    text = rendered(scope)
    if helm := shutil.which("helm"):
        subprocess.run([helm, "lint", "--strict", CHART], check=True, capture_output=True, timeout=60)
        flags = [f"--set-json={key}={json.dumps(value)}" for key, value in changes.items()]
        done = subprocess.run(
            [helm, "template", release, CHART, *flags], check=True, capture_output=True, text=True, timeout=60
        )
        assert parsed(done.stdout) == parsed(text)
    return parsed(text)


def parsed(text: str) -> list[Any]:
    return [found for found in yaml.safe_load_all(text) if found is not None]


def manifest(name: str) -> list[Any]:
    return parsed((ROOT / "docs/examples/containers" / name).read_text())


def test_it_is_the_manifests_of_this_version() -> None:
    assert objects() == manifest("daemonset.yaml")
    assert objects("training", sidecar={"enabled": True}) == manifest("sidecar.yaml")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_a_sidecar_needs_no_privileges_and_metrics_have_a_port() -> None:
    (pod,) = objects(sidecar={"enabled": True})
    containers = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
    for context in (container["securityContext"] for container in containers):
        assert (context["allowPrivilegeEscalation"], context["capabilities"]) == (False, {"drop": ["ALL"]})
        assert "privileged" not in context
    assert not {"hostPID", "hostNetwork", "hostIPC"} & pod["spec"].keys()
    assert {next(iter(volume.keys() - {"name"})) for volume in pod["spec"]["volumes"]} == {"nfs", "emptyDir"}


def test_a_bucket_needs_no_volume_but_credentials() -> None:
    source = {"url": "s3://bucket/imagenet", "secret": "credentials"}
    for sidecar in (False, True):
        found = objects(source=source, sidecar={"enabled": sidecar})[-1]["spec"]
        pod = found if sidecar else found["template"]["spec"]
        containers = [*pod.get("initContainers", []), *pod["containers"]]
        (spiderfs,) = (each for each in containers if each["name"] == "spiderfs")
        assert spiderfs["envFrom"] == [{"secretRef": {"name": "credentials"}}]
        assert source["url"] in " ".join(spiderfs["args"])
        assert "source" not in [volume["name"] for volume in (*pod["volumes"], *spiderfs["volumeMounts"])]
    # Prometheus finds the port that metrics are served on.
    _, daemons = objects()
    template = daemons["spec"]["template"]
    *_, metrics = template["spec"]["containers"]
    (port,) = (port["containerPort"] for port in metrics["ports"])
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    assert metrics["args"][2].endswith(f":{port}")
