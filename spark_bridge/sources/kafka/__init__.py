# SPDX-License-Identifier: Apache-2.0

"""Kafka as a source.

Nothing is loaded here, because executors import this package too.
"""
