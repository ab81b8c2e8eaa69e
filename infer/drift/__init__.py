"""Measures drafts by depth."""
