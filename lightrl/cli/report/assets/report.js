// Shows the values at the cursor over each plot. Dragging zooms; double-clicking resets.
const COLORS = ["#2563eb", "#ea580c", "#059669", "#9333ea", "#ca8a04", "#64748b"];
const element = (name, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text ?? "";
  return made;
};
for (const plot of document.querySelectorAll(".plot")) {
  const {frame, lines} = JSON.parse(plot.querySelector("script").textContent);
  const line = plot.querySelector(".line"), tip = plot.querySelector(".tip"), image = plot.querySelector("img");
  const steps = [...new Set(Object.values(lines).flatMap(points => points.map(p => p[0])))].sort((a, b) => a - b);
  let shown = {box: image, frame}, pressed = null;
  const stepAt = clientX => {
    const [left, right, , , low, high] = shown.frame, box = shown.box.getBoundingClientRect();
    const x = low + ((clientX - box.left) / box.width - left) / (right - left) * (high - low);
    return steps.reduce((a, b) => Math.abs(b - x) < Math.abs(a - x) ? b : a);
  };
  const whole = () => {
    plot.querySelector("svg")?.remove();
    image.style.display = "";
    shown = {box: image, frame};
  };
  const zoom = (low, high) => {
    whole();
    const inside = Object.entries(lines).map(([label, p]) => [label, p.filter(([x]) => x >= low && x <= high)]);
    const values = inside.flatMap(([, points]) => points.map(p => p[1]));
    if (!values.length || low === high) return;
    const width = 780, height = 442, part = [0.1, 0.97, 0.1, 0.9, low, high];
    const space = (Math.max(...values) - Math.min(...values)) * 0.05 || 1;
    const bottom = Math.min(...values) - space, top = Math.max(...values) + space;
    const x = step => width * (part[0] + (step - low) / (high - low) * (part[1] - part[0]));
    const y = value => height * (part[3] - (value - bottom) / (top - bottom) * (part[3] - part[2]));
    const svg = element("svg", {viewBox: `0 0 ${width} ${height}`, "font-size": 13, fill: "currentColor"});
    for (let i = 0; i <= 4; i++) {
      const value = bottom + (top - bottom) * i / 4, step = Math.round(low + (high - low) * i / 4);
      svg.append(element("path", {d: `M${x(low)} ${y(value)}H${x(high)}`, class: "mesh"}));
      svg.append(element("text", {x: x(low) - 6, y: y(value) + 4, "text-anchor": "end"}, Number(value.toPrecision(3))));
      svg.append(element("text", {x: x(step), y: y(bottom) + 20, "text-anchor": "middle"}, step));
    }
    svg.append(element("text", {x: x(low), y: 22, "font-weight": 700}, `${image.alt}: ${low} to ${high}`));
    inside.forEach(([label, points], i) => {
      const stroke = COLORS[i % COLORS.length], places = points.map(([s, v]) => `${x(s)} ${y(v)}`);
      svg.append(element("path", {d: `M${places.join("L")}`, stroke, fill: "none", "stroke-width": 2}));
      svg.append(element("text", {x: x(high), y: 22 + 17 * i, "text-anchor": "end", fill: stroke}, label));
    });
    image.style.display = "none";
    plot.append(svg);
    shown = {box: svg, frame: part};
  };
  plot.addEventListener("mousemove", event => {
    const [left, right, top, bottom, low, high] = shown.frame;
    const box = shown.box.getBoundingClientRect(), outer = plot.getBoundingClientRect();
    const step = stepAt(event.clientX);
    const at = box.left - outer.left + box.width * (left + (step - low) / (high - low) * (right - left));
    const rows = Object.entries(lines).map(([label, points]) => [label, points.find(p => p[0] === step)]);
    const text = pressed === null ? `${step}` : `${pressed} to ${step}`;
    tip.textContent = [text, ...rows.filter(r => r[1]).map(([label, p]) => `${label}: ${p[1]}`)].join("\n");
    line.style.cssText = `display:block;left:${at}px;top:${box.top - outer.top + box.height * top}px;` +
      `height:${box.height * (bottom - top)}px`;
    tip.style.cssText = `display:block;top:${box.top - outer.top + 8}px;` +
      (at > outer.width / 2 ? `right:${outer.width - at + 8}px` : `left:${at + 8}px`);
  });
  plot.addEventListener("mousedown", event => { event.preventDefault(); pressed = stepAt(event.clientX); });
  plot.addEventListener("mouseup", event => {
    const step = stepAt(event.clientX), from = pressed;
    pressed = null;
    if (from !== null && from !== step) zoom(Math.min(from, step), Math.max(from, step));
  });
  plot.addEventListener("dblclick", whole);
  plot.addEventListener("mouseleave", () => { line.style.display = tip.style.display = "none"; pressed = null; });
}
