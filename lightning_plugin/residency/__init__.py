"""Where values live that need not be on the device: maps, cotangents, parameters; see [Note: residency] in `states`."""
