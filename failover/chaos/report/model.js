// What is drawn, worked out of a run's JSON: spans of faults and instances, ends and seams of requests.

const OUTCOMES = ["whole", "refused", "broken", "left", "lost"];
const ROLES = ["prefill", "decode", "gateway", "redis"];
const HEALTH = {
  ready: "good", unknown: "good",
  slow: "doubt", suspected: "doubt", probation: "doubt", not_ready: "doubt",
  broken: "bad", wedged: "bad", leaking: "bad",
};
const PROCESS = {
  killed: "down", ended: "down", stopped: "down", exited: "down",
  frozen: "frozen", thawed: "up", started: "up", restarted: "up",
};

function readRun(at) {
  const run = dataOf(`run-${at}`);
  run.requests.forEach((request) => readRequest(request, run));
  run.requests.sort((a, b) => a.asked - b.asked);
  run.byName = new Map(run.requests.map((request) => [request.name, request]));
  const ends = [run.load || 0, ...run.marks.map((mark) => mark[0] || 0)];
  for (const request of run.requests) ends.push(request.end);
  for (const rows of Object.values(run.samples)) ends.push(rows.at(-1)[0] || 0);
  for (const fault of run.faults) ends.push(fault.lifted || fault.applied || fault.at || 0);
  run.from = Math.min(0, run.requests[0]?.asked ?? 0);
  run.to = Math.max(ends.reduce((a, b) => Math.max(a, b), 0), run.from + 100);
  run.faults.forEach((fault) => readFault(fault, run));
  run.instances.sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name, "en", { numeric: true }));
  run.instances.forEach((instance) => readInstance(instance, run));
  run.fullest = Math.max(0, ...run.instances.map((instance) => instance.filled)) || 1;
  run.broken = new Map();
  for (const verdict of run.verdicts) {
    for (const each of verdict.broken) {
      each.invariant = verdict.invariant;
      if (each.request) run.broken.set(each.request, [...(run.broken.get(each.request) || []), each]);
    }
  }
  run.verdicts.sort((a, b) => state(a) - state(b));
  return run;
}

const rank = (instance) => (ROLES.indexOf(instance.role) + ROLES.length + 1) % (ROLES.length + 1);
const state = (verdict) => (verdict.broken.length ? 0 : verdict.unseen ? 2 : 1);

// An attempt that had no end of its own went on until its gateway was killed, or to the end of the load; one of which
// nobody told anything, as long as its client read.
function readRequest(request, run) {
  let at = request.asked;
  request.at = request.times.map((step) => (at += step));
  request.attempts = request.attempts.map(([choice, rid, room, prefill, decode, began, ended]) =>
    ({ choice, rid, room, prefill, decode, began, ended, last: true }));
  const latest = new Map();
  for (const attempt of request.attempts) {
    if (latest.has(attempt.choice)) latest.get(attempt.choice).last = false;
    latest.set(attempt.choice, attempt);
  }
  let end = Math.max(request.asked, request.at.at(-1) ?? request.asked);
  const deaths = run.deaths.filter(([, gateway]) => gateway === request.gateway).map(([at]) => at);
  for (const attempt of request.attempts) {
    const died = deaths.filter((at) => at >= attempt.began).sort((a, b) => a - b)[0];
    attempt.pair = attempt.prefill || attempt.decode ? `${attempt.prefill} → ${attempt.decode}` : "a pair that nobody told";
    const read = request.at.at(-1) ?? request.asked;
    attempt.until = attempt.ended ?? died ?? Math.max(attempt.began, attempt.prefill ? run.load || 0 : read);
    end = Math.max(end, attempt.until);
  }
  request.end = end;
  request.tries = Math.max(0, ...request.prompts.map((_, choice) => triesOf(request, choice).length));
  request.first = null;
  for (let n = 0; n < request.at.length && request.first === null; n++) if (written(request, n)) request.first = request.at[n];
  request.seams = request.tries > 1 ? seamsOf(request) : [];
  request.error = Object.values(request.extra).map((extra) => extra.error).find(Boolean) || null;
}

const triesOf = (request, choice) => request.attempts.filter((attempt) => attempt.choice === choice);
const written = (request, n) => Boolean(request.texts[n] || request.extra[n]?.ids);
const indexOf = (request, n) => request.extra[n]?.index || 0;

