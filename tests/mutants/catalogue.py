# SPDX-License-Identifier: Apache-2.0

"""All mutants, in the order in which the table shows them."""

from __future__ import annotations

from tests.mutants.actors import ACTORS
from tests.mutants.async_stages import ASYNC_STAGES
from tests.mutants.attempts import ATTEMPTS
from tests.mutants.autoscaling import AUTOSCALING
from tests.mutants.bookkeeping import BOOKKEEPING
from tests.mutants.calls import CALLS
from tests.mutants.checkpoints import CHECKPOINTS
from tests.mutants.clocks import CLOCKS
from tests.mutants.downward import DOWNWARD
from tests.mutants.drivers import DRIVERS
from tests.mutants.host import HOST
from tests.mutants.hostile_parts import HOSTILE_PARTS
from tests.mutants.inputs import INPUTS
from tests.mutants.keys import KEYS
from tests.mutants.looking import LOOKING
from tests.mutants.misplaced import MISPLACED
from tests.mutants.mutant import Mutant
from tests.mutants.parts import PARTS
from tests.mutants.peers import PEERS
from tests.mutants.positions import POSITIONS
from tests.mutants.settings import SETTINGS
from tests.mutants.state_files import STATE_FILES
from tests.mutants.storage import STORAGE
from tests.mutants.tunnels import TUNNELS
from tests.mutants.upward import UPWARD
from tests.mutants.values import VALUES

MUTANTS: tuple[Mutant, ...] = (
    *DOWNWARD,
    *UPWARD,
    *CHECKPOINTS,
    *ATTEMPTS,
    *CLOCKS,
    *ACTORS,
    *STORAGE,
    *DRIVERS,
    *PARTS,
    *INPUTS,
    *CALLS,
    *KEYS,
    *HOSTILE_PARTS,
    *PEERS,
    *LOOKING,
    *HOST,
    *MISPLACED,
    *SETTINGS,
    *POSITIONS,
    *BOOKKEEPING,
    *VALUES,
    *ASYNC_STAGES,
    *STATE_FILES,
    *TUNNELS,
    *AUTOSCALING,
)
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
