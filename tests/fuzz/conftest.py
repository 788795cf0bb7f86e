"""The profile of Hypothesis with which the fuzz tests run for long; in the suite they take seconds.

.venv-dev/bin/python -m pytest tests/fuzz --hypothesis-profile=long
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("long", max_examples=10_000, suppress_health_check=[HealthCheck.too_slow])
