// The panel at the side: all that is known of one request, or of one fault.

const LONGEST = 400;

function openPanel(title, mark, children, keepFocus) {
  const panel = byId("detail");
  panel.hidden = false;
  document.body.classList.add("open");
  panel.replaceChildren(
    h("header", {}, h("h2", {}, words(title)), mark, button({ class: "close", "aria-label": "close the details", onclick: closePanel }, "×")),
    ...children.flat(3).filter(Boolean));
  panel.scrollTop = 0;
  if (!keepFocus) panel.focus({ preventScroll: true });
}

function closePanel() {
  byId("detail").hidden = true;
  document.body.classList.remove("open");
  [view.selected, view.fault] = [null, null];
  remember();
  draw();
  byId("list")?.focus({ preventScroll: true });
}

const pairs = (rows) => h("dl", { class: "pairs" }, rows.filter(Boolean).map(([name, value, kind]) => [
  h("dt", {}, name), h("dd", { class: kind }, value instanceof Node ? value : words(value))]));

const part = (title, ...children) => h("section", {}, h("h3", {}, title), ...children);

const requestLink = (name) => view.run.byName.has(name)
  ? button({ class: "link", "data-request": name, onclick: () => goTo(name) }, words(name)) : words(name);

function faultLink(number) {
  const fault = view.run.faults.find((each) => each.number === number);
  return fault ? button({ class: "link", onclick: () => openFault(fault) }, words(fault.label)) : `fault ${number}`;
}

function brokenCase(each, own) {
  return h("li", {},
    own ? null : h("span", { class: "whose" }, each.request ? requestLink(each.request) : "the run"),
    h("span", { class: "what", title: each.what }, words(each.what)),
    each.attempt || each.fault !== null ? h("span", { class: "where" },
      each.fault !== null ? ["under ", faultLink(each.fault)] : null,
      each.attempt ? [each.fault !== null ? " · attempt " : "attempt ", words(each.attempt, "mono")] : null) : null);
}

function requestPanel(request, keepFocus) {
  const broken = view.run.broken.get(request.name) || [];
  const longest = request.seams.reduce((most, seam) => Math.max(most, seam.at - seam.from), 0);
  openPanel(request.name, h("span", { class: `chip ${request.outcome}` }, request.outcome), [
    broken.length ? h("ul", { class: "cases" }, broken.map((each) => brokenCase(each, true))) : null,
    request.error ? h("p", { class: "error" }, words(request.error.message),
      h("small", {}, [request.error.kind, request.error.code, { true: "no work was done", false: "work may have been done" }[request.error.definite]]
        .filter(Boolean).map((each, n) => [n ? ", " : "", words(each)]))) : null,
    pairs([
      ["asked", `at ${clock(request.asked)}${request.gateway ? `, of ${request.gateway}` : ""}`],
      ["first token", request.first === null ? "none" : `after ${seconds(request.first - request.asked)}`],
      ["end", `after ${seconds(request.end - request.asked)}, status ${request.status ?? "none"}, ${{ whole: "body whole", cut: "connection broke", left: "client hung up" }[request.ending]}`],
      request.seams.length ? ["went on", `${plural(request.seams.length, "time")}, pause at most ${seconds(longest)}`] : null,
    ]),
    part("Asked", pairs([
      ["kind", request.kinds.join(", ")],
      ["prompt", request.prompts.map((size) => plural(size, "token")).slice(0, 8).join(", ")],
      request.samples > 1 ? ["samples", String(request.samples)] : null,
      ...Object.entries(request.limits).map(([name, value]) => [spoken(name), Array.isArray(value) ? JSON.stringify(value) : String(value)]),
      request.ids_shown || request.wants_usage ? ["with", [request.ids_shown && "token ids", request.wants_usage && "usage"].filter(Boolean).join(", ")] : null,
    ])),
    part(plural(request.attempts.length, "attempt"), request.attempts.length ? attemptsTable(request) : null),
    ...request.prompts.map((_, choice) => answerPart(request, choice)),
    part(`What happened`, storyOf(request)),
  ], keepFocus);
}

function attemptsTable(request) {
  const many = request.prompts.length > 1;
  return h("ol", { class: "attempts" }, request.attempts.map((attempt) => h("li", {},
    h("div", {}, many ? h("small", {}, `choice ${attempt.choice} `) : null, words(attempt.pair, "strong"),
      h("span", { class: "took" }, `${clock(attempt.began)} + ${attempt.ended === null ? "no end" : seconds(attempt.ended - attempt.began)}`)),
    h("small", { class: "mono" }, "rid ", words(attempt.rid), " · room ", words(attempt.room)))));
}

