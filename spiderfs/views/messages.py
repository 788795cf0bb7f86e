"""The messages between a pool and its makers; originals and views themselves lie in a memory file that both map."""

from __future__ import annotations

import struct

REQUEST = struct.Struct("<Q")
"""The original's length."""
ANSWER = struct.Struct("<BQ")
"""MADE or a reason of `Unmade`, and the view's length."""
MADE = 0
