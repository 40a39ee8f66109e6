"use strict";
// The page: what is chosen, and the parts that follow from it.

wsi.start = async () => {
  const byId = (id) => document.getElementById(id);
  const contents = wsi.data.isStatic ? window.wsiStatic : await wsi.data.json("contents.json");
  wsi.data.use(contents);
  document.title = `${contents.title} – wsi-train view`;
  const state = { slide: null, about: null, tiles: new Map(), polygons: {}, marked: null, top: [], opened: 0 };
  const say = (text) => { byId("message").textContent = text; };
  const page = {
    byId, contents, state, say,
    checked: (id) => byId(id).checked,
    address: (rest) => `slides/${state.slide.number}/${rest}`,
    redraw: () => { for (const pane of page.panes) pane.draw(); },
    guarded: (task) => (...words) => Promise.resolve(task(...words)).catch((error) => say(error.message)),
  };
  for (const part of [wsi.layers, wsi.places, wsi.slides]) part(page);
  const events = { moved: page.moved, rested: page.rested, hovered: page.hovered, clicked: page.show };
  page.panes = ["left", "right"].map((id) => new wsi.Pane(byId(id), page.draw, events, id === "left"));
  wsi.controls(page);

  byId("colours").replaceChildren(...Object.keys(contents.colours).map((name) => new Option(name, name)));
  page.list = new wsi.List(contents, (slide) => page.open(slide));
  const visit = async () => {
    const place = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    const slide = contents.slides.find((one) => one.name === place.slide) || page.list.shown[0];
    byId("side").checked = place.side === "1" || (contents.runs.length > 1 && place.side === undefined && !place.slide);
    page.panes[1].element.hidden = !page.checked("side");
    page.takeSettings(place);
    if (slide) await page.open(slide, place);
  };
  window.addEventListener("hashchange", visit);
  await visit();
};

wsi.start().catch((error) => {
  document.getElementById("message").textContent = error.message;
});
