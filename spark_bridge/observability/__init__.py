# SPDX-License-Identifier: Apache-2.0

"""What a running sidecar shows: its status, a diagnosis in words, figures for machines, timelines and pages."""
