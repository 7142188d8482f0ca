# SPDX-License-Identifier: Apache-2.0

"""Ready-made coordination. Each part has a folder: ``driver.py`` with what the program uses and the coordinator's half,
``task.py`` with the task's half."""
