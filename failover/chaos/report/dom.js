// Elements from plain values. Text is always a text node: nothing of a run is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

const h = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => put(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);
const dataOf = (id) => JSON.parse(byId(id).textContent);

function button(attributes, ...children) {
  return h("button", { type: "button", ...attributes }, ...children);
}

// Hostile or foreign words keep their own direction and cannot turn the words around them.
const words = (text, kind) => h("bdi", { class: kind }, String(text));

const spoken = (name) => name.replaceAll("_", " ");

function seconds(ms, digits = 3) {
  if (ms === null || ms === undefined) return "–";
  return Math.abs(ms) < 1000 && digits > 2 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(digits)} s`;
}

const clock = (ms) => (ms === null || ms === undefined ? "–" : `${(ms / 1000).toFixed(3)} s`);

function figure(name, value) {
  if (typeof value !== "number") return [spoken(name), String(value)];
  if (name.endsWith("_s")) return [spoken(name.slice(0, -2)), `${value.toFixed(2)} s`];
  if (name.endsWith("_ratio")) return [`${spoken(name.slice(0, -6))} ratio`, value.toFixed(2)];
  return [spoken(name), Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(2)];
}

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// The colours of the page, for canvases: read again when the theme changes.
let ink = {};
function readInk() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ground", "text", "muted", "faint", "line", "whole", "refused", "broken", "left", "lost", "fault"];
  ink = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// A canvas of that many CSS pixels, sharp on every screen; cleared.
function canvasOf(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}
