// The one time scale of the page: what is shown of the run, and the strip in which it is chosen.

const GUTTER = 132;
const RIGHT = 14;
const STRIP = 44;
const view = { run: null, from: 0, to: 1, width: 800, shown: [], selected: null, fault: null };

const x = (at) => GUTTER + ((at - view.from) / (view.to - view.from)) * (view.width - GUTTER - RIGHT);
const timeAt = (px) => view.from + ((px - GUTTER) / (view.width - GUTTER - RIGHT)) * (view.to - view.from);
const wholeX = (at) => GUTTER + ((at - view.run.from) / (view.run.to - view.run.from)) * (view.width - GUTTER - RIGHT);
const wholeTime = (px) => view.run.from + ((px - GUTTER) / (view.width - GUTTER - RIGHT)) * (view.run.to - view.run.from);
const isZoomed = () => view.from > view.run.from || view.to < view.run.to;

// Steps of 1, 2 or 5 of a power of ten, some 90 pixels apart.
function ticks() {
  const least = ((view.to - view.from) * 90) / Math.max(100, view.width - GUTTER - RIGHT);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= least);
  const digits = Math.max(0, -Math.floor(Math.log10(step / 1000) + 1e-9));
  const found = [];
  for (let n = Math.ceil(view.from / step); n * step <= view.to; n++) {
    found.push({ at: n * step, label: `${(n * step / 1000).toFixed(digits)} s` });
  }
  return found;
}

// Shows that span, kept within the run and no shorter than 20 ms.
function zoomTo(from, to) {
  const { run } = view;
  const length = Math.min(Math.max(to - from, 20), run.to - run.from);
  view.from = Math.min(Math.max(from, run.from), run.to - length);
  view.to = view.from + length;
  timeChanged();
}

function zoomBy(factor, around = (view.from + view.to) / 2) {
  zoomTo(around - (around - view.from) * factor, around + (view.to - around) * factor);
}

function panBy(share) {
  const by = (view.to - view.from) * share;
  zoomTo(view.from + by, view.to + by);
}

// How many requests were under way at each moment of the whole run, stacked by outcome, and what of it is shown.
function drawStrip() {
  const context = canvasOf(byId("strip"), view.width, STRIP);
  const bins = Math.max(1, Math.floor((view.width - GUTTER - RIGHT) / 4));
  const counts = OUTCOMES.map(() => new Float64Array(bins + 1));
  const { run } = view;
  const bin = (at) => Math.max(0, Math.min(bins - 1, Math.floor(((at - run.from) / (run.to - run.from)) * bins)));
  for (const request of view.matching) {
    const own = counts[OUTCOMES.indexOf(request.outcome)];
    own[bin(request.asked)] += 1;
    own[bin(request.end) + 1] -= 1;
  }
  for (const own of counts) for (let n = 1; n < bins; n++) own[n] += own[n - 1];
  let most = 1;
  for (let n = 0; n < bins; n++) most = Math.max(most, counts.reduce((sum, own) => sum + own[n], 0));
  const wide = (view.width - GUTTER - RIGHT) / bins;
  for (let n = 0; n < bins; n++) {
    let y = STRIP - 1;
    counts.forEach((own, kind) => {
      const tall = (own[n] / most) * (STRIP - 6);
      context.fillStyle = ink[OUTCOMES[kind]];
      context.fillRect(GUTTER + n * wide, y - tall, wide - 0.6, tall);
      y -= tall;
    });
  }
  context.fillStyle = ink.line;
  context.fillRect(GUTTER, STRIP - 1, view.width - GUTTER - RIGHT, 1);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.fillStyle = ink.muted;
  context.fillText("under way", 0, 16);
  context.fillText(`at most ${most.toLocaleString("en")}`, 0, 31);
  drawWindow(context);
}

function drawWindow(context) {
  if (!isZoomed()) return;
  const [left, right] = [wholeX(view.from), wholeX(view.to)];
  context.globalAlpha = 0.78;
  context.fillStyle = ink.ground;
  context.fillRect(GUTTER, 0, left - GUTTER, STRIP);
  context.fillRect(right, 0, view.width - RIGHT - right, STRIP);
  context.globalAlpha = 1;
  context.fillStyle = ink.text;
  context.fillRect(left - 1, 0, 2, STRIP);
  context.fillRect(right - 1, 0, 2, STRIP);
}

// Drag to choose a span, drag the span to move it, double-click to show all.
function listenToStrip(strip) {
  let drag = null;
  strip.addEventListener("pointerdown", (event) => {
    strip.setPointerCapture(event.pointerId);
    const at = wholeTime(event.offsetX);
    const near = (edge) => Math.abs(wholeX(edge) - event.offsetX) < 6;
    if (isZoomed() && near(view.from)) drag = { fixed: view.to };
    else if (isZoomed() && near(view.to)) drag = { fixed: view.from };
    else if (isZoomed() && at > view.from && at < view.to) drag = { grip: at - view.from };
    else drag = { fixed: at };
    drag.began = event.offsetX;
  });
  strip.addEventListener("pointermove", (event) => {
    if (!drag || Math.abs(event.offsetX - drag.began) < 3) return;
    const at = wholeTime(event.offsetX);
    const length = view.to - view.from;
    if (drag.grip !== undefined) zoomTo(at - drag.grip, at - drag.grip + length);
    else zoomTo(Math.min(at, drag.fixed), Math.max(at, drag.fixed));
  });
  for (const kind of ["pointerup", "pointercancel"]) strip.addEventListener(kind, () => (drag = null));
  strip.addEventListener("dblclick", () => zoomTo(view.run.from, view.run.to));
}

// The wheel zooms with Ctrl (or a pinch), and pans sideways.
function listenToWheel(node) {
  node.addEventListener("wheel", (event) => {
    const px = event.clientX - node.getBoundingClientRect().left;
    if (event.ctrlKey || event.metaKey) zoomBy(Math.exp(event.deltaY / 300), timeAt(Math.max(px, GUTTER)));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) panBy(event.deltaX / view.width);
    else return;
    event.preventDefault();
  }, { passive: false });
}
