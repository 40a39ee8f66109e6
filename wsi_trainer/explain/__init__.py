"""Whole-slide maps of what a trained model looked at."""
