"""Running a recorded network as a plan says."""
