// Draws a rollout tree: tokens from left to right, one lane per path, forks as lines downwards.

const LANE = 42, TOP = 34, LEFT = 92, RIGHT = 268, STRIP = 16, BLOCK = 22;
const LEVELS = 10;

// Maps an entropy to a colour by its square root, so that small differences near zero are visible.
function level(entropy, most) {
  const share = Math.sqrt(Math.max(0, Number(entropy)) / most);
  return Number.isNaN(share) ? 0 : Math.min(LEVELS - 1, Math.floor(share * LEVELS));
}

const at = (values, index) => (Array.isArray(values) ? values[index] : values);

// Classifies a path: correct, positive reward, no reward, or without a valid reward.
function verdict(path) {
  if (path.failed || path.reward === null) return "void";
  if (path.correct) return "good";
  return Number(path.reward) > 0 ? "part" : "bad";
}

function makeTree(host, view, options) {
  const width = Math.max(560, host.clientWidth || 900);
  const lanes = view.paths.length, height = TOP + lanes * LANE + 6;
  const stop = width - RIGHT;
  const [first, last] = options.range;
  const scale = (stop - LEFT) / Math.max(1, last - first);
  const x = (token) => LEFT + (token - first) * scale;
  const middle = (path) => TOP + path.lane * LANE + LANE / 2 + 4;
  const root = svg("svg", { class: "tree", viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "rollout tree" });
  const drawn = { width, stop, x, scale, middle, most: options.most, first, last };
  root.append(axis(drawn, height), columns(stop));
  const clip = svg("clipPath", { id: "inside" }, svg("rect", { x: LEFT - 7, y: 0, width: stop - LEFT + 14, height }));
  root.append(svg("defs", {}, clip));
  const lines = svg("g", { "clip-path": "url(#inside)" });
  view.paths.forEach((path, index) => {
    root.append(lane(view, path, index, drawn, options));
    if (path.parent !== null) lines.append(forkLine(view.paths[path.parent], path, drawn));
  });
  root.append(way(view, options.chosen, drawn), lines);
  host.replaceChildren(root);
  root.addEventListener("pointermove", (event) => {
    const found = under(view, drawn, root, event);
    if (found) showTip(event, ...describe(view, found)); else hideTip();
  });
  root.addEventListener("pointerleave", hideTip);
  return { drawn, find: (event) => under(view, drawn, root, event) };
}

// Marks the way from the prompt to the end of the chosen path by a line below the path and its ancestors.
function way(view, chosen, drawn) {
  const group = svg("g", { class: "chosen-way", "clip-path": "url(#inside)" });
  for (let path = view.paths[chosen], end = path.end; path; end = path.fork, path = view.paths[path.parent]) {
    group.append(svg("rect", { class: "way", x: drawn.x(path.fork), y: drawn.middle(path) + BLOCK / 2 + 2, width: Math.max(0, (end - path.fork) * drawn.scale), height: 2.5, rx: 1 }));
  }
  return group;
}

function axis(drawn, height) {
  const group = svg("g", { class: "axis" });
  const raw = (drawn.last - drawn.first) / 8, power = 10 ** Math.floor(Math.log10(Math.max(1, raw)));
  const step = Math.max(1, [1, 2, 5, 10].map((size) => size * power).find((size) => size >= raw) || 1);
  for (let token = Math.ceil(drawn.first / step) * step; token <= drawn.last; token += step) {
    const place = drawn.x(token);
    group.append(svg("line", { x1: place, x2: place, y1: TOP - 6, y2: height - 4 }), svg("text", { x: place, y: TOP - 17 }, String(token)));
  }
  return group;
}

function columns(stop) {
  const names = [["path", 8], ["reward", stop + 18], ["advantage", stop + 82], ["ended by", stop + 158]];
  return svg("g", { class: "head" }, names.map(([name, x]) => svg("text", { x, y: TOP - 17 }, name)));
}

function forkLine(parent, path, drawn) {
  const place = drawn.x(path.fork), from = drawn.middle(parent), to = drawn.middle(path);
  return svg("g", { class: "branch", "data-fork": path.name },
    svg("path", { class: "fork", d: `M${place} ${from}V${to}` }),
    svg("circle", { class: "knot", cx: place, cy: from, r: 4.5 }));
}

