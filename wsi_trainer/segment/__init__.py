"""What a model with a class for each pixel finds on whole slides: label images and outlines, written tile by tile."""
