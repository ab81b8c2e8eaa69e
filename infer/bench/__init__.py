"""Compares drafts over the same questions; what other programs measure with, too."""
