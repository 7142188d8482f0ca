# SPDX-License-Identifier: Apache-2.0

"""Counts and distributions that tasks add to, and that add up exactly on the driver."""