// Where a stream went on with another attempt: the event, and how long nothing was read.
function seamsOf(request) {
  const seams = [];
  for (let choice = 0; choice < request.prompts.length; choice++) {
    const own = request.at.map((at, n) => n).filter((n) => indexOf(request, n) === choice && written(request, n));
    for (const attempt of triesOf(request, choice).slice(1)) {
      const place = own.findIndex((n) => request.at[n] >= attempt.began);
      if (place < 1 || seams.some((seam) => seam.event === own[place])) continue;
      const before = request.at[own[place - 1]];
      seams.push({ choice, event: own[place], from: before, at: request.at[own[place]] });
    }
  }
  return seams;
}

// All that the filter looks through; made when it is first asked for.
function haystack(request) {
  if (request.hay === undefined) {
    const parts = [request.name, request.gateway, request.outcome, request.error?.message, request.error?.code];
    for (const attempt of request.attempts) parts.push(attempt.rid, attempt.prefill, attempt.decode);
    request.hay = parts.filter(Boolean).join("\n").toLowerCase();
  }
  return request.hay;
}

function readFault(fault, run) {
  fault.from = fault.applied ?? fault.at ?? 0;
  fault.to = fault.applied === null ? fault.from : fault.lifted ?? run.to;
  fault.label = `${spoken(fault.fault)} ${fault.target}`;
  fault.sign = fault.applied === null ? `${fault.label} (not applied)` : fault.label;
  const ends = fault.target.split(">").map((end) => run.instances.filter((each) => isHit(end.trim(), each)).map((each) => each.name));
  fault.ends = ends.filter((names) => names.length).map((names) => new Set(names));
  fault.hits = new Set(ends.flat());
}

// Whether a target, or one end of a link, is that instance: a name, `decode*`, or `all decode`.
function isHit(end, instance) {
  if (end === instance.name) return true;
  if (end.startsWith("all ")) return end.slice(4).trim() === instance.role;
  return end.endsWith("*") && end !== "*" && instance.name.startsWith(end.slice(0, -1));
}

// Whether an attempt was under way on the fault's target, or over its link, while the fault was on.
function isTouched(request, attempt, fault) {
  const own = [request.gateway, attempt.prefill, attempt.decode];
  return fault.applied !== null && fault.ends.length > 0 && fault.ends.every((end) => own.some((name) => end.has(name)))
    && attempt.began <= fault.to && attempt.until >= fault.from;
}

// A mark is of the process, or of the health that one gateway sees ("broken for gateway0"), or other words.
function readMark(at, what) {
  const [, word, by] = /^(\S+)(?: for (.+))?$/.exec(what) || [null, what, ""];
  const known = PROCESS[word] || HEALTH[word];
  return { at, what, word, by: by || "", label: known ? spoken(word) : what };
}

// The spans of an instance's process, and of the worst that any gateway thinks of it; a dead one thinks nothing.
function readInstance(instance, run) {
  const marks = run.marks.filter((mark) => mark[1] === instance.name).sort((a, b) => a[0] - b[0]);
  instance.marks = marks.map(([at, , what]) => readMark(at, what));
  instance.samples = run.samples[instance.name] || [];
  const process = instance.marks.filter((mark) => PROCESS[mark.word]);
  const early = process.length && process[0].word === "started" && process[0].at > 500;
  const spans = [{ from: run.from, process: early ? "down" : "up", health: "good", what: "" }];
  const thought = new Map();
  const gone = run.marks.filter(([, name, what]) => PROCESS[what] === "down" && name !== instance.name);
  const told = [...instance.marks, ...gone.map(([at, name]) => ({ at, gone: name }))].sort((a, b) => a.at - b.at);
  for (const mark of told) {
    const last = spans.at(-1);
    const next = { ...last, from: mark.at };
    if (PROCESS[mark.word]) next.process = PROCESS[mark.word];
    else if (mark.gone ? thought.delete(mark.gone) : HEALTH[mark.word]) {
      if (!mark.gone) thought.set(mark.by, mark);
      const all = [...thought.values()];
      next.health = ["bad", "doubt"].find((health) => all.some((each) => HEALTH[each.word] === health)) || "good";
      next.what = all.map((each) => each.what).join(", ");
    } else continue;
    last.to = mark.at;
    spans.push(next);
  }
  spans.at(-1).to = run.to;
  instance.spans = spans;
  const share = (tokens, total) => (total ? Math.min(1, tokens / total) : 0);
  instance.peak = instance.samples.reduce((most, [, used, , total]) => Math.max(most, share(used, total)), 0);
  instance.filled = instance.samples.reduce((most, [, used, cached, total]) => Math.max(most, share(used + cached, total)), 0);
}
