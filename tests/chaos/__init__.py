"""Chaos with real processes: ``python -m tests.chaos --help``."""
