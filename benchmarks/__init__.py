# SPDX-License-Identifier: Apache-2.0

"""Figures of Headgate, each compared with a raw baseline that is measured in the same run."""
