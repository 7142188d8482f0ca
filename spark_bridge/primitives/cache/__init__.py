# SPDX-License-Identifier: Apache-2.0

"""Answers that all tasks share, each of which one of them computes."""
