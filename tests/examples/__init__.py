"""Tests that run the examples as a reader would."""
