"use strict";
const began = performance.now();
const read = id => JSON.parse(document.getElementById(id).textContent);
const head = read("head"), all = head.list;
let pieces = null, chosen = null, spans = [];
const details = new Map();
const detail = i => { if (!details.has(i)) details.set(i, read("t" + i)); return details.get(i); };
const make = (tag, parent, text, name) => {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (name) node.className = name;
  if (parent) parent.append(node);
  return node;
};
const number = x => x === null || x === undefined ? "-" : String(Math.round(x * 1000) / 1000);
const signed = x => x > 0 ? "+" + number(x) : number(x);
const direction = x => x > 0 ? "up" : x < 0 ? "down" : "soft";

// Token colorings: label, required values, number, and whether the number is signed.
const OVERLAYS = {
  mask: ["Mask", [], () => null, false],
  advantage: ["Advantage", ["advantages"], v => v.advantages, true],
  ratio: ["Ratio after/before the update", ["new_logprobs", "old_logprobs"],
    v => v.new_logprobs - v.old_logprobs, true],  // colored by its logarithm
  gap: ["Engine gap", ["old_logprobs", "engine_logprobs"], v => v.engine_logprobs - v.old_logprobs, true],
  entropy: ["Entropy", ["entropy"], v => v.entropy, false],
  surprise: ["Surprisal (engine)", ["engine_logprobs"], v => -v.engine_logprobs, false],
  kl: ["Log-ratio to the reference", ["old_logprobs", "ref_logprobs"], v => v.old_logprobs - v.ref_logprobs, true],
  value: ["Value", ["values"], v => v.values, true],
  none: ["None", [], () => null, false],
};

// ---- the frame
const header = make("header", document.body);
make("h1", header, head.name).title = head.name;
const field = (label, node, id) => {
  const box = make("label", header, label);
  node.id = id; box.append(node); return node;
};
const select = (options) => {
  const node = document.createElement("select");
  for (const [value, text, off] of options) {
    const option = make("option", node, text); option.value = value; option.disabled = Boolean(off);
  }
  return node;
};
const search = document.createElement("input");
search.type = "search"; search.placeholder = "text in trajectories";
field("Search", search, "search");
const distinct = f => [...new Set(all.map(f))].sort((a, b) => a > b ? 1 : a < b ? -1 : 0);
const any = [["", "all"]];
const rollout = field("Rollout", select(any.concat(distinct(t => t.rollout).map(x => [x, x]))), "rollout");
const stop = field("Stop reason", select(any.concat(distinct(t => t.stop).map(x => [x, x]))), "stop");
const bound = (label, id) => {
  const node = document.createElement("input");
  node.type = "number"; node.step = "any"; node.className = "bound";
  return field(label, node, id);
};
const from = bound("Reward from", "from"), to = bound("to", "to");
const learnt = field("Show", select([["", "all"], ["up", "advantage above 0"], ["down", "advantage below 0"],
  ["zero", "advantage 0"], ["untrained", "not trained"], ["failed", "failed or not scored"],
  ["mixed", "groups with mixed rewards"]]), "learnt");
const order = field("Sort by", select([["", "sampling order"], ["high", "highest reward"], ["low", "lowest reward"],
  ["long", "most tokens"]]), "order");
const overlay = field("Color by", select(Object.entries(OVERLAYS).map(([key, [label, needs]]) => {
  const missing = needs.filter(name => !head.has.includes(name));
  return [key, missing.length ? label + " (not recorded)" : label, missing.length];
})), "overlay");
const legend = make("span", header); legend.id = "legend";
const low = make("span", legend), bar = make("span", legend), high = make("span", legend);
bar.id = "bar";
const count = make("span", header); count.id = "count";
const nav = make("nav", document.body), main = make("main", document.body), tip = make("div", document.body);
tip.id = "tip";

// ---- the list
const texts = all.map(t => t.text.toLowerCase());
const place = t => t.rollout + " " + t.group;
const groups = new Map();
all.forEach((t, i) => { const g = place(t); if (!groups.has(g)) groups.set(g, []); groups.get(g).push(i); });
const rewards = new Map([...groups].map(([g, members]) =>
  [g, [...new Set(members.map(i => all[i].reward).filter(x => x !== null))].sort((a, b) => a - b)]));
