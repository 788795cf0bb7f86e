"""`spiderfs metrics` beside real mounts: what a scrape gets, by the library's own parser and by a real Prometheus."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mounting
import pytest
from mounting import eventually, mounted
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from reading import write_files
from serving import URL, served

from benchmarks.common.debian import program
from spiderfs.metrics import COUNTERS, GAUGES, HISTOGRAMS

GRAFANA = Path(__file__).parents[2] / "docs/grafana"


@contextmanager
def serving(*mountpoints: Path | str) -> Iterator[str]:
    """The URL at which the program serves."""
    command = [mounting.SPIDERFS, "metrics", "--listen", "127.0.0.1:0", *mountpoints]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def scraped(url: str) -> dict[tuple[str, str], float]:
    """Every value without further labels, by name and mount."""
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        text = answer.read().decode()
    return {
        (sample.name, sample.labels.get("mount", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.keys() <= {"mount"}
    }


def test_a_scrape_has_every_metric_of_each_mount(source: Path, tmp_path: Path) -> None:
    write_files(source, {"a": 1000, "b": 1000})
    with mounted(source, tmp_path / "one") as one, mounted(source, tmp_path / "two") as two, serving() as url:
        (one.point / "a").read_bytes()
        found = scraped(url)
        for mount, opens in ((one, 1), (two, 0)):
            assert found["spiderfs_opens_total", str(mount.point)] == opens
            assert found["spiderfs_up", str(mount.point)] == 1
            for definition in COUNTERS:
                assert (f"spiderfs_{definition.name}_total", str(mount.point)) in found
            for definition in GAUGES:
                assert (f"spiderfs_{definition.name}", str(mount.point)) in found
            for definition in HISTOGRAMS:
                assert (f"spiderfs_{definition.name}_sum", str(mount.point)) in found
        with serving(one.point) as chosen:
            assert {mount for _, mount in scraped(chosen)} == {str(one.point)}
            one.stop()
            assert scraped(chosen) == {("spiderfs_up", str(one.point)): 0}
        assert ("spiderfs_up", str(one.point)) not in scraped(url)


def test_what_is_served_without_a_mount_is_scraped_too(tmp_path: Path) -> None:
    write_files(tmp_path / "source", {"a": 1000})
    with served(tmp_path / "source", tmp_path / "daemon") as daemon, serving() as url:
        daemon.files.read_bytes("a")
        found = scraped(url)
        assert found["spiderfs_up", URL] == 1
        assert found["spiderfs_opens_total", URL] == 1
        with serving(URL) as chosen:
            again = scraped(chosen)
        assert {mount for _, mount in again} == {URL}
        assert {name for name, mount in found if mount == URL} == {name for name, _ in again}


def test_a_port_that_is_taken_or_none_is_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path / "late", URL) as url:
        assert scraped(url) == {("spiderfs_up", str(tmp_path / "late")): 0, ("spiderfs_up", URL): 0}
        taken = url.removeprefix("http://").removesuffix("/metrics")
        done = mounting.run_spiderfs("metrics", "--listen", taken)
    name = URL.removeprefix("spiderfs://")
    assert capfd.readouterr().err.splitlines() == [
        f"spiderfs: warning: no spiderfs mount is at {tmp_path}/late yet: 'spiderfs status' lists the mounts",
        f"spiderfs: warning: nothing is served as {URL} yet: 'spiderfs serve SOURCE --name {name}' serves it",
    ]
    assert (done.returncode, done.stderr) == (
        1,
        f"spiderfs: --listen {taken}: Address already in use: choose another address or port\n",
    )
    for wrong in ("9464", "localhost:", "a:99999"):
        done = mounting.run_spiderfs("metrics", "--listen", wrong)
        assert done.stderr == f"spiderfs: --listen {wrong}: write HOST:PORT, such as 127.0.0.1:9464\n"
    for impossible in ("a..b:1", f"{'a' * 70}:1"):
        done = mounting.run_spiderfs("metrics", "--listen", impossible)
        said = f"spiderfs: --listen {impossible}: no host can have this name: choose another address\n"
        assert (done.returncode, done.stderr) == (1, said)


def test_dashboard_and_alerts_ask_for_metrics_that_there_are(source: Path, tmp_path: Path) -> None:
    write_files(source, {"a": 1000})
    with mounted(source, tmp_path / "m") as mount, serving(mount.point) as url:
        text = urllib.request.urlopen(url, timeout=30).read().decode()
    served = set(re.findall(r"^(spiderfs_\w+)", text, re.MULTILINE))
    dashboard = json.loads((GRAFANA / "spiderfs.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += re.findall(r"expr: (.*(?:\n {10}.*)*)", (GRAFANA / "alerts.yml").read_text())
    assert len(asked) > 20
    for expression in asked:
        names = re.findall(r"spiderfs_\w+", expression)
        assert names, expression
        assert set(names) <= served, expression


@pytest.mark.thorough
def test_a_real_prometheus_scrapes_and_takes_the_alerts(source: Path, tmp_path: Path) -> None:
    checked = subprocess.run(
        [program("promtool", "prometheus"), "check", "rules", GRAFANA / "alerts.yml"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr + checked.stdout
    write_files(source, {"a": 1000})
    with mounted(source, tmp_path / "m") as mount, serving(mount.point) as url:
        (mount.point / "a").read_bytes()
        target = urllib.parse.urlparse(url).netloc
        config = f"""\
global: {{scrape_interval: 1s}}
rule_files: ["{GRAFANA}/alerts.yml"]
scrape_configs: [{{job_name: spiderfs, static_configs: [{{targets: ["{target}"]}}]}}]
"""
        (tmp_path / "prometheus.yml").write_text(config)
        port = 39464
        process = subprocess.Popen(
            [
                *(
                    program("prometheus", "prometheus"),
                    f"--config.file={tmp_path}/prometheus.yml",
                    f"--storage.tsdb.path={tmp_path}/tsdb",
                ),
                *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"),
            ]
        )
        try:

            def asked(query: str) -> list[Any]:
                try:
                    ask = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
                    with urllib.request.urlopen(ask, timeout=10) as answer:
                        result: list[Any] = json.load(answer)["data"]["result"]
                except OSError:
                    return []
                return result

            (row,) = eventually(lambda: asked("spiderfs_opens_total"), within_s=60)
            assert row["metric"]["mount"] == str(mount.point)
            assert row["value"][1] == "1"
            for panel in json.loads((GRAFANA / "spiderfs.json").read_text())["panels"]:
                for query in panel["targets"]:
                    expression = query["expr"].replace("$__rate_interval", "1m").replace("$mount", ".*")
                    quoted = urllib.parse.urlencode({"query": expression})
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{quoted}") as answer:
                        assert json.load(answer)["status"] == "success"
        finally:
            process.terminate()
            process.wait(30)
