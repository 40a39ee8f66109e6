"""From a recorded network and a budget to the fastest plan that keeps it.

`profile` asks every operator once, on fake tensors, what it keeps for backward and what it costs. `network` puts the
nodes in the order in which segments run through them and knows which maps are alive between two of them. `cost`
predicts memory and time of one segment on one tile grid. `search` chooses cuts, grids and what is kept.
"""
