"""The implementation of ``make release``; see ``tests.release.__main__``."""
