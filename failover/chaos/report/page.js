// The page: which run, its summary and invariants, the filter, and what is drawn again when one of them changes.

const runs = dataOf("runs");
const filter = { text: "", hidden: new Set(), instance: "", kind: "", tried: false };
const FEW = 8;
let current = 0;

function openRun(at) {
  current = at;
  view.run = readRun(at);
  [view.from, view.to, view.selected, view.fault] = [view.run.from, view.run.to, null, null];
  Object.assign(filter, { text: "", hidden: new Set(), instance: "", kind: "", tried: false });
  byId("detail").hidden = true;
  document.body.classList.remove("open");
  byId("main").replaceChildren(...[runsTable(), summaryOf(), invariantsOf(), timelineOf(), scenarioOf()].filter(Boolean));
  listenToStrip(byId("strip"));
  listenToList(byId("list"));
  for (const id of ["strip", "lanes", "list"]) listenToWheel(byId(id));
  byId("timeline").addEventListener("keydown", timelineKeys);
  new ResizeObserver(resized).observe(byId("timeline"));
  resized();
  remember();
}

function runsTable() {
  if (runs.length < 2) return null;
  const names = [...new Set(runs.map((run) => run.name))];
  const broken = runs.reduce((sum, run) => sum + run.broken, 0);
  const seeds = new Set(runs.map((run) => run.seed)).size;
  return h("nav", { "aria-label": "Runs" },
    h("p", { class: "overline" }, `${plural(names.length, "scenario")}, ${plural(seeds, "seed")}: ${plural(broken, "violation")}`),
    h("ul", { class: "runs" }, names.map((name) => h("li", {}, words(name),
      h("span", {}, runs.map((run, at) => (run.name !== name ? null : button({
        class: `run ${run.passed ? "passed" : "failed"}`, "aria-current": at === current ? "true" : null, onclick: () => openRun(at),
        title: `seed ${run.seed}, ${run.long ? "long" : "short"} form: ${run.passed ? "passed" : plural(run.broken, "violation")}`,
      }, `${run.passed ? "✓" : "✕"} ${run.seed}${run.long ? " long" : ""}`))))))));
}

function summaryOf() {
  const { run } = view;
  const { scenario } = run;
  const meta = [`seed ${run.seed}`, `${run.long ? "long" : "short"} form`, `${seconds(run.load, 1)} of load`,
    run.settled === null ? "not all given back" : `all given back after ${seconds(run.settled, 1)}`, `pdgate ${run.version}`];
  const verdict = run.stopped ? `${run.passed ? "Stopped" : "Failed, stopped"}` : run.passed ? "Passed" : "Failed";
  return h("header", { class: "summary" },
    h("p", { class: "overline" }, "pdgate chaos"),
    h("h1", {}, words(scenario.name), h("span", { class: `verdict ${!run.passed ? "failed" : run.stopped ? "stopped" : "passed"}`, id: "verdict" },
      `${run.passed ? (run.stopped ? "" : "✓ ") : "✕ "}${verdict}`)),
    scenario.proves || scenario.about ? h("p", { class: "proves" }, words(scenario.proves || scenario.about)) : null,
    h("p", { class: "meta" }, meta.map((each) => h("span", {}, each))),
    h("dl", { class: "figures" }, Object.entries(run.figures).map((entry) => {
      const [name, value] = figure(...entry);
      return h("div", {}, h("dt", {}, name), h("dd", {}, value));
    })));
}

function invariantsOf() {
  const { verdicts } = view.run;
  const failed = verdicts.filter((each) => state(each) === 0);
  const rest = verdicts.filter((each) => state(each) > 0);
  const held = rest.filter((each) => state(each) === 1).length;
  return h("section", { id: "invariants", "aria-label": "Invariants" },
    h("h2", {}, "Invariants", h("small", {}, [failed.length ? `${failed.length} broken` : null, `${held} held`,
      rest.length > held ? `${rest.length - held} not seen` : null].filter(Boolean).join(", "))),
    failed.map((each) => h("article", { class: "invariant broken" },
      h("h3", {}, words(spoken(each.invariant)), h("small", {}, plural(each.broken.length, "case"), each.evidence ? " · " : "", words(each.evidence))),
      casesOf(each.broken))),
    h("ul", { class: "held" }, rest.map((each) => h("li", { class: `invariant ${each.unseen ? "unknown" : "ok"}` },
      h("strong", {}, words(spoken(each.invariant))), words(each.unseen ? `not seen: ${each.unseen}` : each.evidence)))),
    verdicts.length ? null : h("p", { class: "empty" }, "No invariant was judged."));
}

function casesOf(broken) {
  const list = h("ul", { class: "cases" });
  const show = (part) => list.append(...part.map((each) => brokenCase(each, false)));
  show(broken.slice(0, FEW));
  const more = broken.length - FEW;
  return more <= 0 ? list : [list, button({ onclick: (event) => { event.target.remove(); show(broken.slice(FEW)); } }, `${more} more`)];
}

