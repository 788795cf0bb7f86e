"""How long the fuzz tests take: seconds in the suite, and as long as you like by a profile of Hypothesis.

.venv/bin/python -m pytest tests/fuzz --hypothesis-profile=long
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("long", max_examples=10_000, suppress_health_check=[HealthCheck.too_slow])
