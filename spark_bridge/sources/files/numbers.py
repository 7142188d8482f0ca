# SPDX-License-Identifier: Apache-2.0

"""Numbers in lines of text: which of them the type of a column would change.

A double has 15 to 17 digits, and ends at 1.8e308. So an account number that looks like a number is none, and no schema
may change a number that comes later (H171).
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from spark_bridge.common.arrow_types import DECIMAL_DIGITS

_SAFE_DIGITS = {"double": 15, "float": 6, "halffloat": 3}
_SAFE_EXPONENT_DIGITS = {"double": 2, "float": 1, "halffloat": 0}


def perhaps_changed(wanted: Any) -> str:
    """A regular expression for the numbers that a floating-point type may change; most numbers do not match it."""
    digits, exponent = _SAFE_DIGITS[str(wanted)] + 1, _SAFE_EXPONENT_DIGITS[str(wanted)] + 1
    return rf"(?:[0-9]\.?){{{digits}}}|[eE][+-]?[0-9]{{{exponent}}}"


def changes(number: Decimal, wanted: Any) -> bool:
    """Whether a floating-point type, written with as many digits, would be another number."""
    import pyarrow

    if not number.is_finite():
        return False
    digits = "".join(map(str, number.as_tuple().digits)).rstrip("0")
    kept = pyarrow.scalar(float(number), wanted).as_py()
    return Decimal(f"{kept:.{max(0, len(digits) - 1)}e}") != number


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
