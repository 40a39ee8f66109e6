"""Check a plan of the user against a network: its nodes exist, and are computed before they are read."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_plugin.boxes import Grid
from lightning_plugin.chain import chains
from lightning_plugin.errors import PlanError
from lightning_plugin.graph import Bindings, Node, Recording, Value
from lightning_plugin.ops import Gather, ReduceOp, Source, Spread, TileOp
from lightning_plugin.plan import Plan, SegmentPlan
from lightning_plugin.program.pieces import uncut_axes
from lightning_plugin.program.program import Program, Target
from lightning_plugin.program.scan import scan_programs, scan_tiles


def validate(plan: Plan, recording: Recording) -> None:
    """Raise a `PlanError` that names the segment and the node at fault."""
    images = [tuple(image.source.shape) for image in recording.images]
    if plan.shape and images and tuple(plan.shape) != images[0]:
        raise PlanError(
            f"the plan is for an image of shape {tuple(plan.shape)}, this one is {images[0]}; make a new plan"
        )
    check_chains(plan, recording)
    check = PlanCheck(recording)
    for place, segment in enumerate(plan.segments):
        check.check_segment(place, segment)
    check.check_complete()


def check_chains(plan: Plan, recording: Recording) -> None:
    """Check that the plan has an entry for each chain of the network, and for no other node."""
    missing = {place: op for place, _, op in chains(recording.nodes)}
    for i, chain in enumerate(plan.chains):
        op = missing.pop(chain.node, None)
        if op is None or op.count != chain.count:
            known = f"a chain of {op.count} links" if op is not None else "no chain"
            raise PlanError(
                f"chain {i} of the plan is node {chain.node}, of {chain.count} links; in this network that is {known}: "
                "it is another network's plan"
            )
        try:
            check = PlanCheck(Recording(op.body.nodes, Bindings()))
            for place, segment in enumerate(chain.segments):
                check.check_segment(place, segment)
            check.check_complete()
        except PlanError as error:
            raise PlanError(f"in a link of chain {i} of the plan: {error}") from error
    if missing:
        raise PlanError(f"the plan says nothing of the chain that is node {min(missing)}: it is another network's plan")


class PlanCheck:
    """Check of segments in order.

    Attributes:
        maps: The maps that the segments so far have made.
        reductions: The serial numbers of the reductions that they have made.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.nodes = recording.nodes
        self.maps: set[Value] = set()
        self.reductions: set[int] = set()

    def check_segment(self, place: int, segment: SegmentPlan) -> None:
        where = f"segment {place} of the plan ({segment.path or 'nodes ' + ', '.join(map(str, segment.targets))})"
        if not segment.targets:
            raise PlanError(f"{where} makes nothing: give it targets or remove it")
        targets = [self.find_target(where, place) for place in segment.targets]
        if segment.keep:
            for t in targets:
                self.check_kept(where, t.node)
        else:
            program = self.check_tiled(where, targets, segment.forward, segment.backward)
            if segment.pieces > 1 and not uncut_axes(program):
                raise PlanError(f"{where} reads keys in {segment.pieces} pieces, and reads none that it can cut")
            if segment.halo == "share":
                self.check_scan(where, program, segment)

    def check_scan(self, where: str, program: Program, segment: SegmentPlan) -> None:
        for part in scan_programs(program):
            try:
                scan_tiles(part, segment.forward)
            except PlanError as error:
                raise PlanError(f"{where} cannot hand rows on: {error}") from error

    def find_target(self, where: str, place: int) -> Target:
        if not 0 <= place < len(self.nodes):
            raise PlanError(
                f"{where} names node {place}, the network has nodes 0 to {len(self.nodes) - 1}: "
                "it is another network's plan"
            )
        node = self.nodes[place]
        if not isinstance(node.op, (TileOp, ReduceOp)):
            raise PlanError(f"{where} names node {place} ({node.label}), which is no operator on a map{self.hint()}")
        if node.serial in self.reductions or any(v in self.maps for v in node.outputs):
            raise PlanError(f"{where} makes node {place} ({node.label}) a second time")
        return Target(node) if isinstance(node.op, ReduceOp) else Target(node, node.outputs[0])

    def hint(self) -> str:
        """A hint that the plan may be for maps that are not returned whole."""
        if not any(isinstance(n.op, Gather) for n in self.nodes):
            return ""
        return (
            ". Here a map is returned as a whole tensor; a plan of make_plan(module, shape) is for a loss that is "
            "computed tile by tile: give the module a LazyImage and compute the loss from what it returns, or give "
            "TiledModule the budget instead of the plan and use its .plan"
        )

    def check_kept(self, where: str, node: Node) -> None:
        for v in node.maps:
            if v not in self.maps and not isinstance(v.node.op, (Source, Spread)):  # type: ignore[union-attr]
                raise PlanError(f"{where} keeps {node.label}, whose input from {v.label} no earlier segment has made")
        self.check_vectors(where, node.label, node.vectors)
        self.add_result(node)

    def check_tiled(self, where: str, targets: list[Target], *grids: Grid) -> Program:
        if len({t.node.serial for t in targets}) < len(targets):
            raise PlanError(f"{where} names a node twice")
        for t in targets:
            axes = len(t.map.space.extent)
            for grid in grids:
                if len(grid.counts) != axes:
                    raise PlanError(f"{where} has the grid {grid}, but {t.node.label} has {axes} spatial axes")
        program = Program.build(targets, lambda v: v in self.maps)
        inside = {t.node.serial for t in targets}
        for node in program.nodes:
            if isinstance(node.op, ReduceOp) and node.serial not in inside:
                raise PlanError(f"{where} needs {node.label}, which no earlier segment has made")
            self.check_vectors(where, node.label, node.vectors)
        for t in targets:
            self.add_result(t.node)
        return program

    def add_result(self, node: Node) -> None:
        if isinstance(node.op, ReduceOp):
            self.reductions.add(node.serial)
        else:
            self.maps.add(node.outputs[0])

    def check_vectors(self, where: str, user: str, vectors: Sequence[Value]) -> None:
        """Check that vectors can be computed from the results so far."""
        stack, seen = list(vectors), set()
        while stack:
            v = stack.pop()
            node = v.node
            if node is None or v in self.recording.known or node.serial in seen:
                continue
            seen.add(node.serial)
            if isinstance(node.op, ReduceOp):
                if node.serial not in self.reductions:
                    raise PlanError(f"{where} uses {node.label} in {user} before any segment has made it")
            elif isinstance(node.op, Gather):
                self.check_gathered(where, node)
            else:
                stack += node.inputs

    def check_gathered(self, where: str, node: Node) -> None:
        source = node.inputs[0]
        if source not in self.maps and not isinstance(source.node.op, (Source, Spread)):  # type: ignore[union-attr]
            raise PlanError(f"{where} needs the whole result of {source.label}, which no earlier segment stores")

    def check_complete(self) -> None:
        """Check that nothing is missing after the last segment."""
        for node in self.nodes:
            if isinstance(node.op, ReduceOp) and node.serial not in self.reductions:
                raise PlanError(f"no segment of the plan makes {node.label}{self.hint()}")
            if isinstance(node.op, Gather):
                self.check_gathered("the end of the plan", node)
