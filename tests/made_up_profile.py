"""What a profile may have found, for tests of what is made of it."""

from __future__ import annotations

from spiderfs.forms.profile import Cost, Form, Profile, Reads, SourceSpeed

# Originals of 100 kB that take a worker 4 ms to decode; a view of twice the bytes that takes 1 ms. The source is 20 ms
# away and brings 500 originals a second. The cache has room for half of the originals, and for what lands.
MADE_UP = Profile(
    cache_bytes=50e6 / 0.95,
    cores=4,
    source=SourceSpeed(0.020, 8, 50e6),
    samples=1000,
    workers=2,
    batch=10,
    step_s=None,
    uncached=Cost(0.004, 0.020, 0.001),
    encoded=Form(100e3, Reads(10, 1_000_000, 0.01), Cost(0.004, 0.0, 0.0)),
    augmented=Form(150e3, None, Cost(0.001, 0.0, 0.0)),
    keeping=Cost(0.0, 0.0, 0.0),
    views={"bmp256": Form(200e3, None, Cost(0.001, 0.0, 0.0))},
)
