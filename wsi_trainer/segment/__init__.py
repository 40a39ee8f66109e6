"""Segmentation of whole slides: label images and outlines, written block by block, and their scores."""
