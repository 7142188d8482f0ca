# SPDX-License-Identifier: Apache-2.0

"""What the hunts have found so far, in a committed file, so that nobody has to hunt all mutants in one sitting.

A hunt tries the place in which its mutant was caught last time first, so it usually takes seconds. ``--resume`` skips
the mutants that were caught in the present code. That is the code of the mutant and of the functions that it changes;
a hunt without ``--resume`` also shows whether the checkers still catch what they have caught before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.hunt import Finding
from tests.mutants.mutant import Mutant

RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Result:
    """The result of the latest hunt.

    ``code``: the digest of the mutant and the functions that it changes. ``hunter`` and ``where``: what caught it, and
    with which seed or in which scope. ``rule``: what it was seen as; empty if it was not caught.
    """

    code: str
    hunter: str
    where: str
    rule: str


def code_of(mutant: Mutant) -> str:
    """Return the digest of a mutant and of the functions that it changes."""
    sources = [part for edit in mutant.edits for part in (edit.where, *edit.sources())]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]


def read() -> dict[str, Result]:
    """Return the latest result of each mutant that was hunted, by name."""
    return {name: Result(**fields) for name, fields in json.loads(RESULTS.read_text(encoding="utf-8")).items()}


def is_done(mutant: Mutant, result: Result | None) -> bool:
    """Whether a mutant was caught in the present code, or was not seen there and is argued for."""
    return result is not None and result.code == code_of(mutant) and bool(result.rule or mutant.argued)


def record(mutant: Mutant, finding: Finding, order: Iterable[Mutant]) -> None:
    """Put a finding into the file, whose lines are in the order of the catalogue."""
    results = read()
    rule = finding.rule if finding.seen else ""
    results[mutant.name] = Result(code_of(mutant), finding.hunter, finding.where, rule)
    names = [each.name for each in order if each.name in results]
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(results[name]))}" for name in names]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
