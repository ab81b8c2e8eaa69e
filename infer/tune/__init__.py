"""Finds the fastest draft trees."""
