"""Masks to be looked at: pictures of what rules found, the page of all slides, and outlines to be edited."""
