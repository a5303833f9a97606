// The lower half of the timeline: one thin bar for each request, on a canvas that draws only the rows in sight.

const LIST = 460;
const NAMED = 40;
let rowHeight = 6;
let rows = [];
let hovered = null;
let painting = 0;

// Few requests have a row and their name each; many share rows, each in the first that is free.
function layRows() {
  rows = [];
  const ends = [];
  const apart = ((view.to - view.from) * 4) / Math.max(100, view.width - GUTTER - RIGHT);
  for (const request of view.shown) {
    let row = view.shown.length <= NAMED ? -1 : ends.findIndex((end) => end < request.asked);
    if (row < 0) row = rows.push([]) - 1;
    rows[row].push(request);
    request.row = row;
    ends[row] = request.end + apart;
  }
  const many = rows.length;
  rowHeight = many <= 24 ? 18 : many <= NAMED ? 12 : many <= 60 ? 9 : 7;
  byId("rows").style.height = `${Math.max(many * rowHeight, 1)}px`;
  byId("list").style.height = `${Math.min(Math.max(many * rowHeight, 40), LIST)}px`;
}

function paintRequests() {
  if (painting) return;
  painting = requestAnimationFrame(() => {
    painting = 0;
    const list = byId("list");
    if (list) paintRows(byId("bars"), list.scrollTop, list.clientHeight, rowHeight);
  });
}

function paintRows(canvas, scrolled, height, tall) {
  const context = canvasOf(canvas, view.width, height);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  grid(context, height);
  if (!rows.length) {
    context.fillStyle = ink.muted;
    context.fillText(view.run.requests.length ? "no request matches" : "no request was made", 0, 24);
  }
  const first = Math.max(0, Math.floor(scrolled / tall));
  const last = Math.min(rows.length, Math.ceil((scrolled + height) / tall));
  const inSight = rows.slice(first, last).flat();
  const yOf = (request) => request.row * tall - scrolled;
  for (const request of [hovered, view.selected]) if (inSight.includes(request)) light(context, request, yOf(request), tall);
  if (view.shown.length <= NAMED) for (const request of inSight) nameRow(context, request, yOf(request), tall);
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, view.width - GUTTER - RIGHT, height);
  context.clip();
  for (const request of inSight) drawRequest(context, request, yOf(request), tall);
  context.restore();
}

function light(context, request, y, tall) {
  context.fillStyle = ink.text;
  context.globalAlpha = request === view.selected ? 0.2 : 0.1;
  const left = Math.max(GUTTER, x(request.asked) - 4);
  context.fillRect(left, y - 1, Math.min(x(request.end) + 4, view.width - RIGHT) - left, tall + 2);
  context.globalAlpha = request === view.selected ? 0.6 : 0;
  context.fillRect(GUTTER, y + tall / 2 - 0.5, left - GUTTER, 1);
  context.globalAlpha = 1;
  if (view.shown.length > NAMED) nameRow(context, request, y, tall);
}

function grid(context, height) {
  context.fillStyle = ink.faint;
  for (const { at } of ticks()) context.fillRect(Math.round(x(at)), 0, 1, height);
  context.fillStyle = ink.fault;
  for (const fault of view.run.faults) {
    if (fault.applied === null || !visible(fault.from, fault.to)) continue;
    const chosen = fault === view.fault;
    const left = Math.max(GUTTER, x(fault.from));
    context.globalAlpha = chosen ? 0.14 : 0;
    context.fillRect(left, 0, Math.min(x(fault.to), view.width - RIGHT) - left, height);
    context.globalAlpha = chosen ? 0.9 : 0.35;
    if (fault.from >= view.from) for (let y = 0; y < height; y += 6) context.fillRect(Math.round(left), y, 1, 3);
  }
  context.globalAlpha = 1;
}

