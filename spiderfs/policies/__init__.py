"""The table of policies. To add a policy, add a file to this folder and a line to the table."""

from __future__ import annotations

from spiderfs.core.policy import Policy
from spiderfs.policies.baselines import LFU, LRU, Belady, MinIO
from spiderfs.policies.impact import ICache, Impact
from spiderfs.policies.shade import Shade
from spiderfs.policies.spider import Spider

POLICIES: dict[str, type[Policy]] = {
    "minio": MinIO,
    "lru": LRU,
    "lfu": LFU,
    "spider": Spider,
    "shade": Shade,
    "impact": Impact,
    "icache": ICache,
    "belady": Belady,
}


def mountable_policies() -> dict[str, type[Policy]]:
    """The policies that need not know the future; each is made without arguments."""
    return {name: policy for name, policy in POLICIES.items() if not policy.needs_future}
