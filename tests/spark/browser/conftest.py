# SPDX-License-Identifier: Apache-2.0

"""The browser of these tests."""

from __future__ import annotations

from tests.browser.fixtures import browser, visit

__all__ = ["browser", "visit"]
