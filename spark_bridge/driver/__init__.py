# SPDX-License-Identifier: Apache-2.0

"""The sidecar on the driver: its life, its operators, and the actions that they take part in."""
