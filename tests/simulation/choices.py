"""Where all chance of a world comes from."""

from __future__ import annotations

from random import Random


class Choices(Random):
    """A seeded source of chance that knows where each step of a world begins."""

    def begin_step(self) -> None:
        """What is drawn from here on belongs to the next step."""
