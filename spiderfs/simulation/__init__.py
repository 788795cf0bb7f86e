"""Replays of recorded traces through the engine, as `spiderfs simulate` shows them."""
