"""The rates of this machine's own device."""
