// Shows the conversation of a path, including the turns shared with its parents, and its outcome.

function lineage(view, index) {
  const chain = [];
  for (let current = index; current !== null; current = view.paths[current].parent) chain.unshift(current);
  return chain;
}

// Returns the part of a turn before token `limit`, at which a path forks inside the turn.
function headOf(turn, limit) {
  if (turn.to <= limit) return turn;
  const cutOff = (values) => (Array.isArray(values) ? values.slice(0, limit - turn.from) : values);
  const names = ["pieces", "ids", "h", "lp", "v", "sampled"].filter((name) => name in turn);
  return { ...turn, to: limit, ...Object.fromEntries(names.map((name) => [name, cutOff(turn[name])])) };
}

// Returns the turns of a path in order: those of each ancestor up to the next fork on the path.
function parts(view, index) {
  const chain = lineage(view, index);
  return chain.flatMap((number, position) => {
    const path = view.paths[number], isChosen = number === index;
    const limit = isChosen ? Infinity : view.paths[chain[position + 1]].fork;
    const turns = path.turns.filter((turn) => turn.to <= limit || turn.from < limit).map((turn) => headOf(turn, limit));
    return [{ path, isChosen, limit, turns, next: isChosen ? null : view.paths[chain[position + 1]] }];
  });
}

function makeConversation(host, view, index, most, choose) {
  const conversation = el("div", { class: "conversation card" });
  conversation.append(el("h3", {}, `Conversation of path ${view.paths[index].name}`));
  for (const message of view.question) {
    conversation.append(el("div", { class: "turn prompt" }, el("div", { class: "who" }, el("b", {}, message.role)), pictures(view, message.images), el("div", { class: "words" }, message.text)));
  }
  for (const part of parts(view, index)) {
    const asked = [...part.path.decisions];
    for (const turn of part.turns) {
      while (asked.length && asked[0].at <= turn.from) conversation.append(decision(view, asked.shift(), choose));
      conversation.append(spoken(view, turn, part.isChosen, most));
    }
    while (asked.length && asked[0].at <= part.limit) conversation.append(decision(view, asked.shift(), choose));
    if (part.next) conversation.append(el("div", { class: "event yes" }, el("span", { class: "gem" }, "↳"), `path ${part.next.name} leaves ${part.path.name} here, at token ${part.next.fork}`));
  }
  const path = view.paths[index];
  conversation.append(el("div", { class: "event" }, el("span", { class: "gem" }, "■"), `ended by ${path.stop.replaceAll("_", " ")}`));
  conversation.addEventListener("pointermove", (event) => {
    const token = event.target.closest(".tok");
    if (!token) return hideTip();
    return showTip(event, ...aboutToken(token.parentNode.turn, Number(token.dataset.token)));
  });
  conversation.addEventListener("pointerleave", hideTip);
  host.replaceChildren(conversation, facts(view, path));
}

function spoken(view, turn, isChosen, most) {
  if (turn.by !== "assistant") return answered(view, turn, isChosen);
  const words = el("div", { class: "words" });
  words.turn = turn;
  if (turn.pieces) {
    turn.pieces.forEach((piece, index) => {
      const given = at(turn.sampled, index) === 0 ? " given" : "";
      words.append(el("span", { class: `tok t${level(at(turn.h, index), most)}${given}`, "data-token": turn.from + index }, piece));
    });
  } else words.append(plain(turn.text));
  const versions = [...new Set([turn.v].flat())];
  const weights = `weights ${versions.length > 1 ? "versions" : "version"} ${versions.join(", ")}`;
  return el("div", { class: `turn${isChosen ? "" : " before"}` }, el("div", { class: "who" }, el("b", {}, "agent"), `${turn.to - turn.from} tokens`, el("span", {}, weights)), words);
}

function answered(view, turn, isChosen) {
  const call = turn.call, hidden = call && !turn.text.trim();
  const who = el("div", { class: "who" }, el("b", {}, call ? call.tool : turn.by));
  if (call) {
    who.append(el("span", { class: `status ${call.status}` }, call.status.replaceAll("_", " ")), el("span", {}, seconds(call.s)));
    if (Number(call.queue) >= 0.001) who.append(el("span", {}, `waited ${seconds(call.queue)}`));
    if (call.bad) who.append(el("span", {}, "the call was written wrongly"));
    if (call.reward !== undefined) who.append(el("span", {}, `step reward ${shown(call.reward)}`));
  }
  who.append(el("span", {}, `${turn.to - turn.from} tokens`));
  const words = el("div", { class: `words${hidden ? " quiet" : ""}` }, hidden ? `not shown to the agent: ${call.answer || "(nothing)"}` : turn.text.trim());
  return el("div", { class: `turn ${turn.by}${call ? ` ${call.status}` : ""}${isChosen ? "" : " before"}` }, who, pictures(view, turn.images), words);
}

// Shows the thumbnails of a message or turn, or the label of an image that has none.
function pictures(view, numbers) {
  if (!numbers) return "";
  return el("div", { class: "pictures" }, numbers.map((number) => {
    const { label, src } = view.images[number];
    const isImage = ["png", "jpeg"].some((kind) => src && src.startsWith(`data:image/${kind};base64,`));
    return el("figure", {}, isImage ? el("img", { src, alt: label }) : "", el("figcaption", {}, label));
  }));
}

function decision(view, asked, choose) {
  const facts = [asked.dh === null ? "" : `ΔH ${signed(asked.dh)}`, asked.p === null ? "" : `P ${shown(asked.p, 3)}`, asked.tau === null ? "" : `τ ${shown(asked.tau, 3)}`];
  const read = facts.filter((fact) => fact).join(", ");
  const line = el("div", { class: `event${asked.forks ? " yes" : ""}` }, el("span", { class: "gem" }, asked.forks ? "◆" : "◇"),
    el("span", {}, `branch?${read ? ` ${read}` : ""}: ${asked.forks ? "yes" : "no"}`));
  for (const name of asked.made) {
    const index = view.paths.findIndex((path) => path.name === name);
    if (index >= 0) line.append(el("button", { type: "button", onclick: () => choose(index) }, name));
  }
  return line;
}

function facts(view, path) {
  const list = el("dl", {});
  const add = (name, value) => { if (value !== undefined && value !== null && value !== "") list.append(el("dt", {}, name), el("dd", {}, value)); };
  for (const [name, value] of Object.entries(path.parts || {})) add(name, shown(value));
  add("advantage", path.advantage === null ? null : signed(path.advantage));
  add("answer", path.answer);
  add("truth", view.truth);
  add("verdict", path.reason);
  if (path.f1 !== undefined) add("F1", shown(path.f1, 3));
  add("ended by", path.stop.replaceAll("_", " "));
  add("tokens", `${path.sampled} sampled of ${path.end}`);
  add("calls", String(path.calls));
  add("forked at", path.parent === null ? null : `token ${path.fork} of ${view.paths[path.parent].name}`);
  add("baseline entropy", path.baseline === undefined ? null : `${shown(path.baseline)} nats`);
  for (const [name, value] of Object.entries(path.toolRewards || {})) add(`reward of ${name}`, shown(value));
  add("context rendered anew at", path.restarts ? path.restarts.join(", ") : null);
  add("template drift", path.drift);
  const words = { good: "correct", part: "partly", bad: "wrong", void: path.failed ? "failed, not trained on" : "not scored" };
  const kind = verdict(path);
  return el("div", { class: "facts card" }, el("p", { class: "note" }, "reward"),
    el("p", { class: "sum" }, shown(path.reward), " ", el("span", { class: `badge ${kind}` }, words[kind])), list);
}
