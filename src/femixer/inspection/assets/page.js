
/* The page: selection, drawing and keys. Text reaches the document as textContent only. */

const find = (id) => document.getElementById(id);
const page = JSON.parse(find("page").textContent);
const TOKENS = page.tokens.length;
const READ = page.layers.map((layer, index) => (layer.arrays ? index : -1)).filter((index) => index >= 0);
const QUANTITIES = { lam: "λ", gate: "gate", hidden_beta: "hidden β", kl: "KL" };
const OVERVIEW = { kl: "KL", lam: "λ", hidden_beta: "hidden β" };
const LANE = 13, MOST_PRESSED = 6, LONGEST = 9;

const state = {
  layer: READ[0], head: 0, query: 0, kind: "hidden", change: false, scope: "head", pressed: [], row: 0,
  zoom: Math.min(20, Math.max(3, Math.floor(360 / TOKENS))),
};
const readings = new Map();
function reading() {
  if (!readings.has(state.layer))
    readings.set(state.layer, new Reading(page.layers[state.layer], find(`layer-${state.layer}`).textContent));
  return readings.get(state.layer);
}
const layer = () => page.layers[state.layer];
const tilts = () => layer().parts.includes("L");
const range = (n) => Array.from({ length: n }, (_, i) => i);
const short = (text, most = LONGEST) => ([...text].length > most ? [...text].slice(0, most - 1).join("") + "…" : text);
const named = (token) => `${token} “${page.tokens[token]}”`;
const number = (x) => (x === 0 ? "0" : x >= 0.0095 ? x.toPrecision(3) : x.toExponential(0));
const stored = (channel) => reading().slot(state.head, channel) >= 0;

/* Channels of the selected head, the largest KL first: mean over tokens, or at one token. */
function ranked(query = null) {
  const kl = query === null
    ? layer().means.kl_channels[state.head]
    : range(layer().width).map((channel) => reading().at("kl", state.head, query, channel));
  return range(layer().width).sort((a, b) => kl[b] - kl[a]).map((channel) => ({ channel, kl: kl[channel] }));
}

/* What is shown over the tokens: the prior once where channels share it, and the chosen channels. */
function sources() {
  const own = layer().channels !== null, shown = state.pressed.filter(stored);
  const prior = (channel) => ({ label: own ? `prior of ${channel}` : "prior", kind: "prior", channel });
  const tilted = (channel) => ({ label: `channel ${channel}`, kind: state.kind, channel });
  if (!tilts()) return own ? shown.map(prior) : [prior(0)];
  return own ? shown.flatMap((c) => [prior(c), tilted(c)]) : [prior(0), ...shown.map(tilted)];
}
const weightsOf = (source, query) => reading().weights(source.kind, state.head, source.channel, query);

/* What is drawn of them: the weights, or for a posterior what it adds to the prior. */
function shownOf(source, query) {
  const weights = weightsOf(source, query);
  if (!state.change || source.kind === "prior") return weights;
  const prior = reading().weights("prior", state.head, source.channel, query);
  return weights.map((w, key) => w - prior[key]);
}

/* ---- colours ---- */

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const scales = {};
function readColours() {
  for (const name of ["scale", "gain", "loss"])
    scales[name] = css(`--${name}`).split(",").map((c) => [1, 3, 5].map((i) => parseInt(c.trim().slice(i, i + 2), 16)));
}
function colour(x, stops = scales.scale) {
  const at = Math.min(1, Math.max(0, x || 0)) * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(at));
  return stops[i].map((from, k) => Math.round(from + (stops[i + 1][k] - from) * (at - i)));
}
const rgb = (c) => `rgb(${c.join(",")})`;
const onTop = ([r, g, b]) => (0.3 * r + 0.59 * g + 0.11 * b > 140 ? "#14171b" : "#ffffff");
function weightColour(source, w) {
  if (!state.change || source.kind === "prior") return colour(Math.sqrt(w));
  return colour(Math.sqrt(Math.abs(w)), w < 0 ? scales.loss : scales.gain);
}

/* ---- drawing ---- */

