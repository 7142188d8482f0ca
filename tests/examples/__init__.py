# SPDX-License-Identifier: Apache-2.0

"""Tests that run the examples as a reader would."""
