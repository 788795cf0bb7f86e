"""Makes `import mounting` work in every test, and checks that a test can mount at all."""

from __future__ import annotations
