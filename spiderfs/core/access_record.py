"""The bytes of one access as they go through a pipe: `events.ACCESS`, for those who write them without numpy."""

from __future__ import annotations

import struct

# time, inode given, inode wanted, size, block, thread, trainer, where; then padding.
ACCESS_RECORD = struct.Struct("<dQQQIIHB5x")
