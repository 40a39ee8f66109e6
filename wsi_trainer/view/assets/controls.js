"use strict";
// Keys, buttons and inputs.

wsi.controls = (page) => {
  const { byId, state, say, guarded } = page;

  const theme = (name) => {
    document.documentElement.dataset.theme = name;
    try { localStorage.setItem("wsi-train theme", name); } catch { /* a page opened as a file may have no storage */ }
  };
  let kept = null;
  try { kept = localStorage.getItem("wsi-train theme"); } catch { /* as above */ }
  theme(kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));

  const copyLink = guarded(async () => {
    history.replaceState(null, "", page.link());
    await navigator.clipboard.writeText(location.href);
    say("the link is copied");
  });
  const toggleTheme = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  const flip = (id) => { byId(id).checked = !byId(id).checked; byId(id).dispatchEvent(new Event("input")); };
  const fade = (by) => { byId("opacity").valueAsNumber += by; page.changed(); };
  const step = (by) => { const slide = page.list.step(by); if (slide && slide !== state.slide) page.open(slide); };

  const KEYS = {
    n: () => step(1), p: () => step(-1), m: () => flip("show-map"), o: () => flip("show-outlines"), t: () => flip("show-tissue"),
    r: () => flip("show-regions"), s: () => flip("side"), d: toggleTheme, l: copyLink, "?": () => byId("keys").showModal(),
    "/": () => byId("filter").focus(), "[": () => fade(-0.1), "]": () => fade(0.1),
    ...Object.fromEntries([1, 2, 3, 4, 5, 6, 7, 8, 9].map((key) => [key, () => page.goToTop(key - 1)])),
  };
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]):not([type=range]), select")) return;
    const act = KEYS[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const on = (event, tasks) => { for (const [id, task] of Object.entries(tasks)) byId(id).addEventListener(event, guarded(task)); };
  const recoloured = () => { page.setWindow(); page.changed(); };
  const relayered = async () => { recoloured(); page.rested(page.panes[0]); await Promise.all([page.fetchOutlines(), page.fetchTop()]); };
  on("input", {
    opacity: page.changed, threshold: page.changed, low: page.changed, high: page.changed, fade: page.changed, hold: recoloured, colours: recoloured,
    "layer-left": relayered, "layer-right": relayered, "show-map": page.changed, "show-regions": page.changed,
    "show-outlines": page.fetchOutlines, "outline-at": () => { page.changed(); return page.fetchOutlines(); }, "show-tissue": page.fetchTissue, side: page.sideBySide,
  });
  byId("show-outlines").addEventListener("input", page.changed);
  byId("show-tissue").addEventListener("input", page.changed);
  on("click", { next: () => step(1), previous: () => step(-1), theme: toggleTheme, link: copyLink, help: () => byId("keys").showModal() });
};
