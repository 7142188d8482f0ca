# SPDX-License-Identifier: Apache-2.0

"""Silences the product's logs during the simulation."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Suppress log lines. The story reports the events, and logging would cost more than the world."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
