"use strict";
// A slide is opened.

wsi.slides = (page) => {
  const { byId, checked, contents, state, say, address, guarded } = page;

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
    const second = state.about.layers.findIndex((layer) => layer.run === 1); // the first layer of the run that is compared
    for (const [id, wanted, otherwise] of [["layer-left", place.left, "0"], ["layer-right", place.right, second < 0 ? "" : String(second)]]) {
      byId(id).replaceChildren(...options());
      byId(id).value = known(wanted, otherwise !== "" && state.about.layers[Number(otherwise)] ? otherwise : "");
    }
    const broken = state.about.layers.find((layer) => layer.broken);
    say(broken ? broken.broken : state.about.notes.join("; "));
  };

  const failed = (text) => {
    for (const pane of page.panes) pane.fail(text);
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
    page.list.choose(slide);
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
    page.setWindow();
    page.changed();
    showControls(about.layers, about.regions);
    if (about.regions) state.polygons.regions = (await wsi.data.json(address("regions.json")).catch((error) => { say(error.message); return { polygons: [] }; })).polygons;
    await Promise.all(page.panes.filter((pane) => !pane.element.hidden).map((pane) => pane.open(slide.number, about, contents.tile)));
    if (opened !== state.opened) return;
    if (place.x) page.panes[0].goTo({ x: Number(place.x), y: Number(place.y), scale: Number(place.scale) }, true);
    page.rested(page.panes[0]);
    guarded(page.fetchTissue)();
    guarded(page.fetchOutlines)();
    guarded(page.fetchTop)();
  };

  const sideBySide = async () => {
    page.panes[1].element.hidden = !checked("side");
    if (checked("side") && state.about && page.panes[1].slide !== state.about) {
      await page.panes[1].open(state.slide.number, state.about, contents.tile);
      page.panes[1].follow(page.panes[0]);
    }
    page.rested(page.panes[0]);
    page.changed();
  };

  Object.assign(page, { open, sideBySide });
};
