"use strict";
// The page: what is chosen, and what follows from it.

wsi.start = async () => {
  const byId = (id) => document.getElementById(id);
  const checked = (id) => byId(id).checked;
  const contents = wsi.data.isStatic ? window.wsiStatic : await wsi.data.json("contents.json");
  wsi.data.use(contents);
  document.title = `${contents.title} – wsi-train view`;

  const state = { slide: null, about: null, tiles: new Map(), polygons: {}, marked: null, top: [], opened: 0 };
  let leader = null; // the view that the other follows

  const say = (text) => { byId("message").textContent = text; };
  const address = (rest) => `slides/${state.slide.number}/${rest}`;
  const redraw = () => { for (const pane of panes) pane.draw(); };

  // ---- layers

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

  const draw = (context, place, pane) => {
    const tissue = checked("show-tissue") && tilesOf("tissue");
    if (tissue) wsi.drawLayer(context, place, tissue, TISSUE);
    const layer = layerOf(pane);
    const map = checked("show-map") && layer !== "" && tilesOf(layer);
    if (map) wsi.drawLayer(context, place, map, style());
    if (checked("show-regions") && state.polygons.regions) wsi.drawPolygons(context, place, state.polygons.regions, "#00b070");
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

  // From nothing, or from the smallest value of a colour map with two directions, to the largest.
  const setWindow = () => {
    const about = state.about && state.about.layers[Number(layerOf(panes[0]) || layerOf(panes[1]) || 0)];
    if (!about || about.broken || (checked("hold") && byId("high").value !== "")) return;
    const both = Math.max(Math.abs(about.low), Math.abs(about.high));
    const diverging = byId("colours").value === "coolwarm";
    byId("low").value = diverging ? -both : Math.max(0, about.low).toPrecision(4);
    byId("high").value = (diverging ? both : about.high).toPrecision(4);
  };

  const fetchOutlines = async () => {
    if (!checked("show-outlines") || !state.about) return;
    const opened = state.opened;
    for (const layer of new Set(panes.map(layerOf))) {
      if (layer === "") continue;
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
      say("");
    } finally {
      redraw();
    }
  };

  const fetchTop = async () => {
    const layer = layerOf(panes[0]);
    state.top = layer === "" || !tilesOf(layer) ? [] : (await wsi.data.json(address(`layers/${layer}/top.json`), { count: 9 })).places;
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
    panes[0].goTo({ x: place.x, y: place.y, scale: 1 });
    show(panes[0], place);
  };

  const guarded = (task) => (...words) => Promise.resolve(task(...words)).catch((error) => say(error.message));

  // ---- places

  const micrometres = ({ x, y }) => state.about.mpp && [x * state.about.mpp[1], y * state.about.mpp[0]];

  // Positions are told in pixels of the slide that a store was made from, as QuPath and GeoJSON have them.
  const named = ({ x, y }) => {
    const { origin, scale } = state.about.place;
    return `x ${Math.floor(x * scale[1] + origin[1])} px, y ${Math.floor(y * scale[0] + origin[0])} px`;
  };

  const show = guarded(async (pane, point) => {
    if (!point) return;
    const layer = layerOf(pane);
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
    const tiles = layer !== "" && tilesOf(layer);
    if (tiles && !wsi.data.isStatic) {
      const found = await wsi.data.json(address(`layers/${layer}/at.json`), { x: point.x.toFixed(2), y: point.y.toFixed(2) });
      state.marked = found.box;
      lines.push(`value ${found.value === null ? "–" : found.value.toPrecision(5)}`, `rank ${found.rank} of ${found.of}`);
    } else if (tiles) {
      const found = tiles.at(point.x, point.y);
      if (found) lines.push(`value ${found.exact ? "" : "≈ "}${found.value.toPrecision(5)}`);
    }
    byId("here-text").textContent = lines.join("\n");
    redraw();
  });

  const hovered = (pane, point) => {
    byId("place").textContent = point && state.about ? named(point) : "";
    const tiles = point && layerOf(pane) !== "" && tilesOf(layerOf(pane));
    const found = tiles && tiles.at(point.x, point.y);
    byId("value").textContent = found ? `value ${found.exact ? "" : "≈ "}${found.value.toPrecision(4)}` : "";
  };

  const moved = (pane) => {
    if (leader || !pane.slide || !pane.image) return;
    leader = pane;
    const other = panes.find((one) => one !== pane);
    if (!other.element.hidden && other.slide && other.image) other.follow(pane);
    leader = null;
    tellZoom(pane.place().scale);
  };

  const tellZoom = (scale) => {
    const power = state.about && state.about.mpp ? `${+((10 / state.about.mpp[1]) * scale).toPrecision(2)}×` : `${+(100 * scale).toPrecision(2)} %`;
    byId("zoom").textContent = power;
  };

  const link = () => {
    const { x, y, scale } = panes[0].centre;
    const words = { slide: state.slide.name, x: x.toFixed(0), y: y.toFixed(0), scale: scale.toPrecision(4), left: layerOf(panes[0]), right: layerOf(panes[1]) };
    if (checked("side")) words.side = "1";
    return `#${new URLSearchParams(words)}`;
  };

  const rested = (pane) => {
    if (pane !== panes[0] || !state.slide || !pane.slide || !pane.image) return;
    tellZoom(pane.place().scale);
    history.replaceState(null, "", link());
  };

  const panes = ["left", "right"].map((id) => new wsi.Pane(byId(id), draw, { moved, rested, hovered, clicked: (pane, point) => show(pane, point) }, id === "left"));

  // ---- slides

  const tellAbout = () => {
    const { slide } = state;
    const said = slide.opinions.map((one, at) => one && `${contents.runs.length > 1 ? `${contents.runs[at]}: ` : "predicted "}${one.predicted}`
      + `${one.probability === null ? "" : ` (${one.probability.toFixed(2)})`}, error ${one.error.toPrecision(3)}`);
    const parts = [slide.name, slide.label && `label ${slide.label}`, ...said, slide.patient !== slide.name && slide.patient, slide.split];
    byId("about").textContent = parts.filter(Boolean).join(" · ");
    byId("about").classList.toggle("wrong", Boolean(slide.opinions[0] && slide.opinions[0].wrong));
  };

  const fillLayers = (place) => {
    const options = () => [new Option("none", ""), ...state.about.layers.map((layer, at) => new Option(layer.broken ? `${layer.title} (damaged)` : layer.title, at))];
    const known = (wanted, otherwise) => (wanted !== undefined && (wanted === "" || state.about.layers[Number(wanted)]) ? wanted : otherwise);
    for (const [id, wanted, otherwise] of [["layer-left", place.left, "0"], ["layer-right", place.right, contents.runs.length > 1 ? "1" : ""]]) {
      byId(id).replaceChildren(...options());
      byId(id).value = known(wanted, state.about.layers[Number(otherwise)] ? otherwise : "");
    }
    const broken = state.about.layers.find((layer) => layer.broken);
    say(broken ? broken.broken : state.about.notes.join("; "));
  };

  const captions = () => {
    for (const pane of panes) {
      const select = byId(`layer-${pane.element.id}`);
      pane.caption.textContent = select.value === "" ? "" : select.selectedOptions[0].text;
      pane.caption.hidden = select.value === "";
    }
  };

  const failed = (text) => {
    for (const pane of panes) pane.fail(text);
    showControls([], false);
  };

  // Only what this slide has.
  const showControls = (layers, regions) => {
    byId("map-controls").hidden = !layers.length;
    for (const id of ["show-map", "show-outlines", "outline-at"]) byId(id).parentElement.hidden = !layers.length;
    byId("outline-at").parentElement.hidden ||= wsi.data.isStatic;
    byId("show-regions").parentElement.hidden = !regions;
    byId("top-controls").hidden = true;
  };

  const open = async (slide, place = {}) => {
    const opened = ++state.opened;
    Object.assign(state, { slide, about: null, tissue: null, tiles: new Map(), polygons: {}, marked: null, top: [] });
    list.choose(slide);
    byId("here").hidden = true;
    tellAbout();
    let about;
    try {
      about = await wsi.data.json(address("about.json"));
    } catch (error) {
      if (opened === state.opened) failed(error.message);
      return;
    }
    if (opened !== state.opened) return; // another slide was chosen meanwhile
    state.about = about;
    fillLayers(place);
    setWindow();
    changed();
    showControls(about.layers, about.regions);
    if (about.regions) state.polygons.regions = (await wsi.data.json(address("regions.json")).catch((error) => { say(error.message); return { polygons: [] }; })).polygons;
    await Promise.all(panes.filter((pane) => !pane.element.hidden).map((pane) => pane.open(slide.number, about, contents.tile)));
    if (opened !== state.opened) return;
    if (place.x) panes[0].goTo({ x: Number(place.x), y: Number(place.y), scale: Number(place.scale) }, true);
    rested(panes[0]);
    guarded(fetchTissue)();
    guarded(fetchOutlines)();
    guarded(fetchTop)();
  };

  const changed = () => {
    legend();
    captions();
    redraw();
  };

  const sideBySide = async () => {
    panes[1].element.hidden = !checked("side");
    if (checked("side") && state.about && panes[1].slide !== state.about) {
      await panes[1].open(state.slide.number, state.about, contents.tile);
      panes[1].follow(panes[0]);
    }
    rested(panes[0]);
    changed();
  };

  // ---- what a person does

  const theme = (name) => {
    document.documentElement.dataset.theme = name;
    try { localStorage.setItem("wsi-train theme", name); } catch { /* a page opened as a file may have no storage */ }
  };
  let kept = null;
  try { kept = localStorage.getItem("wsi-train theme"); } catch { /* as above */ }
  theme(kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));

  const copyLink = guarded(async () => {
    history.replaceState(null, "", link());
    await navigator.clipboard.writeText(location.href);
    say("the link is copied");
  });
  const toggleTheme = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  const flip = (id) => { byId(id).checked = !byId(id).checked; byId(id).dispatchEvent(new Event("input")); };
  const fade = (by) => { byId("opacity").valueAsNumber += by; changed(); };
  const step = (by) => { const slide = list.step(by); if (slide && slide !== state.slide) open(slide); };

  const KEYS = {
    n: () => step(1), p: () => step(-1), m: () => flip("show-map"), o: () => flip("show-outlines"), t: () => flip("show-tissue"),
    r: () => flip("show-regions"), s: () => flip("side"), d: toggleTheme, l: copyLink, "?": () => byId("keys").showModal(),
    "/": () => byId("filter").focus(), "[": () => fade(-0.1), "]": () => fade(0.1),
    ...Object.fromEntries([1, 2, 3, 4, 5, 6, 7, 8, 9].map((key) => [key, () => goToTop(key - 1)])),
  };
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]):not([type=range]), select")) return;
    const act = KEYS[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const on = (event, tasks) => { for (const [id, task] of Object.entries(tasks)) byId(id).addEventListener(event, guarded(task)); };
  const recoloured = () => { setWindow(); changed(); };
  const relayered = async () => { recoloured(); rested(panes[0]); await Promise.all([fetchOutlines(), fetchTop()]); };
  on("input", {
    opacity: changed, threshold: changed, low: changed, high: changed, fade: changed, hold: recoloured, colours: recoloured,
    "layer-left": relayered, "layer-right": relayered, "show-map": changed, "show-regions": changed,
    "show-outlines": fetchOutlines, "outline-at": fetchOutlines, "show-tissue": fetchTissue, side: sideBySide,
  });
  byId("show-outlines").addEventListener("input", changed);
  byId("show-tissue").addEventListener("input", changed);
  on("click", { next: () => step(1), previous: () => step(-1), theme: toggleTheme, link: copyLink, help: () => byId("keys").showModal() });

  byId("colours").replaceChildren(...Object.keys(contents.colours).map((name) => new Option(name, name)));
  const list = new wsi.List(contents, (slide) => open(slide));
  const visit = async () => {
    const place = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    const slide = contents.slides.find((one) => one.name === place.slide) || list.shown[0];
    byId("side").checked = place.side === "1" || (contents.runs.length > 1 && place.side === undefined && !place.slide);
    panes[1].element.hidden = !checked("side");
    if (slide) await open(slide, place);
  };
  window.addEventListener("hashchange", visit);
  await visit();
};

wsi.start().catch((error) => {
  document.getElementById("message").textContent = error.message;
});
