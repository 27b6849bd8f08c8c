// Shows the values at the cursor over each plot.
for (const plot of document.querySelectorAll(".plot")) {
  const {frame, lines} = JSON.parse(plot.querySelector("script").textContent);
  const [left, right, top, bottom, low, high] = frame;
  const line = plot.querySelector(".line"), tip = plot.querySelector(".tip"), image = plot.querySelector("img");
  const steps = [...new Set(Object.values(lines).flatMap(points => points.map(p => p[0])))];
  plot.addEventListener("mousemove", event => {
    const box = image.getBoundingClientRect(), outer = plot.getBoundingClientRect();
    const x = low + ((event.clientX - box.left) / box.width - left) / (right - left) * (high - low);
    const step = steps.reduce((a, b) => Math.abs(b - x) < Math.abs(a - x) ? b : a);
    const at = box.left - outer.left + box.width * (left + (step - low) / (high - low) * (right - left));
    const rows = Object.entries(lines).map(([label, points]) => [label, points.find(p => p[0] === step)]);
    tip.textContent = [step, ...rows.filter(r => r[1]).map(([label, p]) => `${label}: ${p[1]}`)].join("\n");
    line.style.cssText = `display:block;left:${at}px;top:${box.top - outer.top + box.height * top}px;` +
      `height:${box.height * (bottom - top)}px`;
    tip.style.cssText = `display:block;top:${box.top - outer.top + 8}px;` +
      (at > outer.width / 2 ? `right:${outer.width - at + 8}px` : `left:${at + 8}px`);
  });
  plot.addEventListener("mouseleave", () => { line.style.display = tip.style.display = "none"; });
}
