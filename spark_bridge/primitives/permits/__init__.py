# SPDX-License-Identifier: Apache-2.0

"""A rate and a number of concurrent users that all tasks keep to together."""
