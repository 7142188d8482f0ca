"""What ``make release`` does; see ``tests.release.__main__``."""
