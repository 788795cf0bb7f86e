"""Processes of trainings import torch once: those of the context `forkserver` are forks of one that has done it."""

from __future__ import annotations

import multiprocessing

multiprocessing.set_forkserver_preload(["torch", "trainer_hook.attaching"])
