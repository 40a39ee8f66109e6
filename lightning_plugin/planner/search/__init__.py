"""From costs to the plan that is predicted to be the fastest within a budget."""
