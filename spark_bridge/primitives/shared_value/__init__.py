# SPDX-License-Identifier: Apache-2.0

"""A value that the driver sets and all tasks read."""
