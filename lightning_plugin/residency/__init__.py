"""Tiers of memory for values that need not be on the device: maps, cotangents, parameters."""
