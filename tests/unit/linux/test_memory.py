"""The memory that a process may have: the machine's, or the least limit of its control groups."""

import os
from pathlib import Path

import pytest

from spiderfs.linux.memory import memory_bytes

MACHINE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, MACHINE_BYTES),
        ({"jobs/one": "max\n", "jobs": "4096\n"}, 4096),
        ({"jobs/one": "4096\n", "jobs": "8192\n"}, 4096),
        ({"jobs/one": f"{2 * MACHINE_BYTES}\n"}, MACHINE_BYTES),
        ({"jobs/another": "4096\n"}, MACHINE_BYTES),
    ],
)
def test_the_least_limit_of_all_groups_counts(limits: dict[str, str], expected: int, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    for name, limit in limits.items():
        (groups / name).mkdir(parents=True, exist_ok=True)
        (groups / name / "memory.max").write_text(limit)
    own_group = tmp_path / "own"
    own_group.write_text("1:name=other:/remote\n0::/jobs/one\n")
    assert memory_bytes(own_group, groups) == expected


def test_a_machine_without_control_groups_has_all_of_its_memory(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path / "missing", tmp_path) == MACHINE_BYTES
