"""Well-known peers of a run: the entry point."""
