"""The trainer's side of spiderfs: two lines in a training script tell the mount what is learned and what will be read.

hook = trainer_hook.attach("/mnt/data", model, loader)
hook.epoch_end(accuracy)  # after each epoch

One line is enough if the mount needs to know only what will be read:

trainer_hook.plan("/mnt/data", loader)
"""

from trainer_hook.attaching import attach
from trainer_hook.callbacks import hugging_face_callback, lightning_callback
from trainer_hook.client import Client
from trainer_hook.echo import EchoSampler
from trainer_hook.hook import Hook
from trainer_hook.impact import ImpactSampler
from trainer_hook.planning import Planning, plan
from trainer_hook.sample_list import Declaration
from trainer_hook.sampler import SpiderSampler
from trainer_hook.shade import ShadeSampler

__all__ = [
    "Client",
    "Declaration",
    "EchoSampler",
    "Hook",
    "ImpactSampler",
    "Planning",
    "ShadeSampler",
    "SpiderSampler",
    "attach",
    "hugging_face_callback",
    "lightning_callback",
    "plan",
]
