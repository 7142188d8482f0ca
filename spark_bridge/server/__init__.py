# SPDX-License-Identifier: Apache-2.0

"""The TCP server that tasks connect to."""
