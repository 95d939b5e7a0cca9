"""What several operations use unchanged."""
