"""Plans found for one size, for other sizes and other processes."""
