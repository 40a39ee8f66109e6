"""From a recorded network and a budget to the fastest plan that keeps it.

`analysis` puts the nodes in the order in which segments run through them, and asks every operator once, on fake
tensors, what it keeps for backward and what it costs. `costs` predicts memory and time of one segment on one tile grid.
`search` chooses cuts, grids and what is kept. `rehearsal` finds what such a plan really holds, and `choose` asks again
until one keeps the budget. `recipe` serves other sizes by it; `calibrate` measures the device's rates; `cache` has both
for later processes.
"""
