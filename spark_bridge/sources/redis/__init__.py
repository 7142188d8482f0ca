# SPDX-License-Identifier: Apache-2.0

"""Redis Streams as a source."""
