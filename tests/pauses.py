"""Shorter pauses of a daemon between deaths, for tests that kill its processes again and again."""

from __future__ import annotations

# For `mounted(first=...)`: processes that die again and again pause no longer than after their second death, and so do
# requests.
SHORT_PAUSES = """
from spiderfs.daemon import restarts, supervisor
from spiderfs.fuse import resent_requests

restarts.LONGEST_PAUSE_S = restarts.LONGEST_BUSY_PAUSE_S = restarts.FIRST_PAUSE_S
supervisor.MANAGER_PAUSE_S = restarts.FIRST_PAUSE_S
resent_requests.LONGEST_BEHIND_S = 0.1
"""
