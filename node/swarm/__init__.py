"""A whole swarm on one machine: real processes, a live table, a report."""
