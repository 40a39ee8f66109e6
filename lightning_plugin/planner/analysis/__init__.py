"""Analysis of a recording for planning: the order of operators, their profiles, and repeated intervals."""
