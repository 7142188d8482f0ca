# SPDX-License-Identifier: Apache-2.0

"""Ready sources: each has a half on the driver, which finds splits, and one in the tasks, which reads them.

Nothing of the driver is loaded here or in the packages of the sources, because executors import them too.
"""
