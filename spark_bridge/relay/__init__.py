"""What Spark's listener bus says, brought to the sidecar; and the few commands that go the other way."""

from __future__ import annotations

__all__: list[str] = []
