# SPDX-License-Identifier: Apache-2.0

"""Kafka as a source."""
