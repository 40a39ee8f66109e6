"use strict";
// Overlays of the slides: maps, tissue, outlines and drawn regions, and their colours.

wsi.layers = (page) => {
  const { byId, checked, contents, state, say, address, redraw } = page;

  const layerOf = (pane) => byId(`layer-${pane.element.id}`).value;

  const tilesOf = (name) => {
    const about = name === "tissue" ? state.tissue : state.about && state.about.layers[Number(name)];
    if (!about || about.broken) return null;
    if (!state.tiles.has(name)) {
      state.tiles.set(name, new wsi.LayerTiles(address(`layers/${name}`), about, contents.layer_tile, redraw));
    }
    return state.tiles.get(name);
  };

  const TISSUE = { name: "tissue", table: new Array(256).fill([0, 170, 60]).flat(), low: 0, high: 1, threshold: 0.01, opacity: 0.3, fade: false };

  const style = () => {
    const [low, high] = [Number(byId("low").value), Number(byId("high").value)];
    const [colours, threshold, fade] = [byId("colours").value, Number(byId("threshold").value), checked("fade")];
    const middle = colours === "coolwarm" ? 0.5 : undefined; // two directions fade towards the middle
    const name = [colours, low, high, threshold, fade].join(" ");
    return { name, table: contents.colours[colours], low, high, threshold, fade, middle, opacity: Number(byId("opacity").value) };
  };

  // Of classes each value has its own colour; the first is background, and clear.
  const styleOf = (about) => {
    if (!about.classes) return style();
    const table = about.classes.map((one) => one.colour).flat();
    return { name: "classes", table: [...table, ...new Array(Math.max(0, 768 - table.length)).fill(128)], low: 0, high: 255, threshold: 0.5 / 255, fade: false, opacity: Number(byId("opacity").value) };
  };

  const draw = (context, place, pane) => {
    const tissue = checked("show-tissue") && tilesOf("tissue");
    if (tissue) wsi.drawLayer(context, place, tissue, TISSUE);
    const layer = layerOf(pane);
    const map = checked("show-map") && layer !== "" && tilesOf(layer);
    if (map) wsi.drawLayer(context, place, map, styleOf(map.about));
    for (const [kind, colour] of [["drawn", "#00b070"], ["found", "#d02020"]]) {
      const regions = (state.polygons.regions || []).filter((one) => one.kind === kind);
      if (checked("show-regions")) wsi.drawPolygons(context, place, regions, colour);
    }
    const outlines = checked("show-outlines") && state.polygons[`outlines ${layer}`];
    if (outlines) wsi.drawPolygons(context, place, outlines, "#d02020");
    if (state.marked) wsi.drawBox(context, place, state.marked);
  };

  const legend = () => {
    const { table, low, high } = style();
    const context = byId("legend").getContext("2d");
    for (let at = 0; at < 256; at++) {
      context.fillStyle = `rgb(${table.slice(3 * at, 3 * at + 3).join(",")})`;
      context.fillRect(at, 0, 1, 12);
    }
    byId("legend-low").textContent = low.toPrecision(3);
    byId("legend-high").textContent = high.toPrecision(3);
  };

  // Layers that the views show.
  const chosen = () => page.panes.filter((pane) => !pane.element.hidden).map((pane) => state.about && state.about.layers[Number(layerOf(pane) || NaN)]).filter((about) => about && !about.broken);

  // What colours mean: of numbers the ends of the window, of classes their names.
  const explain = () => {
    byId("of-numbers").hidden = chosen().every((about) => about.classes) && chosen().length > 0;
    const classes = new Map(chosen().flatMap((about) => (about.classes || []).slice(1)).map((one) => [one.name, one.colour]));
    byId("classes").replaceChildren(...[...classes].map(([name, colour]) => {
      const item = document.createElement("li");
      const square = document.createElement("i");
      square.style.background = `rgb(${colour.join(",")})`;
      item.append(square, name);
      return item;
    }));
  };

  // From nothing, or from the smallest value of a colour map with two directions, to the largest.
  const setWindow = () => {
    const about = chosen().find((one) => !one.classes) || (state.about && state.about.layers.find((one) => !one.broken && !one.classes));
    if (!about || (checked("hold") && byId("high").value !== "")) return;
    const both = Math.max(Math.abs(about.low), Math.abs(about.high));
    const diverging = byId("colours").value === "coolwarm";
    byId("low").value = diverging ? -both : Math.max(0, about.low).toPrecision(4);
    byId("high").value = (diverging ? both : about.high).toPrecision(4);
  };

  const fetchOutlines = async () => {
    if (!checked("show-outlines") || !state.about) return;
    const opened = state.opened;
    for (const layer of new Set(page.panes.map(layerOf))) {
      if (layer === "") continue;
      if (opened !== state.opened) return; // another slide was opened meanwhile, which may lack the layer
      const query = { threshold: byId("outline-at").value };
      const found = await wsi.data.json(address(`layers/${layer}/outlines.json`), query);
      if (opened === state.opened) state.polygons[`outlines ${layer}`] = found.polygons;
    }
    redraw();
  };

  const fetchTissue = async () => {
    if (!checked("show-tissue") || !state.about || state.tissue) return;
    const opened = state.opened;
    say("finding the tissue …");
    try {
      const found = await wsi.data.json(address("layers/tissue/about.json"));
      if (opened === state.opened) state.tissue = found;
      say(found.broken || "");
    } finally {
      redraw();
    }
  };

  const captions = () => {
    for (const pane of page.panes) {
      const select = byId(`layer-${pane.element.id}`);
      pane.caption.textContent = select.value === "" ? "" : select.selectedOptions[0].text;
      pane.caption.hidden = select.value === "";
    }
  };

  const changed = () => {
    legend();
    explain();
    captions();
    redraw();
    page.rested(page.panes[0]);
  };

  Object.assign(page, { layerOf, tilesOf, draw, legend, setWindow, fetchOutlines, fetchTissue, changed, captions });
};
