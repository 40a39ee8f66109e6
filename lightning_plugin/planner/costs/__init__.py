"""Memory and time of tiles and tiers, predicted without running anything."""
