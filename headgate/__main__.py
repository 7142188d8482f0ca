# SPDX-License-Identifier: Apache-2.0

"""``python -m headgate COMMAND``: inspect checkpoints, run a sidecar, check the installation."""

import sys

from spark_bridge.command import main

if __name__ == "__main__":
    sys.exit(main())
