# SPDX-License-Identifier: Apache-2.0

"""Coroutines in a task: the loop on which they run, what they ask, and the stage that calls one for each record."""
