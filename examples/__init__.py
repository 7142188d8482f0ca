# SPDX-License-Identifier: Apache-2.0

"""Runnable example programs; each is also a test."""
