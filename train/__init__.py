"""Programs that make weights."""
