"""What the peers of a run must agree on. Knows nothing of models, data sets or devices."""
