"use strict";
// A view of a slide: OpenSeadragon, a canvas with the layers over it, a scale bar.

wsi.Pane = class {
  // `drawn(context, place, pane)` draws the layers; `events` are called with the pane.
  constructor(element, drawn, events, navigator) {
    this.element = element;
    this.drawn = drawn;
    const add = (tag, name) => Object.assign(element.appendChild(document.createElement(tag)), { className: name });
    this.viewer = OpenSeadragon({
      element: add("div", "view"),
      drawer: "canvas",
      showNavigationControl: false,
      showNavigator: navigator,
      navigatorPosition: "TOP_RIGHT",
      navigatorSizeRatio: 0.18,
      navigatorAutoFade: false,
      navigatorOpacity: 1,
      navigatorBackground: "var(--background)",
      animationTime: 0.4,
      visibilityRatio: 0.3,
      minZoomImageRatio: 0.6,
      maxZoomPixelRatio: 16,
      imageLoaderLimit: 6,
      maxImageCacheCount: 300,
      gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
    });
    this.canvas = Object.assign(document.createElement("canvas"), { className: "layers" });
    this.viewer.canvas.append(this.canvas); // below the navigator
    this.caption = add("div", "caption");
    this.scale = add("div", "scale");
    this.scaleText = document.createElement("span");
    this.scaleBar = document.createElement("i");
    this.scale.append(this.scaleText, this.scaleBar);
    this.failure = add("div", "failure");
    this.failure.hidden = true;
    this.slide = null;
    this.viewer.addHandler("update-viewport", () => this.draw());
    this.viewer.addHandler("viewport-change", () => events.moved(this));
    this.viewer.addHandler("animation-finish", () => events.rested(this));
    this.viewer.addHandler("canvas-key", (event) => {
      if (/^[a-z?/[\]1-9]$/i.test(event.originalEvent.key)) event.preventDefaultAction = true; // keys of the page
    });
    this.viewer.addHandler("canvas-click", (event) => { if (event.quick) events.clicked(this, this.toSlide(event.position)); });
    new OpenSeadragon.MouseTracker({
      element: this.viewer.canvas,
      moveHandler: (event) => { if (this.slide) events.hovered(this, this.toSlide(event.position)); },
      leaveHandler: () => events.hovered(this, null),
    });
    new ResizeObserver(() => this.draw()).observe(element);
  }

  // Opens a slide; resolves when it can be moved about.
  open(number, slide, tile) {
    this.slide = slide;
    this.failure.hidden = true;
    this.shrunk = 2 ** slide.finest; // a static copy may have no finer tiles
    const source = {
      width: Math.ceil(slide.width / this.shrunk), height: Math.ceil(slide.height / this.shrunk),
      tileSize: tile, tileOverlap: 0, minLevel: slide.depth - slide.coarsest, maxLevel: slide.depth - slide.finest,
      getTileUrl: (level, x, y) => wsi.data.picture(`slides/${number}/tiles/${slide.depth - level}/${y}-${x}.jpg`),
    };
    return new Promise((resolve) => {
      this.viewer.addOnceHandler("open", resolve);
      this.viewer.open(source);
    });
  }

  fail(text) {
    this.viewer.close();
    this.slide = null;
    this.failure.textContent = text;
    this.failure.hidden = false;
    this.draw();
  }

  get image() { return this.viewer.world.getItemAt(0); }

  toSlide(position) {
    const point = this.image && this.image.viewerElementToImageCoordinates(position).times(this.shrunk);
    const inside = point && point.x >= 0 && point.y >= 0 && point.x < this.slide.width && point.y < this.slide.height;
    return inside ? { x: point.x, y: point.y } : null;
  }

  // The slide on the screen: pixels of the screen for one of the slide, and the place of its corner.
  place() {
    const corner = this.image.imageToViewerElementCoordinates(new OpenSeadragon.Point(0, 0));
    const end = this.image.imageToViewerElementCoordinates(new OpenSeadragon.Point(this.slide.width / this.shrunk, 0));
    return {
      left: corner.x, top: corner.y, scale: (end.x - corner.x) / this.slide.width, slide: this.slide,
      width: this.canvas.clientWidth, height: this.canvas.clientHeight,
    };
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (this.canvas.width !== Math.round(width * ratio)) this.canvas.width = Math.round(width * ratio);
    if (this.canvas.height !== Math.round(height * ratio)) this.canvas.height = Math.round(height * ratio);
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.scale.hidden = !this.slide || !this.image;
    if (this.scale.hidden || !width) return;
    const place = this.place();
    this.viewer.drawer.setImageSmoothingEnabled(place.scale < 1.5);
    this.drawn(context, place, this);
    this.drawScale(place.scale);
  }

  // A bar of 1, 2 or 5 times a power of ten, 60 to 150 pixels wide.
  drawScale(scale) {
    const unit = this.slide.mpp ? this.slide.mpp[1] : 1;
    const most = (150 / scale) * unit;
    const power = 10 ** Math.floor(Math.log10(most));
    const length = [5, 2, 1].map((times) => times * power).find((one) => one <= most);
    const named = length >= 1000 ? `${length / 1000} mm` : `${+length.toPrecision(3)} µm`;
    this.scaleText.textContent = this.slide.mpp ? named : `${+length.toPrecision(3)} px`;
    this.scaleBar.style.width = `${(length / unit) * scale}px`;
  }

  // The centre of the view in pixels of the slide, and the zoom: what a link holds.
  get centre() {
    const centre = this.image.viewportToImageCoordinates(this.viewer.viewport.getCenter()).times(this.shrunk);
    return { x: centre.x, y: centre.y, scale: this.place().scale };
  }

  goTo({ x, y, scale }, immediately = false) {
    const viewport = this.viewer.viewport;
    // A view that became narrower is measured with the next frame only, which would change the zoom that is set here.
    if (immediately) viewport.resize(new OpenSeadragon.Point(this.canvas.clientWidth, this.canvas.clientHeight));
    if (scale) viewport.zoomTo(this.image.imageToViewportZoom(scale * this.shrunk), undefined, immediately);
    viewport.panTo(this.image.imageToViewportCoordinates(x / this.shrunk, y / this.shrunk), immediately);
  }

  follow(other) {
    this.viewer.viewport.zoomTo(other.viewer.viewport.getZoom(), undefined, true);
    this.viewer.viewport.panTo(other.viewer.viewport.getCenter(), true);
  }
};
