"""Which small changes of the engine its tests notice."""
