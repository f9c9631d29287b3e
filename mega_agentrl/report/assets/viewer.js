// Holds the selected step, prompt, path and token range, which the page's address stores:
// #step=step_000020&tree=3&path=0.1

const state = { file: null, entry: null, view: null, chosen: 0, range: [0, 1] };
let index = null, picture = null;

function marksOf(entry) {
  const kinds = { g: "good", p: "part", b: "bad", v: "void" };
  return el("span", { class: "marks" }, [...entry.marks].map((mark) => el("i", { class: `mark ${kinds[mark]}` })));
}

function listed() {
  const words = byId("find").value.trim().toLowerCase();
  const found = state.file.trees.filter((entry) => `${entry.id} ${entry.source} ${entry.asks}`.toLowerCase().includes(words));
  const spread = (entry) => Math.min(...["g", "b"].map((mark) => [...entry.marks].filter((other) => other === mark).length));
  const orders = {
    forks: (a, b) => b.forks - a.forks, mixed: (a, b) => spread(b) - spread(a),
    low: (a, b) => Number(a.reward) - Number(b.reward), high: (a, b) => Number(b.reward) - Number(a.reward),
  };
  const order = orders[byId("order").value];
  return order ? [...found].sort(order) : found;
}

function drawList() {
  const items = listed().map((entry) => el("li", {}, el("button", {
    type: "button", "data-tree": entry.index, onclick: () => chooseTree(entry),
  }, el("span", { class: "title" }, el("span", {}, cut(entry.id, 24)), marksOf(entry)), el("div", { class: "asks" }, entry.asks))));
  byId("prompts").replaceChildren(...items);
  markList();
  byId("left-out").textContent = state.file.trees.length < state.file.total ? `${state.file.trees.length} of ${state.file.total} prompts of this step are on this page` : "";
}

function markList() {
  for (const item of byId("prompts").querySelectorAll("button")) {
    item.setAttribute("aria-current", state.entry && Number(item.dataset.tree) === state.entry.index ? "true" : "false");
  }
}

function chooseFile(file, wanted) {
  state.file = file;
  byId("step").value = file.key;
  drawList();
  const branched = (best, entry) => (mixed(entry) > mixed(best) ? entry : best);
  const entry = file.trees.find((tree) => tree.index === wanted) || file.trees.reduce(branched);
  chooseTree(entry);
  const item = byId("prompts").querySelector('[aria-current="true"]');
  if (item) byId("prompts").scrollTop = item.offsetTop - byId("prompts").offsetTop - 60;
}

// Ranks trees by their forks, then by the number of different outcomes.
function mixed(entry) {
  return entry.forks * 100 + new Set(entry.marks).size;
}

function chooseTree(entry, path) {
  state.entry = entry;
  state.view = readData(`tree-${entry.block}`);
  state.range = [0, Math.max(1, state.view.size)];
  const found = state.view.paths.findIndex((candidate) => candidate.name === path);
  state.chosen = found >= 0 ? found : 0;
  markList();
  draw();
}

function choosePath(number) {
  state.chosen = number;
  draw();
}

function draw() {
  const view = state.view;
  byId("tree-title").textContent = `${plain(cut(view.id, 80))} · ${state.file.label}`;
  const asks = view.question.length ? view.question[view.question.length - 1].text : "";
  byId("tree-question").textContent = plain(asks);
  byId("tree-sum").textContent = `${view.paths.length} paths, ${view.forks} forks, ${view.extraRoots} extra roots`;
  picture = makeTree(byId("tree"), view, { chosen: state.chosen, range: state.range, most: index.most });
  makeConversation(byId("leaf"), view, state.chosen, index.most, choosePath);
  remember();
}

function remember() {
  const path = state.view.paths[state.chosen].name;
  const address = `#step=${encodeURIComponent(state.file.key)}&tree=${state.entry.index}&path=${path}`;
  // Not every browser lets a page from disk change its address.
  try { history.replaceState(null, "", address); } catch (error) { if (error.name !== "SecurityError") throw error; }
}

function zoom(factor, middle) {
  const [first, last] = state.range, size = Math.max(1, state.view.size);
  const centre = middle === undefined ? (first + last) / 2 : middle;
  const wide = Math.min(size, Math.max(8, (last - first) * factor));
  const start = Math.min(Math.max(0, centre - wide * (centre - first) / (last - first)), size - wide);
  state.range = [start, start + wide];
  draw();
}

function pan(tokens) {
  const [first, last] = state.range, size = Math.max(1, state.view.size);
  const moved = Math.min(Math.max(-first, tokens), size - last);
  state.range = [first + moved, last + moved];
  draw();
}

function listenTree() {
  const host = byId("tree");
  let held = null;
  host.addEventListener("pointerdown", (event) => { held = { x: event.clientX, moved: false }; });
  addEventListener("pointermove", (event) => {
    if (!held || !picture || !(event.buttons & 1)) return;
    const tokens = (held.x - event.clientX) / picture.drawn.scale;
    if (!held.moved && Math.abs(held.x - event.clientX) < 6) return;
    held = { x: event.clientX, moved: true };
    pan(tokens);
  });
  host.addEventListener("click", (event) => {
    const moved = held && held.moved;
    held = null;
    const found = picture.find(event);
    if (moved || !found) return;
    choosePath(found.index);
    if (found.turn) flash(found.turn.from === undefined ? null : found.token);
  });
  host.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const { drawn } = picture, box = host.getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, drawn.first + (event.clientX - box.left - LEFT) / drawn.scale);
  }, { passive: false });
  host.addEventListener("keydown", (event) => {
    const lane = event.target.closest("[data-path]");
    if (lane && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      choosePath(state.view.paths.findIndex((path) => path.name === lane.dataset.path));
    }
  });
}

function flash(token) {
  const found = byId("leaf").querySelector(`[data-token="${token}"]`);
  if (!found) return;
  found.scrollIntoView({ block: "nearest" });
  found.classList.add("flash");
}

function step(by) {
  const all = listed(), next = all[all.indexOf(state.entry) + by];
  if (next) chooseTree(next);
}

function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const file = index.files.find((file) => file.key === asked.get("step"));
  if (!file) return false;
  chooseFile(file, Number(asked.get("tree")));
  const path = state.view.paths.findIndex((path) => path.name === asked.get("path"));
  if (path >= 0) choosePath(path);
  return true;
}

function startViewer() {
  index = readData("tree-index");
  if (index === null || !index.files.length) return;
  byId("step").replaceChildren(...index.files.map((file) => el("option", { value: file.key }, file.label)));
  byId("step").addEventListener("change", (event) => chooseFile(index.files.find((file) => file.key === event.target.value)));
  byId("order").addEventListener("change", drawList);
  byId("find").addEventListener("input", drawList);
  for (const [name, act] of [["zoom-in", () => zoom(0.5)], ["zoom-out", () => zoom(2)], ["zoom-all", () => zoom(Infinity)], ["earlier", () => step(-1)], ["later", () => step(1)]]) {
    byId(name).addEventListener("click", act);
  }
  for (let number = 0; number < LEVELS; number += 1) byId("ramp").append(el("i", { class: `t${number}` }));
  byId("ramp-end").textContent = `${shown(index.most, 3)} nats`;
  listenTree();
  addEventListener("resize", () => { if (state.view) draw(); });
  addEventListener("hashchange", fromAddress);
  if (fromAddress()) byId("rollouts").scrollIntoView();
  else chooseFile(index.files.find((file) => file.key === index.start) || index.files[0]);
}

startCharts();
startViewer();
