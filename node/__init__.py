"""One volunteer: command line, daemon, trainer, models and data."""
