"""The trainer's side of spiderfs: two lines in a training script.

hook = trainer_hook.attach("/mnt/data", model, loader)
hook.epoch_end(accuracy)  # after each epoch

Or one, if the daemon is to know what will be read, and nothing of what is learned:

trainer_hook.plan("/mnt/data", loader)
"""

from trainer_hook.callbacks import hugging_face_callback, lightning_callback
from trainer_hook.client import Client, Declaration
from trainer_hook.echo import EchoSampler
from trainer_hook.hook import Hook, attach
from trainer_hook.impact import ImpactSampler
from trainer_hook.planning import Planning, plan
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
