"use strict";
// Source of pictures and numbers: the server, or the folder of a static copy, in which a page opened as a file
// may read nothing but pictures and scripts.
const wsi = {};

wsi.data = (() => {
  const still = new Map(); // of a static copy: what its scripts have said, by address
  let version = "";

  function script(address) {
    return new Promise((resolve, reject) => {
      const element = document.createElement("script");
      element.src = `${address}.js`;
      element.onload = () => {
        element.remove();
        resolve(still.get(address));
      };
      element.onerror = () => reject(new Error("this is not part of the static copy"));
      document.head.append(element);
    });
  }

  async function ask(address, query = {}) {
    const words = new URLSearchParams({ ...query, v: version });
    const answer = await fetch(`${address}?${words}`);
    if (answer.ok) return answer;
    const said = await answer.json().catch(() => ({}));
    throw new Error(said.error || `the server answered ${answer.status}`);
  }

  return {
    get isStatic() { return Boolean(window.wsiStatic); },
    put(address, value) { still.set(address, value); },
    use(contents) { version = contents.version; },
    async json(address, query = {}) {
      return this.isStatic ? script(address) : (await ask(address, query)).json();
    },
    async numbers(address) {
      if (!this.isStatic) return new Float32Array(await (await ask(address)).arrayBuffer());
      const text = atob(await script(address));
      still.delete(address);
      return new Float32Array(Uint8Array.from(text, (letter) => letter.charCodeAt(0)).buffer);
    },
    picture(address, query = {}) {
      return this.isStatic ? address : `${address}?${new URLSearchParams({ ...query, v: version })}`;
    },
  };
})();
