"""One rule for each operator, one file for each family; `table` says how to add one."""

from lightning_plugin.rules import (
    adaptive,
    attention,
    axes,
    carried,
    channels,
    contract,
    instances,
    interpolate,
    loss,
    norm,
    picking,
    pointwise,
    pooling,
    random,
    rearrange,
    reduce,
    replaced,
    slices,
    transposed,
    views,
    window,
)
from lightning_plugin.rules.patterns import by_hand, lookup, patchwork, ranking, spellings
from lightning_plugin.rules.table import API, ATEN, Recorder

#: Families with a rule for the same function are asked in this order; the first that knows the arguments
#: answers.
ORDER = (
    instances,  # single images, put side by side, are several: an axis; to all others that is a plain number
    channels,  # space stays as it is: no halo and no pass of its own
    window,  # a convolution is plain far more often than transposed
    picking,  # along an axis, by known numbers
    lookup,  # a table that is looked up is a vector; what is picked out of a map comes later
    reduce,  # over all of space: one pass over the tiles makes a vector
    axes,  # over some of the axes: the others are still tiled
    adaptive,  # to more than the one position that `reduce` makes
    transposed,  # what `window` declines
    slices,  # parts of space, where `channels` found no part of the channels; its borders
    rearrange,  # space put together or turned round, likewise
    ranking,  # the best and the picked of all positions
    pooling,  # windows of space, likewise
    interpolate,  # space made larger or smaller, likewise
    carried,  # plain dimensions that windows slide over, where the families above found no space
    spellings,  # rarer spellings, put down to the operators above
)
#: These have their functions for themselves.
ALONE = (
    attention, contract, loss, norm, pointwise, random, replaced, views, by_hand, patchwork,
)  # fmt: skip

for _table in (API, ATEN):
    _table.order([family.__name__ for family in ORDER])

__all__ = ["ALONE", "API", "ATEN", "ORDER", "Recorder"]
