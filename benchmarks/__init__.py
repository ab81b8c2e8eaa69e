"""Measurements behind the claims of the documentation."""