function lane(view, path, index, drawn, options) {
  const y = drawn.middle(path), kind = verdict(path);
  const group = svg("g", {
    class: `path${index === options.chosen ? " chosen" : ""}`, "data-path": path.name, tabindex: 0, role: "button",
    "aria-label": `path ${path.name}, reward ${shown(path.reward)}`,
  });
  group.append(svg("rect", { class: "lane-back", x: 0, y: y - LANE / 2, width: drawn.width, height: LANE, rx: 6 }));
  group.append(svg("text", { class: "name", x: 8, y }, cut(path.name, 10)));
  const inside = svg("g", { "clip-path": "url(#inside)" });
  inside.append(svg("line", { class: "spine", x1: drawn.x(path.fork), x2: drawn.x(path.end), y1: y, y2: y }));
  for (const turn of path.turns) {
    if (turn.to >= drawn.first && turn.from <= drawn.last) inside.append(turn.by === "assistant" ? strip(turn, y, drawn) : block(turn, y, drawn));
  }
  inside.append(svg("circle", { class: `end ${kind}`, cx: drawn.x(path.end), cy: y, r: 4.5 }));
  for (const asked of path.decisions) {
    const place = drawn.x(asked.at), top = y - STRIP / 2 - 7;
    inside.append(svg("path", { class: `asked${asked.forks ? " yes" : ""}`, d: `M${place} ${top - 5}l5 5l-5 5l-5 -5z` }));
  }
  group.append(inside, outcome(path, y, kind, drawn.stop));
  return group;
}

// Draws tokens as cells; if they are narrower than two pixels, the highest entropy per two pixels.
function strip(turn, y, drawn) {
  const group = svg("g", { class: "said" });
  const per = Math.max(1, Math.ceil(2 / drawn.scale));
  const low = Math.max(turn.from, Math.floor(drawn.first)), high = Math.min(turn.to, Math.ceil(drawn.last));
  let start = low, colour = -1;
  const flush = (end) => {
    if (colour < 0 || end <= start) return;
    const gap = per === 1 && drawn.scale > 5 ? 1 : 0;
    group.append(svg("rect", { class: `h${colour}`, x: drawn.x(start), y: y - STRIP / 2, width: Math.max(0.5, (end - start) * drawn.scale - gap), height: STRIP }));
  };
  for (let token = low; token < high; token += per) {
    let top = 0;
    for (let index = token; index < Math.min(high, token + per); index += 1) top = Math.max(top, level(at(turn.h, index - turn.from), drawn.most));
    if (drawn.scale > 5 || top !== colour) {
      flush(token);
      start = token;
      colour = top;
    }
  }
  flush(high);
  if (drawn.scale > 22 && turn.pieces) words(group, turn, y, drawn, low, high);
  return group;
}

function words(group, turn, y, drawn, low, high) {
  for (let token = low; token < high; token += 1) {
    const text = cut(visible(turn.pieces[token - turn.from]), Math.floor((drawn.scale - 3) / 6.7));
    const colour = level(at(turn.h, token - turn.from), drawn.most);
    group.append(svg("text", { class: `word t${colour}`, x: drawn.x(token) + 2, y: y + 0.5 }, text));
  }
}

function block(turn, y, drawn) {
  const call = turn.call, wide = Math.max(7, (turn.to - turn.from) * drawn.scale - 1);
  const name = call ? `${call.tool} ${seconds(call.s)}` : turn.by;
  const group = svg("g", { class: "answered", "data-status": call ? call.status : turn.by });
  group.append(svg("rect", { class: `call ${call ? call.status : "user"}`, x: drawn.x(turn.from), y: y - BLOCK / 2, width: wide, height: BLOCK, rx: 5 }));
  const room = Math.floor((wide - 10) / 6.4);
  const label = name.length <= room ? name : cut(call ? call.tool : turn.by, Math.min(room, 12));
  if (room > 0) group.append(svg("text", { class: "label", x: drawn.x(turn.from) + 6, y: y + 0.5 }, label));
  return group;
}

