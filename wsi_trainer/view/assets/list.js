"use strict";
// The list of slides: filtered, sorted, the worst mistakes first.

wsi.MOST_ROWS = 400; // shown at a time; the filter finds the others

wsi.List = class {
  constructor(contents, chosen) {
    Object.assign(this, { contents, chosen, current: null, shown: [] });
    const values = (key) => [...new Set(contents.slides.map((slide) => slide[key]).filter(Boolean))].sort();
    this.element = document.getElementById("slides");
    this.inputs = Object.fromEntries(["filter", "split", "label", "sort", "only-wrong"].map((id) => [id, document.getElementById(id)]));
    this.fill("split", [["", "all splits"], ...values("split").map((one) => [one, one])]);
    this.fill("label", [["", "all labels"], ...values("label").slice(0, 50).map((one) => [one, one])]);
    const judged = contents.runs.length > 0;
    const two = contents.runs.length > 1;
    this.fill("sort", [
      ...(judged ? [["worst", "worst first"], ["best", "best first"]] : []),
      ...(two ? [["better", `${contents.runs[1]} does better`], ["differ", "runs differ most"]] : []),
      ["name", "by name"], ["label", "by label"],
    ]);
    document.getElementById("only-wrong-row").hidden = !judged;
    document.getElementById("title").textContent = contents.runs.length ? contents.runs.join(" and ") : contents.title;
    for (const input of Object.values(this.inputs)) input.addEventListener("input", () => this.show());
    this.show();
  }

  fill(id, options) {
    this.inputs[id].replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    this.inputs[id].hidden = options.length < 2;
  }

  show() {
    const { filter, split, label, sort } = this.inputs;
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (slide) => {
      const text = [slide.name, slide.patient, slide.site, slide.label, ...slide.opinions.map((one) => one && one.predicted)].join(" ").toLowerCase();
      return words.every((word) => text.includes(word)) && (!split.value || slide.split === split.value)
        && (!label.value || slide.label === label.value)
        && (!this.inputs["only-wrong"].checked || slide.opinions.some((one) => one && one.wrong));
    };
    this.shown = this.contents.slides.filter(fits).sort(wsi.ORDERS[sort.value]);
    this.element.replaceChildren(...this.shown.slice(0, wsi.MOST_ROWS).map((slide) => this.row(slide)));
    const rest = this.shown.length - wsi.MOST_ROWS;
    const means = this.contents.error_means ? `\nerror: ${this.contents.error_means}` : "";
    document.getElementById("count").textContent = `${this.shown.length} of ${this.contents.slides.length} slides`
      + (rest > 0 ? `; the first ${wsi.MOST_ROWS} are listed` : "");
    document.getElementById("count").title = means.trim();
    this.mark();
  }

  row(slide) {
    const item = document.createElement("li");
    item.dataset.slide = slide.number;
    item.tabIndex = 0;
    const picture = Object.assign(new Image(), { loading: "lazy", alt: "" });
    picture.addEventListener("error", () => { picture.style.visibility = "hidden"; });
    picture.src = wsi.data.picture(`slides/${slide.number}/thumbnail.jpg`);
    const text = document.createElement("div");
    const line = (content, name) => Object.assign(text.appendChild(document.createElement("div")), { textContent: content, className: name });
    line(slide.name, "name");
    line([slide.label && `label ${slide.label}`, slide.split, slide.site].filter(Boolean).join(" · "), "quiet");
    slide.opinions.forEach((one, at) => {
      if (!one) return;
      const run = this.contents.runs.length > 1 ? `${this.contents.runs[at]}: ` : "";
      line(`${run}${one.predicted} · error ${one.error.toPrecision(3)}`, one.wrong ? "wrong" : "");
      const bar = text.appendChild(Object.assign(document.createElement("div"), { className: "bar" }));
      const fill = bar.appendChild(document.createElement("i"));
      fill.style.width = `${100 * Math.min(1, one.error)}%`;
      if (one.wrong) fill.className = "wrong";
    });
    item.append(picture, text);
    item.addEventListener("click", () => this.chosen(slide));
    item.addEventListener("keydown", (event) => { if (event.key === "Enter") this.chosen(slide); });
    return item;
  }

  choose(slide) {
    this.current = slide;
    this.mark();
  }

  mark() {
    for (const item of this.element.children) {
      const current = this.current !== null && Number(item.dataset.slide) === this.current.number;
      item.setAttribute("aria-current", current);
      if (current) item.scrollIntoView({ block: "nearest" });
    }
  }

  // The slide some places further down the list.
  step(by) {
    const at = this.shown.indexOf(this.current);
    return this.shown[at < 0 ? 0 : Math.min(this.shown.length - 1, Math.max(0, at + by))];
  }
};

wsi.ORDERS = (() => {
  const error = (slide, run, absent) => (slide.opinions[run] ? slide.opinions[run].error : absent);
  const gain = (slide) => error(slide, 0, 0) - error(slide, 1, Infinity);
  const text = (key) => (a, b) => a[key].localeCompare(b[key], undefined, { numeric: true });
  return {
    worst: (a, b) => error(b, 0, -1) - error(a, 0, -1),
    best: (a, b) => error(a, 0, Infinity) - error(b, 0, Infinity) || 0,
    better: (a, b) => gain(b) - gain(a) || 0,
    differ: (a, b) => Math.abs(gain(b)) - Math.abs(gain(a)) || 0,
    name: text("name"),
    label: text("label"),
  };
})();
