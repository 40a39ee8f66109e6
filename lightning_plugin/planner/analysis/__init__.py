"""What a recording needs, as far as planning asks: operators, their profiles, and what repeats."""
