"""Maps and objects in the coordinates of the slide that they were made from."""
