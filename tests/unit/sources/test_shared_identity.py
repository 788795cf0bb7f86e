"""By which name nodes know one source: that of an export wherever it is mounted, else the path that was given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spiderfs.core.homes import GROUPS
from spiderfs.sources.local import LocalSource
from spiderfs.sources.members import salt_of
from spiderfs.sources.open import StoreSettings, identity_between_nodes, open_source

_SAY = """
import sys
from spiderfs.sources.local import LocalSource
for path in sys.argv[1:]:
    print(LocalSource(path).shared_identity)
"""


def test_a_directory_is_known_by_the_path_that_was_given(tmp_path: Path) -> None:
    real, link = tmp_path / "disk2" / "imagenet", tmp_path / "imagenet"
    real.mkdir(parents=True)
    link.symlink_to(real)
    source = LocalSource(str(link))
    assert source.identity == str(real)
    assert identity_between_nodes(source) == str(link), "each node may have it somewhere else"
    source.close()


def test_an_export_is_known_by_its_servers_name_wherever_it_is_mounted(tmp_path: Path) -> None:
    one, two, bound, share = (tmp_path / name for name in ("one", "two dirs", "bound", "share"))
    for point in (one, two, bound, share):
        point.mkdir()
    script = f"""
        mount -t tmpfs nas:/export '{one}' && mount -t tmpfs nas:/export/train '{two}' || exit 9
        mkdir -p '{one}/train/n01' '{two}/n01' && mount --bind '{one}/train' '{bound}' || exit 9
        mount -t tmpfs //nas/share '{share}' || exit 9
        exec '{sys.executable}' -c "$0" '{one}/train/n01' '{two}/n01' '{bound}/n01' '{one}' '{share}'
    """
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, _SAY]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*["nas:/export/train/n01"] * 3, "nas:/export", "//nas/share"]


@pytest.mark.parametrize("url", ["hf://datasets/a/b@main", "https://data.example.org/train/manifest.tsv"])
def test_what_is_named_by_a_url_is_known_by_it(url: str) -> None:
    source = open_source(url, StoreSettings())
    assert identity_between_nodes(source) == source.identity
    source.close()


def test_salts_differ_and_leave_homes_alone() -> None:
    """Nodes with different versions of spiderfs have to agree."""
    salts = [salt_of(f"nas:/export/{number}") for number in range(1000)]
    assert len(set(salts)) == 1000
    assert all(0 < salt < 1 << 63 and salt % GROUPS == 0 for salt in salts)
    assert salt_of("") == 0
    assert salt_of("nas:/export/imagenet") == 5081202158073479168
