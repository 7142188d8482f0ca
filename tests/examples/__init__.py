"""The examples, run as their reader runs them."""
