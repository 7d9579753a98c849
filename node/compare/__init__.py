"""``atoll compare``: manifests and scenarios trained side by side with simulated peers, and what can be concluded."""
