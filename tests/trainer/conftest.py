"""Processes of trainings import torch once: those of the context `forkserver` are forks of one that has done it.

The first optimizer of a process imports torch._dynamo, and with it sympy: a second of a processor's time.
"""

from __future__ import annotations

import multiprocessing

multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "trainer_hook.hook"])
