# SPDX-License-Identifier: Apache-2.0

"""Tasks that work together, such as the workers of a training, and survive the loss of any of them."""