function drawRequest(context, request, y, tall) {
  const thick = Math.max(tall - (tall > 8 ? 4 : 2), 1);
  const top = y + (tall - thick) / 2;
  const colour = ink[request.outcome];
  bar(context, colour, 0.45, request.asked, request.end, top + thick / 2 - 0.5, 1);
  const choices = Math.max(1, request.prompts.length);
  const each = thick / choices;
  for (const attempt of request.attempts) {
    const inset = choices > 1 && each > 2 ? 0.5 : 0;
    const at = top + attempt.choice * each;
    bar(context, colour, attempt.last ? 0.95 : 0.42, attempt.began, attempt.until, at + inset, each - 2 * inset);
    if (!attempt.last && attempt.ended !== null) cap(context, ink.broken, attempt.ended, at, each);
  }
  if (!request.attempts.length) bar(context, colour, 0.95, request.asked, request.end, top, thick);
  if (request.first !== null) cap(context, ink.text, request.first, top, thick);
  for (const seam of request.seams) seamAt(context, seam, top + seam.choice * each, each);
  if (request.outcome === "broken" || request.outcome === "lost") cap(context, ink[request.outcome], request.end, y, tall);
}

function bar(context, colour, alpha, from, to, y, tall) {
  const left = Math.max(x(from), GUTTER - 2);
  context.globalAlpha = alpha;
  context.fillStyle = colour;
  context.fillRect(left, y, Math.max(1, x(to) - left), tall);
  context.globalAlpha = 1;
}

function cap(context, colour, at, y, tall) {
  context.fillStyle = colour;
  context.fillRect(x(at) - 0.6, y, 1.2, tall);
}

// Where the stream went on: a gap in the bar, and a stroke through it.
function seamAt(context, seam, y, tall) {
  context.fillStyle = ink.ground;
  context.fillRect(x(seam.at) - 3, y - 1, 6, tall + 2);
  context.fillStyle = ink.text;
  context.fillRect(x(seam.at) - 1, y - 1, 2, tall + 2);
}

function nameRow(context, request, y, tall) {
  const named = view.shown.length <= NAMED;
  if (!named && request === hovered && view.selected) return;
  context.fillStyle = named && request !== view.selected ? ink.muted : ink.text;
  context.fillText(clipped(request.name, GUTTER - 20), 0, Math.max(y + tall / 2 + 4, 11));
}

function rowAt(event) {
  const list = byId("list");
  const y = event.clientY - list.getBoundingClientRect().top + list.scrollTop;
  const px = event.clientX - list.getBoundingClientRect().left;
  const row = rows[Math.floor(y / rowHeight)] || [];
  if (view.shown.length <= NAMED) return row[0] || null;
  return row.find((request) => px >= x(request.asked) - 2 && px <= Math.max(x(request.end), x(request.asked) + 3) + 2) || null;
}

function showRow(request) {
  if (!view.shown.includes(request)) return;
  const list = byId("list");
  const [top, bottom] = [request.row * rowHeight, (request.row + 1) * rowHeight];
  if (top < list.scrollTop || bottom > list.scrollTop + list.clientHeight) {
    list.scrollTop = top - list.clientHeight / 2;
  }
}

function listenToList(list) {
  list.addEventListener("scroll", paintRequests);
  list.addEventListener("click", (event) => openRequest(rowAt(event)));
  list.addEventListener("pointermove", (event) => hover(rowAt(event), event));
  list.addEventListener("pointerleave", () => hover(null));
  list.addEventListener("keydown", (event) => {
    const at = view.shown.indexOf(view.selected);
    const page = Math.max(1, Math.floor(list.clientHeight / rowHeight) - 1);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = at < 0 && Number.isFinite(step) ? 0 : Math.min(Math.max(at + step, 0), view.shown.length - 1);
    openRequest(view.shown[next], { keepFocus: true });
  });
}

function hover(request, event) {
  const tip = byId("tip");
  tip.hidden = !request;
  if (request) {
    const tries = request.tries > 1 ? `, ${request.tries} attempts` : "";
    tip.replaceChildren(h("b", {}, words(request.name)), ` ${request.outcome}${tries}, ${seconds(request.end - request.asked)}`);
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 16}px`;
  }
  if (request !== hovered) paintRequests();
  hovered = request;
}