const scored = t => t.reward !== null && t.reward !== undefined;
let visible = [];
const keeps = i => {
  const t = all[i], word = search.value.trim().toLowerCase(), a = t.advantage || 0;
  if (word && !texts[i].includes(word)) return false;
  if (rollout.value && String(t.rollout) !== rollout.value) return false;
  if (stop.value && t.stop !== stop.value) return false;
  if (from.value && !(scored(t) && t.reward >= Number(from.value))) return false;
  if (to.value && !(scored(t) && t.reward <= Number(to.value))) return false;
  switch (learnt.value) {
    case "up": return t.trained && a > 0;
    case "down": return t.trained && a < 0;
    case "zero": return t.trained && a === 0;
    case "untrained": return !t.trained;
    case "failed": return t.stop === "failure" || !scored(t);
    case "mixed": return rewards.get(place(t)).length > 1;
    default: return true;
  }
};
const KEYS = {high: t => -(t.reward ?? -Infinity), low: t => t.reward ?? Infinity, long: t => -t.tokens};
const list = () => {
  const kept = all.map((_, i) => i).filter(keeps);
  const frame = document.createDocumentFragment();
  visible = [];
  let section = null, last = null;
  const key = KEYS[order.value];
  if (key) kept.sort((a, b) => key(all[a]) - key(all[b]) || a - b);
  for (const i of kept) {
    const t = all[i], now = key ? "sorted" : place(t);
    if (now !== last) {
      section = make("section", frame);
      const title = make("h2", section, key ? order.selectedOptions[0].textContent : t.title);
      if (!key) {
        const range = rewards.get(now), [least, most] = [range[0], range[range.length - 1]];
        const span = !range.length ? "not scored" : least === most ? `reward ${number(least)}`
          : `rewards ${number(least)} to ${number(most)}`;
        title.title = t.question;
        make("p", section, `rollout ${t.rollout}, ${t.group}, ${span}`);
      }
      last = now;
    }
    const button = make("button", section);
    button.dataset.i = i;
    button.title = key ? t.question : "";
    make("span", button, "#" + t.trajectory);
    make("span", button, number(t.reward), t.trained ? direction(t.advantage) : "soft");
    make("small", button, t.trained ? t.stop : t.stop + ", not trained");
    make("small", button, t.turns > 1 ? `${t.turns} turns` : `${t.tokens} tok`);
    visible.push(i);
  }
  nav.replaceChildren(frame);
  const rest = head.leftOut ? `; ${head.leftOut} older rollouts not shown` : "";
  count.textContent = `${kept.length} of ${all.length} trajectories${rest}`;
  if (!kept.includes(chosen)) show(kept.length ? kept[0] : null); else mark();
};
const mark = () => {
  for (const button of nav.querySelectorAll("button")) {
    button.setAttribute("aria-current", String(Number(button.dataset.i) === chosen));
  }
};

