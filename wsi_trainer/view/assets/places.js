"use strict";
// Places of the views, and the value and picture of a place.

wsi.places = (page) => {
  const { byId, checked, contents, state, address, guarded, redraw } = page;

  let leader = null; // the view that the other follows

  const fetchTop = async () => {
    const layer = page.layerOf(page.panes[0]);
    state.top = layer === "" || !page.tilesOf(layer) ? [] : (await wsi.data.json(address(`layers/${layer}/top.json`), { count: 9 })).places;
    byId("top-controls").hidden = !state.top.length;
    byId("top").replaceChildren(...state.top.map((place, at) => {
      const item = document.createElement("li");
      const button = Object.assign(document.createElement("button"), { textContent: place.value.toPrecision(3) });
      button.addEventListener("click", () => goToTop(at));
      item.append(button);
      return item;
    }));
  };

  const goToTop = (at) => {
    const place = state.top[at];
    if (!place) return;
    page.panes[0].goTo({ x: place.x, y: place.y, scale: 1 });
    show(page.panes[0], place);
  };

  const className = (tiles, value) => (tiles.about.classes[value] || { name: value }).name;

  const micrometres = ({ x, y }) => state.about.mpp && [x * state.about.mpp[1], y * state.about.mpp[0]];

  // Positions are told in pixels of the slide that a store was made from, as QuPath and GeoJSON have them.
  const named = ({ x, y }) => {
    const { origin, scale } = state.about.place;
    return `x ${Math.floor(x * scale[1] + origin[1])} px, y ${Math.floor(y * scale[0] + origin[0])} px`;
  };

  const show = guarded(async (pane, point) => {
    if (!point) return;
    const layer = page.layerOf(pane);
    const lines = [named(point)];
    const size = micrometres(point);
    if (size) lines.push(`${(size[0] / 1000).toFixed(3)} mm, ${(size[1] / 1000).toFixed(3)} mm`);
    byId("here").hidden = false;
    byId("here-picture").hidden = wsi.data.isStatic;
    if (!wsi.data.isStatic) {
      const corner = { x: Math.floor(point.x) - 112, y: Math.floor(point.y) - 112, width: 224, height: 224 };
      byId("here-picture").src = wsi.data.picture(address("region.png"), corner);
    }
    state.marked = null;
    byId("here-text").textContent = lines.join("\n");
    const tiles = layer !== "" && page.tilesOf(layer);
    if (tiles && !wsi.data.isStatic) {
      const found = await wsi.data.json(address(`layers/${layer}/at.json`), { x: point.x.toFixed(2), y: point.y.toFixed(2) });
      state.marked = found.box;
      if (found.class !== undefined) lines.push(`class ${found.class}`);
      else lines.push(`value ${found.value === null ? "–" : found.value.toPrecision(5)}`, `rank ${found.rank} of ${found.of}`);
    } else if (tiles && tiles.about.classes) {
      const found = tiles.at(point.x, point.y);
      if (found) lines.push(`class ${className(tiles, found.value)}`);
    } else if (tiles) {
      const found = await tiles.ranked(point.x, point.y);
      if (found && !Number.isNaN(found.value)) {
        state.marked = found.box;
        lines.push(`value ${found.value.toPrecision(5)}`, `rank ${found.rank} of ${found.of}`);
      }
    }
    byId("here-text").textContent = lines.join("\n");
    redraw();
  });

  const hovered = (pane, point) => {
    byId("place").textContent = point && state.about ? named(point) : "";
    const tiles = point && page.layerOf(pane) !== "" && page.tilesOf(page.layerOf(pane));
    const found = tiles && tiles.at(point.x, point.y);
    if (found && tiles.about.classes) byId("value").textContent = `class ${className(tiles, found.value)}`;
    else byId("value").textContent = found ? `value ${found.exact ? "" : "≈ "}${found.value.toPrecision(4)}` : "";
  };

  const moved = (pane) => {
    if (leader || !pane.slide || !pane.image) return;
    leader = pane;
    const other = page.panes.find((one) => one !== pane);
    if (!other.element.hidden && other.slide && other.image) other.follow(pane);
    leader = null;
    tellZoom(pane.place().scale);
  };

  const tellZoom = (scale) => {
    const power = state.about && state.about.mpp ? `${+((10 / state.about.mpp[1]) * scale).toPrecision(2)}×` : `${+(100 * scale).toPrecision(2)} %`;
    byId("zoom").textContent = power;
  };

  // Settings of the overlays; a link has those that differ from the first ones.
  const SHOWN = ["show-map", "show-outlines", "show-regions", "show-tissue", "fade", "colours", "opacity", "threshold", "outline-at"];
  const firstValue = (control) => (control.type === "checkbox" ? String(Number(control.defaultChecked)) : control.tagName === "SELECT" ? control.options[0].value : control.defaultValue);
  const valueOf = (control) => (control.type === "checkbox" ? String(Number(control.checked)) : control.value);
  const settings = () => Object.fromEntries(SHOWN.map((id) => [id, valueOf(byId(id))]).filter(([id, value]) => value !== firstValue(byId(id))));
  const takeSettings = (words) => {
    for (const control of SHOWN.map(byId)) {
      const value = words[control.id] ?? firstValue(control);
      if (control.type === "checkbox") control.checked = value === "1";
      else control.value = value;
      if (control.value === "") control.value = firstValue(control);
    }
  };

  const link = () => {
    const { x, y, scale } = page.panes[0].centre;
    const words = { slide: state.slide.name, x: x.toFixed(0), y: y.toFixed(0), scale: scale.toPrecision(4), left: page.layerOf(page.panes[0]), right: page.layerOf(page.panes[1]) };
    if (checked("side")) words.side = "1";
    return `#${new URLSearchParams({ ...words, ...settings() })}`;
  };

  const rested = (pane) => {
    if (pane !== page.panes[0] || !state.slide || !pane.slide || !pane.image) return;
    tellZoom(pane.place().scale);
    history.replaceState(null, "", link());
  };

  Object.assign(page, { fetchTop, goToTop, named, show, hovered, moved, rested, link, takeSettings, tellZoom });
};
