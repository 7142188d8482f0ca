# SPDX-License-Identifier: Apache-2.0

"""Numbers in lines of text: which of them a column of a found-out type would change.

A double has 15 to 17 digits, and a number has no leading zeros. So an account number or a postal code that looks like a
number is none, and a schema that was found out from the head of a file must not change one that comes later (H171).
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from spark_bridge.common.arrow_types import DECIMAL_DIGITS


def changes_as_double(number: Decimal) -> bool:
    """Whether a double, written with as few digits as identify it, is another number."""
    return number.is_finite() and Decimal(repr(float(number))) != number


def decimal_for(numbers: Iterable[Decimal]) -> Any:
    """The type of Arrow that holds all these numbers as they are; None if there is none."""
    import pyarrow

    scale = whole = 0
    for number in numbers:
        if not number.is_finite():
            return None
        digits, exponent = number.as_tuple()[1:]
        assert isinstance(exponent, int)
        scale = max(scale, -exponent)
        whole = max(whole, len(digits) + exponent)
    return pyarrow.decimal128(DECIMAL_DIGITS, scale) if whole + scale <= DECIMAL_DIGITS else None
