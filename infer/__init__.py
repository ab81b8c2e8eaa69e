"""Programs that use weights."""
