# SPDX-License-Identifier: Apache-2.0

"""Tests of coordinators and operators with ``headgate.testing``: without Spark, in virtual time."""
