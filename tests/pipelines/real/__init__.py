# SPDX-License-Identifier: Apache-2.0

"""The soak test of pairs on a real Spark: ``soak`` controls it, ``driver`` and ``sidecar`` are its processes."""