function timelineOf() {
  const { run } = view;
  const counts = Object.fromEntries(OUTCOMES.map((each) => [each, run.requests.filter((request) => request.outcome === each).length]));
  const kinds = [...new Set(run.requests.flatMap((request) => request.kinds))].sort();
  const gateways = run.requests.flatMap((request) => [request.gateway, ...request.attempts.flatMap((attempt) => [attempt.prefill, attempt.decode])]);
  const instances = [...new Set([...run.instances.map((each) => each.name), ...gateways])].filter(Boolean);
  const choose = (name, label, values) => h("select", { id: `by-${name}`, "aria-label": label, onchange: (event) => filterBy(name, event.target.value) },
    h("option", { value: "" }, `any ${name}`), values.map((each) => h("option", { value: each }, each)));
  const time = (id, label) => h("input", { id, type: "number", step: "any", "aria-label": label, onchange: readTimes });
  return h("section", { id: "timeline", "aria-label": "Timeline" },
    h("h2", {}, "Timeline", h("small", {}, h("output", { id: "count" }))),
    h("div", { class: "filter", role: "group", "aria-label": "Filter of requests" },
      h("input", { id: "by-text", type: "search", placeholder: "name, rid, error …", "aria-label": "find requests", oninput: (event) => filterBy("text", event.target.value) }),
      h("span", { class: "outcomes" }, OUTCOMES.map((each) => button({ class: `outcome ${each}`, id: `by-${each}`, "aria-pressed": "true", disabled: !counts[each],
        onclick: () => toggleOutcome(each) }, h("i", { class: `dot ${each}` }), `${each} `, h("b", {}, counts[each].toLocaleString("en"))))),
      choose("instance", "requests of this instance", instances),
      choose("kind", "requests of this kind", kinds),
      h("label", {}, h("input", { id: "by-tried", type: "checkbox", onchange: (event) => filterBy("tried", event.target.checked) }), "tried again"),
      h("span", { class: "time" }, time("time-from", "from, in seconds"), "–", time("time-to", "to, in seconds"), "s"),
      button({ id: "show-all", onclick: showAll }, "show all")),
    h("canvas", { id: "strip", tabindex: 0, role: "img", "aria-label": "requests under way over the whole run; + and − zoom, arrows move, 0 shows all" }),
    put(document.createElementNS(SVG, "svg"), { id: "lanes", role: "group", "aria-label": "faults and instances" }, []),
    h("div", { id: "list", tabindex: 0, role: "listbox", "aria-label": "requests by the time they were asked; arrows choose one" },
      h("canvas", { id: "bars" }), h("div", { id: "rows" })),
    h("p", { class: "key" },
      h("span", {}, h("i", { class: "sign waiting" }), "waiting"), h("span", {}, h("i", { class: "sign ended" }), "attempt that ended early"),
      h("span", {}, h("i", { class: "sign tick" }), "first token"), h("span", {}, h("i", { class: "sign seam" }), "stream went on elsewhere"),
      h("span", {}, h("i", { class: "sign band" }), "fault"), h("span", {}, h("i", { class: "sign kv" }), "KV held, cached"),
      h("span", { class: "keys" }, ...["/", "find", "↑ ↓", "requests", "+ − ← → 0", "time", "Esc", "close"].map((each, n) => (n % 2 ? ` ${each}  ` : h("kbd", {}, each))))));
}

function scenarioOf() {
  const { scenario, left_over: leftOver, held } = view.run;
  const rows = (value) => pairs(Object.entries(value).map(([name, each]) => [spoken(name), typeof each === "object" && each !== null ? JSON.stringify(each) : String(each === "" ? "–" : each)]));
  return h("details", { class: "scenario" }, h("summary", {}, "The scenario, and what was left"),
    scenario.about ? h("p", {}, words(scenario.about)) : null,
    h("div", { class: "columns" }, part("Fleet", rows(scenario.fleet)), part("Load", rows(scenario.load)), part("Bounds", rows(scenario.expect)),
      part("Left over", rows(leftOver)), part("KV held at the end, tokens", rows(held))));
}

// -- filter and drawing

function matches(request) {
  if (filter.hidden.has(request.outcome)) return false;
  if (filter.kind && !request.kinds.includes(filter.kind)) return false;
  if (filter.tried && request.tries < 2) return false;
  const own = filter.instance;
  if (own && request.gateway !== own && !request.attempts.some((each) => each.prefill === own || each.decode === own)) return false;
  return !filter.text || filter.text.toLowerCase().split(/\s+/).every((word) => haystack(request).includes(word));
}

function filterBy(name, value) {
  filter[name] = value;
  if (name === "instance") byId("by-instance").value = value;
  filtered();
}

