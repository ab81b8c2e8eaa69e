"""Compiles decoding for devices that are not there."""