// What one choice read, with a stroke where another attempt went on.
function answerPart(request, choice) {
  const seams = new Set(request.seams.filter((seam) => seam.choice === choice).map((seam) => seam.event));
  const pieces = [];
  let text = "";
  request.texts.forEach((each, n) => {
    if (indexOf(request, n) !== choice) return;
    if (seams.has(n)) {
      pieces.push(text, h("mark", { title: "here another attempt went on", "aria-label": " (another attempt) " }));
      text = "";
    }
    text += each;
  });
  pieces.push(text);
  if (!pieces.join("")) return null;
  return part(request.prompts.length > 1 ? `Answer ${choice}` : "Answer", h("p", { class: "answer", dir: "auto" }, ...pieces.filter((each) => each !== "")));
}

// Events, attempts, and what befell their instances meanwhile, by time.
function storyOf(request) {
  const rows = [];
  request.at.forEach((at, n) => rows.push({ at, kind: "event", what: eventWords(request, n) }));
  request.attempts.forEach((attempt, n) => {
    const name = `attempt ${n + 1} on ${attempt.pair}`;
    rows.push({ at: attempt.began, kind: "attempt", what: `${name} began` });
    if (attempt.ended !== null) rows.push({ at: attempt.ended, kind: "attempt", what: `${name} was over` });
  });
  const near = new Set([request.gateway, ...request.attempts.flatMap((attempt) => [attempt.prefill, attempt.decode])]);
  const during = (at) => at !== null && at >= request.asked && at <= request.end;
  for (const fault of view.run.faults) {
    if (![...fault.hits].some((name) => near.has(name))) continue;
    if (during(fault.applied)) rows.push({ at: fault.applied, kind: "fault", what: `${fault.label}: applied` });
    if (during(fault.lifted)) rows.push({ at: fault.lifted, kind: "fault", what: `${fault.label}: lifted` });
  }
  for (const [at, name, what] of view.run.marks) if (near.has(name) && during(at)) rows.push({ at, kind: "mark", what: `${name} ${what}` });
  rows.sort((a, b) => a.at - b.at);
  const list = h("ol", { class: "story" });
  const show = (part) => list.append(...part.map((row) => h("li", { class: row.kind },
    h("time", {}, `+${((row.at - request.asked) / 1000).toFixed(3)}`), words(row.what))));
  show(rows.slice(0, LONGEST));
  const rest = rows.length - LONGEST;
  return rest <= 0 ? list : [list, button({ onclick: (event) => { event.target.remove(); show(rows.slice(LONGEST)); } }, `${rest} more`)];
}

function eventWords(request, n) {
  const extra = request.extra[n] || {};
  const told = [];
  if (request.prompts.length > 1) told.push(`[${indexOf(request, n)}]`);
  if (request.texts[n]) told.push(JSON.stringify(request.texts[n].length > 160 ? `${request.texts[n].slice(0, 160)}…` : request.texts[n]));
  if (extra.ids) told.push(plural(extra.ids, "id"));
  if (extra.finish) told.push(`finish ${extra.finish}${extra.matched === undefined ? "" : ` (${JSON.stringify(extra.matched)})`}`);
  if (extra.usage) told.push(`usage ${extra.usage.prompt_tokens} + ${extra.usage.completion_tokens} tokens`);
  if (extra.error) told.push(`error: ${extra.error.message}`);
  if (extra.done) told.push("[DONE]");
  if (extra.junk) told.push(`junk: ${extra.junk}`);
  return told.join("  ") || "(empty)";
}

function faultPanel(fault, keepFocus) {
  const { run } = view;
  const touched = run.requests.filter((request) => request.attempts.some((attempt) => isTouched(request, attempt, fault)));
  const hurt = touched.filter((request) => request.tries > 1 || !["whole", "left"].includes(request.outcome));
  const broken = run.verdicts.flatMap((verdict) => verdict.broken).filter((each) => each.fault === fault.number);
  openPanel(spoken(fault.fault), h("span", { class: "chip fault" }, words(fault.target)), [
    fault.problem ? h("p", { class: "error" }, words(fault.problem)) : null,
    broken.length ? h("ul", { class: "cases" }, broken.map((each) => brokenCase(each, false))) : null,
    pairs([
      ["number", String(fault.number)],
      ["planned", `at ${clock(fault.at)}${fault.for === null ? "" : ` for ${seconds(fault.for)}`}`],
      ["applied", fault.applied === null ? "no" : `at ${clock(fault.applied)}`],
      ["lifted", fault.lifted === null ? "no" : `at ${clock(fault.lifted)}`],
      fault.phase ? ["phase", fault.phase] : null,
      fault.note ? ["note", fault.note] : null,
      ...Object.entries(fault.params).map(([name, value]) => [spoken(name), String(value)]),
    ]),
    part(`${plural(hurt.length, "request")} tried again or in error, of ${touched.length.toLocaleString("en")} on its target then`,
      h("ul", { class: "hurt" }, hurt.slice(0, LONGEST).map((request) => h("li", {}, h("i", { class: `dot ${request.outcome}` }), requestLink(request.name))))),
  ], keepFocus);
}