function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.ceil(width * ratio);
  canvas.height = Math.ceil(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px ui-monospace, monospace";
  pen.textBaseline = "middle";
  pen.fillStyle = css("--ink");
  return pen;
}

/* The room that labels of tokens need beside a drawing. Those across stand upright where they are wider than a cell. */
const LABEL = 8 + 7 * Math.max(1, ...page.tokens.map((token) => Math.min(LONGEST, [...token].length)));
const every = (cell) => Math.ceil(10 / cell);
const upright = (cell) => LABEL - 6 > cell * every(cell);
const headroom = (cell) => (upright(cell) ? LABEL : 18);

/* Labels of tokens from the edge of a drawing, as many as there is room for; the selected one is always there. */
function tokenLabels(pen, cell, left, top, across) {
  const step = every(cell), near = Math.ceil(step / 2);
  for (let t = 0; t < TOKENS; t++) {
    const selected = t === state.query;
    if (!selected && (t % step || (step > 1 && Math.abs(t - state.query) < near))) continue;
    pen.save();
    pen.fillStyle = css(selected ? "--mark" : "--ink");
    const middle = (t + 0.5) * cell;
    if (across && upright(cell)) {
      pen.translate(left + middle, top - 4);
      pen.rotate(-Math.PI / 2);
    } else if (across) {
      pen.translate(left + middle, top - 9);
      pen.textAlign = "center";
    } else {
      pen.translate(left - 4, top + middle);
      pen.textAlign = "right";
    }
    pen.fillText(short(page.tokens[t]), 0, 0);
    pen.restore();
  }
}

/* Put new children into a place; the keyboard stays where it was. */
function refill(place, children) {
  const at = [...place.children].findIndex((child) => child.contains(document.activeElement));
  place.replaceChildren(...children);
  const next = at < 0 ? null : children[Math.min(at, children.length - 1)];
  if (next) next.querySelector("[tabindex], button").focus({ preventScroll: true });
}

let lanes = [];
function drawLanes() {
  const r = reading(), { head, query } = state, cell = Math.max(11, state.zoom), shown = sources();
  const heading = (label) => ({ label, heading: true, height: 20 });
  const overTokens = (name, channel) => range(TOKENS).map((t) => r.at(name, head, t, channel));
  lanes = [heading(`from ${query}`)];
  for (const source of shown) lanes.push({ ...source, numbers: shownOf(source, query), height: LANE });
  if (tilts()) {
    const all = ranked(query).filter(({ channel }) => stored(channel));
    const height = all.length <= 40 ? LANE : Math.max(4, Math.floor(520 / all.length));
    lanes.push(heading(all.length < layer().width ? `${all.length} of ${layer().width} channels` : "all channels"));
    state.row = Math.min(state.row, all.length - 1);
    all.forEach(({ channel, kl }, row) => lanes.push({
      label: `${channel}  KL ${number(kl)}`, kind: state.kind, channel, height, focus: row === state.row, press: true,
      numbers: shownOf({ kind: state.kind, channel }, query),
    }));
  }
  for (const [name, label] of Object.entries(QUANTITIES)) {
    const columns = range(layer().width).map((channel) => overTokens(name, channel));
    const most = columns.reduce((top, column) => column.reduce((a, b) => Math.max(a, b), top), 0);
    lanes.push(heading(`${label}, to ${number(most)}`));
    const mean = range(TOKENS).map((t) => columns.reduce((sum, column) => sum + column[t], 0) / columns.length);
    const add = (text, numbers) => lanes.push({ label: text, quantity: label, numbers, most, height: LANE });
    add("mean", mean);
    for (const channel of state.pressed) add(`channel ${channel}`, columns[channel]);
  }
  const top = headroom(cell), height = lanes.reduce((sum, lane) => sum + lane.height, top) + 4;
  const pen = prepare(find("lanes"), TOKENS * cell + 2, height), side = prepare(find("lane-labels"), 122, height);
  tokenLabels(pen, cell, 0, top, true);
  let y = top;
  for (const lane of lanes) {
    lane.top = y;
    if (lane.height >= 9) {
      side.font = `${lane.heading ? "bold " : ""}11px ui-monospace, monospace`;
      side.fillStyle = css(lane.press && state.pressed.includes(lane.channel) ? "--mark" : "--ink");
      side.fillText(lane.label, lane.heading ? 0 : 10, y + lane.height / 2 + (lane.heading ? 3 : 0));
    }
    if (lane.focus) {
      side.fillStyle = css("--mark");
      side.fillText("▸", 0, y + Math.max(lane.height, 4) / 2);
    }
    if (lane.numbers)
      lane.numbers.forEach((x, t) => {
        pen.fillStyle = rgb(lane.quantity ? colour(x / lane.most) : weightColour(lane, x));
        pen.fillRect(t * cell, y, cell - (cell > 6 ? 1 : 0), lane.height - (lane.height > 6 ? 1 : 0));
      });
    y += lane.height;
  }
  pen.strokeStyle = css("--mark");
  pen.strokeRect(state.query * cell + 0.5, top - 1, cell - 1, height - top);
  const view = find("lanes").parentElement, end = (state.query + 1) * cell;
  if (end > view.scrollLeft + view.clientWidth || end - cell < view.scrollLeft) view.scrollLeft = end + 2 * cell - view.clientWidth;
  find("lanes").setAttribute("aria-label", `weights and gates of layer ${state.layer}, head ${head}, ${describe()}`);
}