function toggleOutcome(outcome) {
  if (!filter.hidden.delete(outcome)) filter.hidden.add(outcome);
  filtered();
}

function filtered() {
  view.matching = view.run.requests.filter(matches);
  for (const each of OUTCOMES) byId(`by-${each}`).setAttribute("aria-pressed", String(!filter.hidden.has(each)));
  timeChanged();
}

function timeChanged() {
  view.shown = view.matching.filter((request) => visible(request.asked, request.end));
  byId("time-from").value = (view.from / 1000).toFixed(2);
  byId("time-to").value = (view.to / 1000).toFixed(2);
  const [few, all] = [view.shown.length, view.run.requests.length];
  byId("count").textContent = few === all ? plural(all, "request") : `${few.toLocaleString("en")} of ${plural(all, "request")}`;
  byId("show-all").disabled = few === all && !isZoomed();
  layRows();
  draw();
}

function draw() {
  drawStrip();
  drawLanes();
  paintRequests();
}

function readTimes() {
  const read = (id, otherwise) => (byId(id).value === "" ? otherwise : Number(byId(id).value) * 1000);
  const [from, to] = [read("time-from", view.run.from), read("time-to", view.run.to)];
  if (to > from) zoomTo(from, to);
  else timeChanged();
}

function showAll() {
  Object.assign(filter, { text: "", hidden: new Set(), instance: "", kind: "", tried: false });
  for (const id of ["by-text", "by-instance", "by-kind"]) byId(id).value = "";
  byId("by-tried").checked = false;
  [view.from, view.to] = [view.run.from, view.run.to];
  filtered();
}

function resized() {
  const width = byId("timeline").clientWidth;
  if (width === view.width && view.matching) return;
  view.width = width;
  readInk();
  filtered();
}

// -- what is chosen

function openRequest(request, { keepFocus = false } = {}) {
  if (!request) return;
  [view.selected, view.fault] = [request, null];
  requestPanel(request, keepFocus);
  byId("said").textContent = `${request.name}, ${request.outcome}, ${plural(request.attempts.length, "attempt")}`;
  showRow(request);
  remember();
  draw();
}

function openFault(fault) {
  [view.selected, view.fault] = [null, fault];
  faultPanel(fault, false);
  remember();
  draw();
}

// To a request from a link: it is shown whatever the filter was.
function goTo(name) {
  const request = view.run.byName.get(name);
  if (!request) return;
  if (!view.shown.includes(request)) showAll();
  openRequest(request);
  byId("list").scrollIntoView({ block: "center" });
}

// The address names what is open, so that it can be passed on.
function remember() {
  const told = new URLSearchParams();
  if (current) told.set("run", current);
  if (view.selected) told.set("request", view.selected.name);
  if (view.fault) told.set("fault", view.fault.number);
  const hash = told.toString();
  if (hash !== location.hash.slice(1)) history.replaceState(null, "", hash ? `#${hash}` : location.pathname);
}

function recall() {
  const told = new URLSearchParams(location.hash.slice(1));
  const failed = runs.findIndex((run) => !run.passed);
  openRun(runs[told.get("run")] ? Number(told.get("run")) : told.has("request") || told.has("fault") ? 0 : Math.max(0, failed));
  if (told.has("request")) goTo(told.get("request"));
  const fault = view.run.faults.find((each) => String(each.number) === told.get("fault"));
  if (fault) openFault(fault);
}

// -- keys, themes and paper

function timelineKeys(event) {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = { "+": () => zoomBy(0.6), "=": () => zoomBy(0.6), "-": () => zoomBy(1 / 0.6), "−": () => zoomBy(1 / 0.6),
    ArrowLeft: () => panBy(-0.2), ArrowRight: () => panBy(0.2), 0: () => zoomTo(view.run.from, view.run.to) }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("detail").hidden) closePanel();
  if (event.key === "/" && !event.target.matches("input, select") && byId("by-text")) {
    event.preventDefault();
    byId("by-text").focus();
  }
});

function repaint() {
  readInk();
  if (view.run) draw();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

// On paper all rows are in sight, as thin as it takes, in the colours of a light page.
window.addEventListener("beforeprint", () => {
  document.documentElement.classList.add("paper");
  readInk();
  if (!view.run) return;
  drawStrip();
  const tall = Math.max(0.5, Math.min(rowHeight, 700 / Math.max(1, rows.length)));
  paintRows(byId("bars"), 0, Math.max(20, rows.length * tall), tall);
});
window.addEventListener("afterprint", () => {
  document.documentElement.classList.remove("paper");
  repaint();
});

if (runs.length) {
  recall();
  requestAnimationFrame(() => performance.mark("drawn"));
} else byId("main").append(h("p", { class: "empty" }, "There are no runs in this report."));
