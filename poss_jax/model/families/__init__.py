"""Draft families, one file each."""