function outcome(path, y, kind, stop) {
  const reward = path.reward === null ? "-" : shown(path.reward, 3);
  const advantage = path.advantage === null ? "-" : signed(path.advantage);
  return svg("g", { class: "leafend" },
    svg("rect", { class: `pill ${kind}`, x: stop + 14, y: y - 10, width: 54, height: 20, rx: 10 }),
    svg("text", { class: `in ${kind}`, x: stop + 41, y: y + 0.5 }, reward),
    svg("text", { x: stop + 82, y: y + 0.5 }, advantage),
    svg("text", { x: stop + 158, y: y + 0.5 }, path.stop.replaceAll("_", " ")));
}

// Returns the object under the pointer: a decision, a token or a tool answer of the path.
function under(view, drawn, root, event) {
  const box = root.getBoundingClientRect();
  const px = (event.clientX - box.left) * drawn.width / box.width, py = event.clientY - box.top;
  const path = view.paths.find((candidate) => Math.abs(drawn.middle(candidate) - py) <= LANE / 2);
  if (!path) return null;
  const found = { path, index: view.paths.indexOf(path) };
  if (px < LEFT - 6 || px > drawn.stop + 6) return found;
  if (py < drawn.middle(path) - STRIP / 2) {
    const asked = path.decisions.find((decision) => Math.abs(drawn.x(decision.at) - px) < 8);
    if (asked) return { ...found, asked };
  }
  const token = drawn.first + (px - LEFT) / drawn.scale;
  const turn = path.turns.find((turn) => token >= turn.from && token < turn.to) ||
    path.turns.find((turn) => turn.by !== "assistant" && Math.abs(drawn.x(turn.from) + 3 - px) < 5);
  return turn ? { ...found, turn, token: Math.min(turn.to - 1, Math.floor(token)) } : found;
}

function describe(view, found) {
  if (found.asked) return aboutDecision(found.path, found.asked);
  if (found.turn && found.turn.by === "assistant") return aboutToken(found.turn, found.token);
  if (found.turn) return aboutAnswer(found.turn);
  return [el("div", { class: "head" }, `path ${found.path.name}`), rows([
    ["reward", shown(found.path.reward)], ["tokens", `${found.path.sampled} sampled, ${found.path.end} in all`],
    found.path.parent === null ? null : ["forked", `at token ${found.path.fork} of ${view.paths[found.path.parent].name}`],
  ])];
}

function aboutToken(turn, token) {
  const index = token - turn.from, given = at(turn.sampled, index) === 0;
  const text = turn.pieces ? visible(turn.pieces[index]) || "(part of a character)" : `token id ${turn.ids[index]}`;
  const logp = Number(at(turn.lp, index));
  return [el("div", { class: "head" }, text), rows([
    ["entropy", `${shown(at(turn.h, index))} nats`], ["log-prob", shown(at(turn.lp, index))],
    ["probability", shown(Math.exp(logp), 3)], ["weights", `version ${at(turn.v, index)}`], ["position", String(token)],
    given ? ["", "not sampled by the policy"] : null,
  ])];
}

function aboutAnswer(turn) {
  const call = turn.call, text = cut(turn.text.trim() || (call && call.answer) || "", 400);
  const head = call ? call.tool : turn.by;
  return [el("div", { class: "head" }, head), call ? rows([
    ["outcome", call.status.replaceAll("_", " ")], ["took", seconds(call.s)],
    Number(call.queue) ? ["waited before", seconds(call.queue)] : null,
    call.bad ? ["", "the call was written wrongly"] : null,
  ]) : "", text ? el("pre", {}, text) : ""];
}

function aboutDecision(path, asked) {
  return [el("div", { class: "head" }, asked.forks ? `branched: ${asked.made.join(", ")}` : "asked, did not branch"), rows([
    ["at token", `${asked.at} of ${path.name}`], ["entropy of the probe", asked.h === null ? "-" : `${shown(asked.h)} over ${asked.n} tokens`],
    ["baseline", shown(asked.baseline)], asked.dh === null ? null : ["ΔH", signed(asked.dh)],
    asked.p === null ? null : ["P", shown(asked.p, 3)], asked.tau === null ? null : ["τ", shown(asked.tau, 3)],
    ["slots left", String(asked.slots)],
  ])];
}
