"""Training: the recursion over draft depth, losses, jitted steps, validation."""
