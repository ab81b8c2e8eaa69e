"""Speculative decoding: draft a tree, verify it, accept a path, commit."""
