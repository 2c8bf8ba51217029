// Uses the page as a person would, and writes what it finds into the body's `data-seen`, as JSON.
"use strict";
const seen = { errors: problems };
const settle = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

/** Red, green, blue of colours painted over each other, whatever way each is written. */
function paint(...colours) {
  settle.clearRect(0, 0, 1, 1);
  for (const one of colours) { settle.fillStyle = one; settle.fillRect(0, 0, 1, 1); }
  return [...settle.getImageData(0, 0, 1, 1).data].slice(0, 3);
}

/** Relative luminance and contrast ratio. Source: WCAG 2.2. */
function luminance(rgb) {
  const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
function behind(element) {
  const found = [];
  for (let at = element; at; at = at.parentElement) found.unshift(getComputedStyle(at).backgroundColor);
  return found;
}

document.querySelector("#layouts tr.pick").click();
seen.detail = document.getElementById("detail").textContent;
seen.chosen = document.querySelectorAll("tr.on").length;
const picture = document.getElementById("timeline"), box = picture.getBoundingClientRect();
const point = (name, x, y, more = {}) => picture.dispatchEvent(
  new PointerEvent(name, { clientX: box.left + x, clientY: box.top + y, bubbles: true, ...more }));
document.getElementById("in").click();
seen.zoomed = view.to - view.from < plan.timeline.step_s;
const wheel = new WheelEvent("wheel", { deltaY: 100, cancelable: true });
const before = view.to - view.from;
picture.dispatchEvent(wheel);
seen.wheelScrollsThePage = !wheel.defaultPrevented && view.to - view.from === before;
document.getElementById("all").click();
const [start, end, kind] = lanes[0][1].reduce((a, b) => b[1] - b[0] > a[1] - a[0] ? b : a);
point("pointermove", LEFT + (box.width - LEFT) * ((start + end) / 2) / plan.timeline.step_s, 20 + HIGH / 2);
seen.tip = document.getElementById("tip").textContent;
seen.kind = kind;

seen.dark = matchMedia("(prefers-color-scheme: dark)").matches;
seen.polygons = document.querySelectorAll("#memory polygon").length;
// Each kind's longest bar, when it fills the timeline.
seen.wrongColours = names.timeline.filter(name => {
  const all = lanes.flatMap(([, bars], row) => bars.filter(bar => bar[2] === name).map(bar => [row, ...bar]));
  const [row, from, to] = all.reduce((a, b) => b[2] - b[1] > a[2] - a[1] ? b : a);
  if (to === from) return false; // under a microsecond: too short to look at
  Object.assign(view, { from, to });
  drawTimeline();
  const middle = [picture.width * (0.5 + LEFT / picture.clientWidth / 2), (20 + row * HIGH + HIGH / 2) * devicePixelRatio];
  const drawn = [...picture.getContext("2d").getImageData(...middle, 1, 1).data].slice(0, 3);
  return drawn.join() !== paint(colour("timeline", name)).join();
});
seen.kinds = names.timeline.length;
seen.sideways = document.documentElement.scrollWidth - innerWidth;

const page = behind(document.body);
seen.text = {};
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
  if (!own || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
  const style = getComputedStyle(element), ink = element.namespaceURI === NS ? style.fill : style.color, back = behind(element);
  seen.text[element.textContent.slice(0, 40)] = contrast(paint(...back, ink), paint(...back));
}
seen.text["on the timeline"] = contrast(paint(css("--dim")), paint(...page));
seen.series = {};
for (const chart of ["memory", "timeline"])
  for (const name of names[chart]) seen.series[`${chart} ${name}`] = contrast(paint(colour(chart, name)), paint(...page));

const labels = [...document.querySelectorAll("#memory text")].map(text => [text.textContent, text.getBoundingClientRect()]);
seen.overlapping = [];
labels.forEach(([one, a], i) => labels.slice(i + 1).forEach(([other, b]) => {
  if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom) seen.overlapping.push([one, other]);
}));
seen.smallestLabel = Math.min(...labels.map(([, rectangle]) => rectangle.height));
document.body.setAttribute("data-seen", JSON.stringify(seen));
