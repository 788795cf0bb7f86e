"""Processes of trainings import torch once: those of the context `forkserver` are forks of one that has done it.

The first optimizer of a process imports torch._dynamo, and with it sympy: a second of a processor's time.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
from hook_daemon import HookDaemon

multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "trainer_hook.hook"])


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[HookDaemon]:
    with HookDaemon(tmp_path) as daemon:
        yield daemon
