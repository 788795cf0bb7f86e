"""The trainer's side of spiderfs: two lines in a training script publish scores and plans to the mount.

hook = trainer_hook.attach("/mnt/data", model, loader)
hook.epoch_end(accuracy)  # after each epoch

One line is enough for plans alone:

trainer_hook.plan("/mnt/data", loader)

A name is imported when it is first used: `HookClient` and `Declaration` do without torch, which takes seconds to
import.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_hook.callbacks import hugging_face_callback as hugging_face_callback
    from trainer_hook.callbacks import lightning_callback as lightning_callback
    from trainer_hook.connection.client import HookClient as HookClient
    from trainer_hook.connection.sample_list import Declaration as Declaration
    from trainer_hook.hook import Hook as Hook
    from trainer_hook.hook import HookOptions as HookOptions
    from trainer_hook.hook import attach as attach
    from trainer_hook.loader.webdataset import webdataset_samples as webdataset_samples
    from trainer_hook.planning import Planning as Planning
    from trainer_hook.planning import plan as plan
    from trainer_hook.refurbishing.loader import refurbish as refurbish
    from trainer_hook.samplers.epoch import EchoSampler as EchoSampler
    from trainer_hook.samplers.epoch import PoolSampler as PoolSampler
    from trainer_hook.samplers.impact import ImpactSampler as ImpactSampler
    from trainer_hook.samplers.infobatch import InfoBatchSampler as InfoBatchSampler
    from trainer_hook.samplers.shade import ShadeSampler as ShadeSampler
    from trainer_hook.samplers.spider import SpiderSampler as SpiderSampler


def _name_spiderfs(record: logging.LogRecord) -> bool:
    record.msg = f"spiderfs: {record.msg}"
    return True


logging.getLogger("trainer_hook").addFilter(_name_spiderfs)

_MODULES = {
    "HookClient": "connection.client",
    "Declaration": "connection.sample_list",
    "EchoSampler": "samplers.epoch",
    "Hook": "hook",
    "HookOptions": "hook",
    "ImpactSampler": "samplers.impact",
    "InfoBatchSampler": "samplers.infobatch",
    "Planning": "planning",
    "PoolSampler": "samplers.epoch",
    "ShadeSampler": "samplers.shade",
    "SpiderSampler": "samplers.spider",
    "attach": "hook",
    "hugging_face_callback": "callbacks",
    "lightning_callback": "callbacks",
    "plan": "planning",
    "refurbish": "refurbishing.loader",
    "webdataset_samples": "loader.webdataset",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        remedy = "run `pip install '.[hook]'` in a checkout of spiderfs"
        raise ModuleNotFoundError(f"trainer_hook.{name} needs torch: {remedy}", name=exc.name) from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
