# SPDX-License-Identifier: Apache-2.0

"""From Spark to the coordinators: listener facts in, kills and cancellations out."""
