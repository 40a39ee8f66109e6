"""Where values live that need not be on the device: maps, cotangents, parameters."""
