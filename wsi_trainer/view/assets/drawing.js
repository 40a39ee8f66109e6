"use strict";
// Layers over a slide: tiles of numbers that are coloured here, so that a change of colours asks for nothing.

wsi.MOST_TILES = 192; // of numbers, kept for each layer

wsi.LayerTiles = class {
  // `about`: rows, columns, stride and levels of the layer; `changed` is called when a tile has come.
  constructor(address, about, side, changed) {
    Object.assign(this, { address, about, side, changed });
    this.tiles = new Map();
  }

  key(level, row, column) { return `${level}/${row}-${column}`; }

  // A tile as {values, width, height}, or null as long as it is on its way.
  tile(level, row, column) {
    const key = this.key(level, row, column);
    const known = this.tiles.get(key);
    if (known) {
      this.tiles.delete(key); // the one used last is the last to go
      this.tiles.set(key, known);
      return known.values ? known : null;
    }
    const shape = (size, at) => Math.min(this.side, Math.ceil(size / 2 ** level) - at * this.side);
    const tile = { width: shape(this.about.columns, column), height: shape(this.about.rows, row), values: null };
    this.tiles.set(key, tile);
    while (this.tiles.size > wsi.MOST_TILES) this.tiles.delete(this.tiles.keys().next().value);
    wsi.data.numbers(`${this.address}/${key}.bin`).then(
      (values) => { tile.values = values; this.changed(); },
      () => { tile.failed = true; });
    return null;
  }

  loaded(level, row, column) {
    const tile = this.tiles.get(this.key(level, row, column));
    return tile && tile.values ? tile : null;
  }

  // The value at a place of the slide: {value, exact}; a mean of several as long as the finest tile is not there.
  at(x, y) {
    const column = Math.floor(x / this.about.stride), row = Math.floor(y / this.about.stride);
    if (row < 0 || column < 0 || row >= this.about.rows || column >= this.about.columns) return null;
    for (let level = 0; level < this.about.levels; level++) {
      const reach = this.side * 2 ** level;
      const tile = this.loaded(level, Math.floor(row / reach), Math.floor(column / reach));
      if (!tile) continue;
      const inside = [row, column].map((at) => Math.floor((at % reach) / 2 ** level));
      return { value: tile.values[inside[0] * tile.width + inside[1]], exact: level === 0 };
    }
    return null;
  }

  // Of a static copy: value, rank and box of the position at a place; a server is asked for them instead.
  async ranked(x, y) {
    const { stride, rows, columns } = this.about;
    const column = Math.floor(x / stride), row = Math.floor(y / stride);
    if (row < 0 || column < 0 || row >= rows || column >= columns) return null;
    const place = `${Math.floor(row / this.side)}-${Math.floor(column / this.side)}.bin`;
    const names = [`${this.address}/0/${place}`, `${this.address}/ranks/${place}`];
    const [values, ranks] = await Promise.all(names.map((name) => wsi.data.numbers(name)));
    const width = Math.min(this.side, columns - Math.floor(column / this.side) * this.side);
    const at = (row % this.side) * width + (column % this.side);
    return { value: values[at], rank: ranks[at], of: rows * columns, box: [column * stride, row * stride, stride, stride] };
  }
};

// The picture of a tile in a style, as opaque as the square root of its values, as in the overlays of reports; kept with the tile as long as the style is the same.
wsi.coloured = (tile, style) => {
  if (tile.style === style.name) return tile.canvas;
  const canvas = document.createElement("canvas");
  canvas.width = tile.width;
  canvas.height = tile.height;
  const context = canvas.getContext("2d");
  const picture = context.createImageData(tile.width, tile.height);
  const spread = style.high - style.low || 1e-30;
  for (let at = 0; at < tile.values.length; at++) {
    const value = tile.values[at];
    const share = Math.min(1, Math.max(0, (value - style.low) / spread));
    const shown = value === value && share >= style.threshold; // what is no number is not shown
    const colour = 3 * Math.round(share * 255);
    picture.data.set(style.table.slice(colour, colour + 3), 4 * at);
    picture.data[4 * at + 3] = shown ? 255 * (style.fade ? Math.sqrt(Math.abs(style.middle === undefined ? share : 2 * share - 1)) : 1) : 0;
  }
  context.putImageData(picture, 0, 0);
  Object.assign(tile, { canvas, style: style.name });
  return canvas;
};

// Draws what is to be seen of a layer. `place` says where the slide is on the screen: left, top, scale, width, height.
wsi.drawLayer = (context, place, tiles, style) => {
  const { about, side } = tiles;
  const wanted = Math.floor(Math.log2(1 / Math.max(about.stride * place.scale, 1e-9)));
  const level = Math.min(about.levels - 1, Math.max(0, wanted));
  const size = side * 2 ** level * about.stride * place.scale; // of a tile on the screen
  const range = (from, extent, count) => {
    const first = Math.max(0, Math.floor(-from / size));
    return [first, Math.min(Math.ceil(count / (side * 2 ** level)), Math.ceil((extent - from) / size))];
  };
  const [top, bottom] = range(place.top, place.height, about.rows);
  const [left, right] = range(place.left, place.width, about.columns);
  context.save();
  context.globalAlpha = style.opacity;
  context.imageSmoothingEnabled = false;
  context.beginPath(); // the last position may reach beyond the slide
  context.rect(place.left, place.top, place.slide.width * place.scale, place.slide.height * place.scale);
  context.clip();
  for (let row = top; row < bottom; row++) {
    for (let column = left; column < right; column++) wsi.drawTile(context, place, tiles, style, level, row, column);
  }
  context.restore();
};

// Draws one tile, or its part of a coarser one as long as it is on its way.
wsi.drawTile = (context, place, tiles, style, level, row, column) => {
  const pixels = tiles.about.stride * place.scale; // of a position on the screen
  const reach = tiles.side * 2 ** level;
  let tile = tiles.tile(level, row, column);
  const width = Math.min(reach, tiles.about.columns - column * reach);
  const height = Math.min(reach, tiles.about.rows - row * reach);
  const at = [place.left + column * reach * pixels, place.top + row * reach * pixels, width * pixels, height * pixels];
  if (tile) {
    context.drawImage(wsi.coloured(tile, style), 0, 0, width / 2 ** level, height / 2 ** level, ...at);
    return;
  }
  for (let coarser = level + 1; coarser < tiles.about.levels; coarser++) {
    const times = 2 ** (coarser - level);
    tile = tiles.loaded(coarser, Math.floor(row / times), Math.floor(column / times));
    if (!tile) continue;
    const share = tiles.side / times; // positions of the coarser tile
    const from = [(column % times) * share, (row % times) * share, width / 2 ** coarser, height / 2 ** coarser];
    context.drawImage(wsi.coloured(tile, style), ...from, ...at);
    return;
  }
};

wsi.drawPolygons = (context, place, polygons, colour) => {
  context.save();
  context.strokeStyle = colour;
  context.lineWidth = 2;
  for (const { rings } of polygons) {
    for (const ring of rings) {
      context.beginPath();
      for (const [x, y] of ring) context.lineTo(place.left + x * place.scale, place.top + y * place.scale);
      context.closePath();
      context.stroke();
    }
  }
  context.restore();
};

wsi.drawBox = (context, place, [x, y, width, height]) => {
  context.save();
  const at = [place.left + x * place.scale, place.top + y * place.scale, width * place.scale, height * place.scale];
  for (const [colour, line] of [["#000", 4], ["#fff", 2]]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(...at);
  }
  context.restore();
};
