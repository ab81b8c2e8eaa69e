"""Networks: the target, the draft families, their layers, caches and shardings."""
