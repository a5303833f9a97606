// The upper half of the timeline, in SVG: the axis, the faults, and one lane for each instance.

const AXIS = 22;
const FAULT_ROW = 20;
const LANE = { prefill: 40, decode: 40, gateway: 22, redis: 22 };
const BAR = 7;

function drawLanes() {
  const { run, width } = view;
  const svg = byId("lanes");
  svg.replaceChildren();
  const packed = packFaults();
  const top = AXIS + packed.height + (run.faults.length ? 10 : 2);
  let y = top;
  const lanes = [];
  for (const instance of run.instances) {
    if (lanes.length && lanes.at(-1).instance.role !== instance.role) y += 6;
    lanes.push({ instance, y, height: LANE[instance.role] ?? 22 });
    y += lanes.at(-1).height;
  }
  const height = y + 6;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  put(svg, {}, [
    s("defs", {},
      s("clipPath", { id: "inside" }, s("rect", { x: GUTTER, y: 0, width: width - GUTTER - RIGHT + 1, height })),
      s("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        s("rect", { width: 2, height: 5, class: "hatch" }))),
    ...ticks().map(({ at, label }) => s("g", { class: "tick" },
      s("line", { x1: x(at), x2: x(at), y1: AXIS - 4, y2: height }),
      s("text", { x: x(at), y: 12, "text-anchor": "middle" }, label))),
    s("g", { "clip-path": "url(#inside)" }, momentOf(run.load, "load ends", height)),
    s("g", { "clip-path": "url(#inside)", class: "bands" }, ...lanes.map((lane) => bandsOf(lane))),
    run.faults.length ? s("text", { class: "lane-name", x: 0, y: AXIS + 14 }, "faults") : null,
    s("g", { "clip-path": "url(#inside)" }, ...packed.rows.map(faultBar)),
    ...lanes.map(laneOf),
  ], []);
}

const momentOf = (at, what, height) => at === null || at >= view.run.to ? null
  : s("g", { class: "moment" }, s("line", { x1: x(at), x2: x(at), y1: AXIS - 4, y2: height }),
      s("title", {}, `${what}: ${clock(at)}`));

const visible = (from, to) => to >= view.from && from <= view.to;

// Faults in as few rows as hold them with their labels; very many lie in thin rows without.
function packFaults() {
  const faults = view.run.faults.filter((fault) => visible(fault.from, fault.to)).sort((a, b) => a.from - b.from);
  let result = packInto(faults, true);
  if (result.count > 12) result = packInto(faults, false);
  const tall = result.labelled ? FAULT_ROW : 7;
  for (const row of result.rows) [row.y, row.tall] = [AXIS + row.at * tall, tall];
  return { rows: result.rows, height: result.count * tall };
}

function packInto(faults, labelled) {
  const ends = [];
  const rows = faults.map((fault) => {
    const left = Math.max(GUTTER, x(fault.from));
    const label = labelled ? textWidth(fault.sign) + 18 : 0;
    let at = ends.findIndex((end) => end < left);
    if (at < 0) at = ends.push(0) - 1;
    const right = Math.max(x(fault.to), left + 4);
    ends[at] = (right - left >= label ? right : right + label) + 4;
    return { fault, left, label, labelled, at };
  });
  return { rows, labelled, count: ends.length };
}

let measure = null;
function textWidth(text) {
  measure ??= document.createElement("canvas").getContext("2d");
  measure.font = `500 11px ${getComputedStyle(document.body).fontFamily}`;
  return measure.measureText(text).width;
}

function faultBar({ fault, left, label, labelled, y, tall }) {
  const right = Math.min(Math.max(x(fault.to), left + 4), view.width - RIGHT);
  const late = left + label > view.width - RIGHT;
  const inside = right - left >= label;
  const kind = `fault${fault.applied === null ? " failed" : ""}${view.fault === fault ? " selected" : ""}`;
  const open = () => openFault(fault);
  return s("g", {
    class: kind, role: "button", tabindex: 0, "data-fault": fault.number, onclick: open, onkeydown: onEnter(open),
    "aria-label": `fault ${fault.number}: ${fault.label}, at ${clock(fault.from)}`,
  },
    s("title", {}, `${fault.label}\n${clock(fault.from)} – ${fault.applied === null ? "not applied" : clock(fault.to)}`),
    s("rect", { class: "target", x: left - 2, y, width: Math.max(right - left, label) + 4, height: tall }),
    s("rect", { class: "span", x: left, y: y + 2, width: right - left, height: tall - 4, rx: 3 }),
    labelled ? s("text", {
      class: inside ? "on" : "off", y: y + 14, "text-anchor": late && !inside ? "end" : "start",
      x: inside ? left + 7 : late ? left - 6 : right + 6,
    }, fault.sign) : null);
}

const onEnter = (act) => (event) => {
  if (event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  act();
};

function bandsOf({ instance, y, height }) {
  return view.run.faults
    .filter((fault) => fault.hits.has(instance.name) && fault.applied !== null && visible(fault.from, fault.to))
    .map((fault) => s("rect", {
      class: `band${view.fault === fault ? " selected" : ""}`, x: x(fault.from), y,
      width: Math.max(2, x(fault.to) - x(fault.from)), height,
    }));
}

function laneOf({ instance, y, height }) {
  const engine = height > 30;
  const filter = () => filterBy("instance", instance.name);
  const bar = y + 6;
  return s("g", { class: "lane", "data-instance": instance.name },
    s("g", { class: "label", role: "button", tabindex: 0, onclick: filter, onkeydown: onEnter(filter),
             "aria-label": `show only requests of ${instance.name}` },
      s("rect", { class: "target", x: 0, y: y + 1, width: GUTTER - 10, height: height - 2 }),
      s("title", {}, `${instance.name} (${instance.role}) ${instance.url}\nClick: its requests only`),
      s("text", { class: "lane-name", x: 0, y: y + 13 }, clipped(instance.name, GUTTER - 20)),
      engine && instance.samples.length
        ? s("text", { class: "lane-note", x: 0, y: y + 28 }, `KV ≤ ${percent(instance.peak)}`) : null),
    s("g", { "clip-path": "url(#inside)" },
      ...instance.spans.map((span) => spanBar(instance, span, bar)),
      engine ? kvOf(instance, y + 15, height - 19) : null,
      ...marksOf(instance, bar)));
}

function clipped(text, most) {
  const width = textWidth(text);
  if (width <= most) return text;
  const signs = [...text];
  let kept = Math.floor((signs.length * most) / width);
  while (kept > 0 && textWidth(`${signs.slice(0, kept).join("")}…`) > most) kept -= 1;
  return `${signs.slice(0, kept).join("")}…`;
}

function spanBar(instance, span, y) {
  if (!visible(span.from, span.to) || span.to <= span.from) return null;
  const [left, right] = [Math.max(x(span.from), GUTTER), Math.min(x(span.to), view.width - RIGHT)];
  const wide = Math.max(0.5, right - left);
  const what = span.process === "up" ? span.what || "up" : span.process;
  const title = s("title", {}, `${instance.name}: ${what}\n${clock(span.from)} – ${clock(span.to)}`);
  if (span.process === "down") return s("rect", { class: "down", x: left, y: y + BAR / 2 - 0.5, width: wide, height: 1 }, title);
  const bar = s("rect", { class: `up ${span.health}`, x: left, y, width: wide, height: BAR }, title);
  if (span.process !== "frozen") return bar;
  return s("g", {}, s("rect", { class: "frozen", x: left, y, width: wide, height: BAR }, title),
    s("rect", { fill: "url(#hatch)", x: left, y, width: wide, height: BAR, "pointer-events": "none" }));
}

// What befell the process by a sign, and every mark by its word where there is room for it.
function marksOf(instance, y) {
  let free = GUTTER;
  return instance.marks.filter((mark) => visible(mark.at, mark.at)).map((mark) => {
    const at = x(mark.at);
    const process = PROCESS[mark.word];
    const next = instance.marks.find((each) => each.at > mark.at && (!process || PROCESS[each.word]));
    const room = (next ? x(next.at) : view.width - RIGHT) - at - 12;
    const told = LANE[instance.role] > 30 && at > free && textWidth(mark.label) < room;
    if (told) free = at + textWidth(mark.label) + 12;
    const middle = y + BAR / 2;
    const sign = process === "down" ? `M${at - 3.5} ${middle - 3.5}l7 7m0 -7l-7 7`
      : process ? `M${at} ${middle - 5}v10` : `M${at} ${y}v${BAR}`;
    return s("g", { class: `mark ${process ? "process" : "health"}` },
      s("title", {}, `${instance.name}: ${mark.what} at ${clock(mark.at)}`),
      s("path", { d: sign }),
      told ? s("text", { x: at + 5, y: y + BAR + 11 }, mark.label) : null);
  });
}

const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

// KV over time: held by rooms, and cached above it; all engines to the scale of the fullest of them.
function kvOf(instance, y, height) {
  const rows = instance.samples;
  if (!rows.length) return null;
  const floor = y + height;
  const level = (tokens, total) => floor - (total ? Math.min(1, tokens / total / view.run.fullest) : 0) * height;
  const area = (value) => whileUp(instance).map((part) => {
    const points = part.map(([at, used, cached, total]) => `${x(at).toFixed(1)} ${level(value(used, cached), total).toFixed(1)}`);
    return `M${x(part[0][0]).toFixed(1)} ${floor}L${points.join("L")}L${x(part.at(-1)[0]).toFixed(1)} ${floor}Z`;
  }).join("");
  return s("g", { class: "kv" },
    s("title", {}, `${instance.name}: KV held by requests (dark) and cached (light), of ${rows[0][3].toLocaleString("en")} tokens; at most ${percent(instance.filled)}`),
    s("path", { class: "cached", d: area((used, cached) => used + cached) }),
    s("path", { class: "used", d: area((used) => used) }),
    s("line", { x1: GUTTER, x2: view.width - RIGHT, y1: floor, y2: floor }));
}

// The samples in parts that end where the process did.
function whileUp(instance) {
  const down = instance.spans.filter((span) => span.process === "down");
  const parts = [];
  let before = null;
  for (const row of instance.samples) {
    if (!before || down.some((span) => span.from > before[0] && span.from <= row[0])) parts.push([]);
    parts.at(-1).push(before = row);
  }
  return parts;
}
