"""Programs that run by themselves; each is also a test."""
