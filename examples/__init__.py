"""Runnable example programs; each is also a test."""
