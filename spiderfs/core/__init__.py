"""All decisions, in pure code: engine, policies' contract, plans, hints. No clock, file, socket or await."""
