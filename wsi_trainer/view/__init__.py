"""Looking at slides and at what models said of them, in a browser."""
