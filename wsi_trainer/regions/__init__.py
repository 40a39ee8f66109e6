"""Regions of slides: outlines and label images as targets, and results as GeoJSON and OME-Zarr."""