function drawMaps() {
  const cell = state.zoom, top = headroom(cell), pixels = document.createElement("canvas");
  pixels.width = pixels.height = TOKENS;
  refill(find("maps"), sources().map((source) => {
    const image = new ImageData(TOKENS, TOKENS);
    for (let query = 0; query < TOKENS; query++)
      shownOf(source, query).forEach((w, key) => image.data.set([...weightColour(source, w), 255], 4 * (query * TOKENS + key)));
    pixels.getContext("2d").putImageData(image, 0, 0);
    const box = document.createElement("div"), title = document.createElement("h3"), canvas = document.createElement("canvas");
    box.className = "map";
    title.textContent = source.label;
    const size = TOKENS * cell, pen = prepare(canvas, LABEL + size + 2, top + size + 2);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(pixels, LABEL, top, size, size);
    pen.strokeStyle = css("--line");
    pen.strokeRect(LABEL - 0.5, top - 0.5, size + 1, size + 1);
    pen.strokeStyle = css("--mark");
    pen.strokeRect(LABEL - 0.5, top + state.query * cell - 0.5, size + 1, cell + 1);
    tokenLabels(pen, cell, LABEL, top, true);
    tokenLabels(pen, cell, LABEL, top, false);
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${source.label}, every token over the tokens it reads`);
    const cellAt = (event) => {
      const [key, query] = [event.offsetX - LABEL, event.offsetY - top].map((at) => Math.floor(at / cell));
      return query >= 0 && query < TOKENS ? [query, key] : null;
    };
    canvas.onmousemove = (event) => { const at = cellAt(event); if (at) tell(at[0], at[1]); };
    canvas.onmouseleave = () => tell();
    canvas.onclick = (event) => { const at = cellAt(event); if (at) choose({ query: at[0] }); };
    canvas.onkeydown = keys;
    box.append(title, canvas);
    return box;
  }));
}

function drawRibbons() {
  refill(find("ribbons"), sources().map((source) => {
    const row = document.createElement("div"), name = document.createElement("span"), text = document.createElement("div");
    row.className = "ribbon";
    name.textContent = source.label;
    if (source.kind !== "prior") name.textContent += `, KL ${number(reading().at("kl", state.head, state.query, source.channel))}`;
    text.className = "tokens";
    text.tabIndex = 0;
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", `${source.label}: arrow keys select a token`);
    text.onkeydown = keys;
    shownOf(source, state.query).forEach((weight, token) => {
      const chip = document.createElement("span"), back = weightColour(source, weight);
      chip.textContent = page.tokens[token];
      chip.style.background = rgb(back);
      chip.style.color = onTop(back);
      if (token === state.query) chip.className = "query";
      chip.onclick = () => choose({ query: token });
      chip.onmouseenter = () => tell(state.query, token);
      chip.onmouseleave = () => tell();
      text.append(chip, document.createElement("wbr"));
    });
    row.append(name, text);
    return row;
  }));
}

function drawOverview() {
  const heads = Math.max(...READ.map((index) => page.layers[index].heads));
  const wide = Math.min(18, Math.max(4, Math.floor(64 / heads))), high = page.layers.length > 16 ? 11 : 16, left = 18, top = 14;
  for (const name of Object.keys(OVERVIEW)) {
    const canvas = find(`overview-${name}`), pen = prepare(canvas, left + heads * wide + 2, top + page.layers.length * high + 2);
    const most = Math.max(...READ.flatMap((index) => page.layers[index].means[name]));
    find(`most-${name}`).textContent = `0 to ${number(most)}`;
    pen.font = "9px ui-monospace, monospace";
    pen.fillStyle = css("--quiet");
    for (let head = 0; head < heads; head += Math.ceil(12 / wide)) pen.fillText(head, left + head * wide + 1, 7);
    page.layers.forEach((one, index) => {
      pen.fillStyle = css("--quiet");
      pen.fillText(index, 0, top + (index + 0.5) * high);
      if (!one.arrays) return pen.fillText("–", left + 2, top + (index + 0.5) * high);
      one.means[name].forEach((x, head) => {
        pen.fillStyle = rgb(colour(most > 0 ? x / most : 0));
        pen.fillRect(left + head * wide, top + index * high, wide - 1, high - 1);
      });
    });
    pen.strokeStyle = css("--line");
    pen.strokeRect(left - 0.5, top - 0.5, heads * wide, page.layers.length * high);
    pen.strokeStyle = css("--mark");
    pen.lineWidth = 2;
    pen.strokeRect(left + state.head * wide - 0.5, top + state.layer * high - 0.5, wide, high);
    canvas.onclick = (event) => select(Math.floor((event.offsetY - top) / high), Math.floor((event.offsetX - left) / wide));
  }
}

function drawRanking() {
  let rows;
  if (state.scope === "model")
    rows = READ.flatMap((index) => page.layers[index].means.kl_channels.flatMap((row, head) =>
      row.map((kl, channel) => ({ layer: index, head, channel, kl })))).sort((a, b) => b.kl - a.kl).slice(0, 40);
  else rows = ranked(state.scope === "query" ? state.query : null);
  const most = rows.length ? rows[0].kl : 0;
  refill(find("ranking"), rows.map((row) => {
    const item = document.createElement("li"), button = document.createElement("button"), here = row.layer === undefined;
    const current = here || (row.layer === state.layer && row.head === state.head);
    const parts = ["span", "span", "span"].map((tag) => document.createElement(tag));
    const missing = here && !stored(row.channel);
    parts[0].textContent = here ? `channel ${row.channel}` : `${row.layer} · ${row.head} · ${row.channel}`;
    parts[1].className = "bar";
    parts[1].style.width = `${most > 0 ? (100 * row.kl) / most : 0}%`;
    parts[2].className = "number";
    parts[2].textContent = number(row.kl);
    button.title = here ? "" : `layer ${row.layer}, head ${row.head}, channel ${row.channel}`;
    button.disabled = missing;
    if (missing) button.title = "the weights of this channel are not in the page";
    button.setAttribute("aria-pressed", String(current && state.pressed.includes(row.channel)));
    button.append(...parts);
    button.onclick = () => {
      if (current) press(row.channel);
      else { select(row.layer, row.head); press(row.channel, true); }
    };
    item.append(button);
    return item;
  }));
}

/* ---- words ---- */

function describe() {
  const r = reading(), { head, query } = state;
  const peak = (weights) => weights.reduce((best, w, key) => (w > weights[best] ? key : best), 0);
  const words = sources().map((source) => {
    const weights = weightsOf(source, query), key = peak(weights);
    const q = source.kind === "prior" ? "" : `; λ ${number(r.at("lam", head, query, source.channel))}, hidden β ${number(
      r.at("hidden_beta", head, query, source.channel))} of ${number(r.betaMax(head, source.channel))}, KL ${number(r.at("kl", head, query, source.channel))}`;
    return `${source.label} → ${named(key)} (${number(weights[key])}${q})`;
  });
  return `token ${named(query)} looks most at: ${words.join(" · ")}`;
}

function tell(query = null, key = null) {
  if (query === null) { find("readout").textContent = describe(); return; }
  if (key === null || key < 0 || key >= TOKENS) { find("readout").textContent = `token ${named(query)}`; return; }
  const words = sources().map((source) => {
    const value = source.kind === "prior" ? "" : ` (value ${reading().at("value", state.head, key, source.channel).toPrecision(3)})`;
    return `${source.label} ${number(weightsOf(source, query)[key])}${value}`;
  });
  find("readout").textContent = `${named(query)} reads ${named(key)}: ${words.join(" · ")}`;
}

function explain() {
  const one = layer(), words = [`Layer ${state.layer}: prior ${one.prior}, parts ${one.parts || "none"}, ${one.heads} heads of ${one.width} channels.`];
  if (!tilts()) words.push("It has no part L: it reads the mean, so the posterior of every channel is the prior and KL is 0.");
  else if (!one.parts.includes("T")) words.push("It has no part T: λ is 1 and the hidden temperature is β_max.");
  if (!one.parts.includes("G")) words.push("It has no part G: the outer gate is 1.");
  if (one.channels) words.push(`Its prior differs per channel; the page holds the weights of ${one.channels[state.head].length} channels of each head.`);
  if (one.pairs) words.push("Its prior weighs pairs of token and channel, shown here summed over channels; the weights at the hidden temperature are not stored.");
  if (!one.normalized) words.push("It reads with weights that do not sum to one; they are shown normalized.");
  const missing = page.layers.flatMap((other, index) => (other.arrays ? [] : [`${index} (${other.prior}, ${other.missing})`]));
  if (missing.length) words.push(`Not shown: layer ${missing.join(", ")}.`);
  find("about").textContent = words.join(" ");
}

/* ---- selection ---- */

function draw() {
  find("layer").value = state.layer;
  if (find("head").length !== layer().heads) fill("head", range(layer().heads).map((head) => [head, head]));
  find("head").value = state.head;
  find("query").value = state.query;
  find("kind").value = state.kind;
  find("kind").disabled = !tilts();
  find("kind").options[0].disabled = Boolean(layer().pairs);
  find("change").checked = state.change;
  find("scope").value = state.scope;
  find("zoom").value = state.zoom;
  explain();
  for (const part of [drawOverview, drawRanking, drawRibbons, drawLanes, drawMaps]) part();
  tell();
  const { layer: index, head, query, kind, pressed } = state;
  try {
    history.replaceState(null, "", "#" + new URLSearchParams({ layer: index, head, query, kind, channels: pressed }));
  } catch { /* an embedded page may not change its address */ }
}

/* Change the selection; another head starts with the three channels that leave its prior most. */
function choose(change) {
  const head = "layer" in change || "head" in change;
  Object.assign(state, change);
  if (head) {
    state.head = Math.min(state.head, layer().heads - 1);
    state.row = 0;
    if (layer().pairs && state.kind === "hidden") state.kind = "max";
    if (!change.pressed) state.pressed = ranked().map((row) => row.channel).filter(stored).slice(0, 3);
  }
  draw();
}
function select(index, head) {
  if (READ.includes(index) && head >= 0 && head < page.layers[index].heads) choose({ layer: index, head });
}
function press(channel, only = false) {
  if (!stored(channel)) return;
  const others = state.pressed.filter((c) => c !== channel);
  const pressed = only ? [channel] : others.length < state.pressed.length ? others : [...others, channel].slice(-MOST_PRESSED);
  choose({ pressed });
}

function keys(event) {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const all = lanes.filter((lane) => lane.press);
  if (step && event.currentTarget.id.startsWith("overview-")) {
    let index = READ.indexOf(state.layer) + step[1];
    select(READ[Math.min(READ.length - 1, Math.max(0, index))], Math.max(0, state.head + step[0]));
  } else if (step) {
    const query = Math.min(TOKENS - 1, Math.max(0, state.query + step[0]));
    choose({ query, row: Math.min(Math.max(0, all.length - 1), Math.max(0, state.row + step[1])) });
  } else if ((event.key === "Enter" || event.key === " ") && all.length && event.currentTarget.id === "lanes")
    press(all[state.row].channel);
  else return;
  event.preventDefault();
}

function laneAt(event) {
  const lane = lanes.find((one) => event.offsetY >= one.top && event.offsetY < one.top + one.height);
  return [lane, Math.floor(event.offsetX / Math.max(11, state.zoom))];
}
find("lanes").onclick = (event) => {
  const token = laneAt(event)[1];
  if (token >= 0 && token < TOKENS) choose({ query: token });
};
find("lanes").onmousemove = (event) => {
  const [lane, token] = laneAt(event);
  if (!lane || !lane.numbers || token < 0 || token >= TOKENS) return tell();
  const what = lane.quantity ? `${lane.quantity} of ${named(token)}` : `${named(state.query)} reads ${named(token)}`;
  find("readout").textContent = `${what}, ${lane.label.split("  ")[0]}: ${number(lane.numbers[token])}`;
};
find("lanes").onmouseleave = () => tell();
find("lanes").onkeydown = keys;
find("lane-labels").onclick = (event) => {
  const lane = laneAt(event)[0];
  if (lane && lane.channel !== undefined && lane.kind !== "prior") press(lane.channel);
};

function fill(id, options) {
  find(id).replaceChildren(...options.map(([value, label]) => new Option(label, value)));
}

function start() {
  const texts = { note: page.note, text: page.text };
  for (const [id, text] of Object.entries(texts)) find(id).textContent = text;
  find("note").hidden = !page.note;
  fill("layer", READ.map((index) => [index, `${index}: ${page.layers[index].prior}`]));
  fill("query", page.tokens.map((token, index) => [index, `${index}: ${short(token, 20)}`]));
  for (const [name, label] of Object.entries(OVERVIEW)) {
    const box = document.createElement("div"), title = document.createElement("div"), canvas = document.createElement("canvas");
    const most = document.createElement("div");
    box.className = "metric";
    title.textContent = label;
    most.id = `most-${name}`;
    most.className = "quiet";
    canvas.id = `overview-${name}`;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `mean ${label} of every layer and head; arrow keys select`);
    canvas.onkeydown = keys;
    box.append(title, canvas, most);
    find("overview").append(box);
  }
  for (const id of ["layer", "head", "query", "zoom"]) find(id).oninput = () => choose({ [id]: Number(find(id).value) });
  for (const id of ["kind", "scope"]) find(id).oninput = () => choose({ [id]: find(id).value });
  find("change").oninput = () => choose({ change: find("change").checked });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); draw(); });
  readColours();
  choose(fromAddress());
}

/* The layer and head with the channel that leaves its prior most. */
function strongest() {
  const most = (index, head) => Math.max(...page.layers[index].means.kl_channels[head]);
  const all = READ.flatMap((index) => range(page.layers[index].heads).map((head) => ({ layer: index, head, kl: most(index, head) })));
  return all.reduce((best, one) => (one.kl > best.kl ? one : best));
}

/* The selection kept in the address, as far as it exists here. */
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), wanted = (name, most) => {
    const x = Number(given.get(name));
    return given.has(name) && Number.isInteger(x) && x >= 0 && x < most ? x : null;
  };
  const first = strongest(), named = wanted("layer", page.layers.length), index = READ.includes(named) ? named : first.layer;
  const result = { layer: index, head: wanted("head", page.layers[index].heads) ?? (index === first.layer ? first.head : 0) };
  if (["hidden", "max", "effective"].includes(given.get("kind"))) result.kind = given.get("kind");
  state.layer = index;
  state.head = result.head;
  const kl = range(TOKENS).map((token) => reading().at("kl", state.head, token, ranked()[0].channel));
  result.query = wanted("query", TOKENS) ?? page.query ?? kl.indexOf(Math.max(...kl));
  const pressed = (given.get("channels") || "").split(",").filter(Boolean).map(Number)
    .filter((c) => Number.isInteger(c) && c >= 0 && c < layer().width && stored(c));
  if (pressed.length) result.pressed = pressed.slice(0, MOST_PRESSED);
  return result;
}

start();