// ---- one group, side by side
const show = i => {
  chosen = i;
  spans = [];
  main.replaceChildren();
  if (i === null) { make("p", main, "No matching trajectories.", "soft"); mark(); return; }
  pieces = pieces || read("pieces");
  const question = make("div", main, all[i].question);
  question.id = "question";
  question.title = "Click to expand";
  const group = make("div", main, null, "group");
  for (const member of groups.get(place(all[i]))) group.append(trajectory(member));
  main.style.setProperty("--question", question.offsetHeight + "px");
  paint();
  mark();
  main.querySelector(".chosen").scrollIntoView({block: "nearest", inline: "nearest"});
};
const trajectory = i => {
  const t = all[i], d = detail(i), box = make("article", null, null, i === chosen ? "chosen" : "");
  const title = make("h3", box);
  make("span", title, `#${t.trajectory}`);
  make("span", title, "reward " + number(t.reward), t.trained ? direction(t.advantage) : "soft");
  const versions = [...new Set(d.rows.flatMap(row => row.versions))];
  const said = [t.stop, `${t.turns} turns`, `${t.tokens} sampled tokens`, `policy ${versions.join(", ")}`];
  make("p", box, said.concat(t.trained ? [] : ["not trained"]).join(" · "), "soft");
  const facts = make("dl", box);
  for (const [name, value] of Object.entries(d.parts)) { make("dt", facts, name); make("dd", facts, number(value)); }
  for (const [name, value] of Object.entries(d.columns)) {
    make("dt", facts, name); make("dd", facts, typeof value === "string" ? value : JSON.stringify(value));
  }
  for (const p of d.pictures.filter(p => head.pictures[p])) { const img = make("img", box); img.src = head.pictures[p]; img.alt = "image " + p; }
  if (d.media.length) make("p", box, d.media.join(", "), "soft");
  const of = new Map(d.turns.map(turn => [turn.turn, turn]));
  d.rows.forEach((row, r) => {
    if (d.rows.length > 1) make("div", box, `sequence ${r + 1} of ${d.rows.length}`, "row");
    let at = 0, sampled = 0;
    const special = new Set(row.special);
    for (const [turn, length] of row.turns) {
      if (turn >= 0) {
        const line = make("div", box, null, "turn"), info = of.get(turn);
        make("b", line, `turn ${turn + 1}`);
        if (info) {
          for (const [name, value] of Object.entries(info.rewards ?? {})) {
            make("span", line, `${name} ${signed(value)}`, direction(value));
          }
          make("span", line, `advantage ${signed(info.advantage)}`, direction(info.advantage));
          make("span", line, `${info.tokens} tokens`);
        }
      }
      const block = make("pre", box, null, turn < 0 ? "context" : "sampled");
      if (turn < 0) {
        let text = "";  // highlight special tokens, so that text that imitates them is recognizable
        for (let k = at; k < at + length; k++) {
          if (!special.has(k)) { text += pieces[row.tokens[k]]; continue; }
          if (text) block.append(text);
          make("span", block, pieces[row.tokens[k]], "special");
          text = "";
        }
        if (text) block.append(text);
      } else for (let k = 0; k < length; k++, sampled++) {
        const span = make("span", block, pieces[row.tokens[at + k]]), values = {};
        for (const name in row.values) values[name] = row.values[name][sampled];
        if (/^\s*\n\s*$/.test(span.textContent)) span.className = "newline";
        if (special.has(at + k)) span.className = "special";
        if (!span.textContent) span.className = "part";
        spans.push([span, values]);
        span.values = values;
      }
      at += length;
    }
  });
  for (const message of d.messages) {
    make("div", box, message.role, "turn");
    make("pre", box, typeof message.content === "string" ? message.content : JSON.stringify(message), "context");
  }
  return box;
};
const paint = () => {
  const [, needs, of, both] = OVERLAYS[overlay.value];
  const value = v => needs.length && needs.every(n => v[n] !== undefined && v[n] !== null) ? of(v) : null;
  let most = 0;
  for (const [, v] of spans) { const x = value(v); if (x !== null) most = Math.max(most, Math.abs(x)); }
  for (const [span, v] of spans) {
    const x = value(v);
    if (overlay.value === "mask") span.style.background = "rgba(var(--amount),.22)";
    else if (x === null || !most) span.style.background = "";
    else {
      const tone = !both ? "--amount" : x > 0 ? "--pos" : "--neg";
      span.style.background = `rgba(var(${tone}),${(0.75 * Math.abs(x) / most).toFixed(3)})`;
    }
  }
  legend.style.visibility = needs.length ? "visible" : "hidden";
  const shown = overlay.value === "ratio" ? Math.exp : x => x;
  low.textContent = number(both ? shown(-most) : 0);
  high.textContent = number(shown(most));
  bar.style.background = both ? "linear-gradient(90deg,rgba(var(--neg),.75),transparent,rgba(var(--pos),.75))"
    : "linear-gradient(90deg,transparent,rgba(var(--amount),.75))";
};

// ---- events
for (const node of [rollout, stop, learnt, order]) node.addEventListener("change", list);
let soon = 0;
for (const node of [search, from, to]) {
  node.addEventListener("input", () => { clearTimeout(soon); soon = setTimeout(list, 60); });
}
main.addEventListener("click", event => {
  if (event.target.id !== "question" || String(getSelection())) return;
  event.target.classList.toggle("whole");
  main.style.setProperty("--question", event.target.offsetHeight + "px");
});
overlay.addEventListener("change", paint);
nav.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (button) show(Number(button.dataset.i));
});
document.addEventListener("keydown", event => {
  const typing = event.target instanceof Element && event.target.matches("input,select");
  if (!["j", "k"].includes(event.key) || typing || !visible.length) return;
  const next = visible.indexOf(chosen) + (event.key === "j" ? 1 : -1);
  if (next >= 0 && next < visible.length) {
    show(visible[next]);
    nav.querySelector("[aria-current=true]").scrollIntoView({block: "nearest"});
  }
});
main.addEventListener("mousemove", event => {
  const values = event.target.values;
  tip.style.display = values ? "block" : "none";
  if (!values) return;
  const lines = Object.entries(values).map(([name, x]) => `${name.padEnd(16)} ${number(x)}`);
  tip.textContent = lines.join("\n");
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
});
main.addEventListener("mouseleave", () => { tip.style.display = "none"; });
if (head.has.includes("advantages")) overlay.value = "advantage";
list();
document.documentElement.dataset.ready = String(Math.round(performance.now() - began));
