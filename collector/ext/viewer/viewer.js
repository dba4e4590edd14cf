// The pages of `tallyroll view`: start, storage and episode. Everything that comes from a storage
// becomes text nodes, never markup. An exported page has the answers of the server in #exported.
(() => {
  "use strict";
  const FRAMES = 64, FRAMES_KEPT = 8, RATE = 30, POLL_MS = 1000;
  const page = document.getElementById("page");
  const exported = document.getElementById("exported");
  const kept = exported && JSON.parse(exported.textContent);
  const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  let turn = 0, plots = [];

  // --- elements ----------------------------------------------------------------------------------

  const visible = (text) => String(text).replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu,
    (each) => `\\u{${each.codePointAt(0).toString(16)}}`);

  function h(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat())
      if (child !== null && child !== undefined)
        made.append(child instanceof Node ? child : visible(child));
    return made;
  }

  function number(value) {
    if (value === null || value === undefined) return "-";
    if (Array.isArray(value)) return value.map(number).join(", ");
    if (typeof value !== "number") return String(value);
    return (Number.isInteger(value) || Math.abs(value) >= 1e5 ? whole : exact).format(value);
  }

  const bytes = (count) => count < 1000 ? `${count} B` : `${compact.format(count)}B`;
  const problem = (error) => h("pre", { class: "wrong", role: "alert" }, String(error.message).split("\n")
    .flatMap((line) => [line, document.createTextNode("\n")]));

  function tree(value) {
    if (Array.isArray(value) && value.every((each) => typeof each !== "object" || each === null))
      return document.createTextNode(visible(value.map(number).join(", ")));
    if (value === null || typeof value !== "object")
      return document.createTextNode(visible(typeof value === "string" ? value : number(value)));
    return h("table", { class: "facts" }, h("tbody", null, Object.entries(value).map(
      ([name, each]) => h("tr", null, h("th", { scope: "row" }, name), h("td", null, tree(each))))));
  }

  // --- requests ----------------------------------------------------------------------------------

  async function ask(path, options) {
    const answer = await fetch(path, options).catch(() => {
      throw new Error("The viewer does not answer. Start `tallyroll view` again.");
    });
    if (answer.ok) return answer;
    const said = await answer.json().catch(() => ({}));
    throw new Error(said.error ?? `${answer.status} ${answer.statusText}`);
  }

  async function load(path) {
    if (!kept) return (await ask(path)).json();
    if (!(path in kept)) throw new Error("The exported page does not include this.");
    return kept[path];
  }

  const change = async (path, body) =>
    (await ask(path, { method: "POST", body, headers: { "X-Tallyroll": "1" } })).json();

  async function episodesOf(dataset, { where, sort, descending, page: at }) {
    const base = `api/${dataset}/episodes`;
    if (!kept) {
      const asked = new URLSearchParams({ where, sort, descending: descending ? 1 : 0, page: at });
      return load(`${base}?${asked}`);
    }
    const found = await load(base), order = descending ? -1 : 1;
    const lines = [...found.lines].sort((a, b) => order * compared(a[sort], b[sort]));
    return { ...found, page: at, lines: lines.slice(at * found.per_page, (at + 1) * found.per_page) };
  }

  function compared(a, b) {
    const [x, y] = [a, b].map((each) => Array.isArray(each) ? each[0] : each);
    const [u, v] = [Number(x), Number(y)];
    if (Number.isNaN(u) || Number.isNaN(v)) return x < y ? -1 : x > y ? 1 : 0;
    return u - v;
  }

  // --- charts ------------------------------------------------------------------------------------

  // Lines are {name, values, low, high, bars, steps}. `onStep` is called with the index at the cursor.
  function chart({ x, lines, xLabel, height = 200, sync = null, onStep = null }) {
    const place = h("div", { class: "chart" }), legend = h("div", { class: "legend" });
    const at = h("output"), hidden = new Set(), first = [];
    let plot = null;
    const values = lines.map((line, index) => {
      const value = h("span");
      const button = h("button", { type: "button", "aria-pressed": "true", onclick() {
        if (!hidden.delete(index)) hidden.add(index);
        button.setAttribute("aria-pressed", String(!hidden.has(index)));
        for (const each of first[index]) plot.setSeries(each, { show: !hidden.has(index) });
      } }, h("span", { class: `swatch c${index % 8}` }), line.name, value);
      legend.append(button);
      return value;
    });
    legend.append(at);

    function tell(index) {
      const known = index !== null && index !== undefined;
      at.textContent = known ? `at ${number(x[index])}` : "";
      lines.forEach((line, i) => { values[i].textContent = known ? `: ${number(line.values[index])}` : ""; });
      if (known && onStep) onStep(index);
    }

    function make() {
      const rows = [x], series = [{}], bands = [];
      first.length = 0;
      lines.forEach((line, index) => {
        const stroke = colour(`--c${index % 8}`), show = !hidden.has(index);
        const look = { show, stroke, width: 1.5, points: { show: x.length < 3 } };
        first.push([series.length]);
        if (line.low) {
          const edge = { show, stroke: "transparent", width: 0, points: { show: false } };
          first[index].push(series.length + 1, series.length + 2);
          bands.push({ series: [series.length, series.length + 1], fill: `${stroke}2e` });
          rows.push(line.high, line.low);
          series.push(edge, edge);
        }
        if (line.bars) Object.assign(look, { paths: uPlot.paths.bars({ size: [0.9] }), fill: `${stroke}66` });
        else if (line.steps) look.paths = uPlot.paths.stepped({ align: 1 });
        rows.push(line.values);
        series.push(look);
      });
      const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 },
        ticks: { show: false }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
        values: (_, marks) => marks.map((each) => (each === null ? "" : compact.format(each))) };
      plot = new uPlot({
        width: place.clientWidth || 300, height, series, bands,
        scales: { x: { time: false }, ...(lines[0].bars ? { y: { range: (_, low, high) => [0, high || 1] } } : {}) },
        legend: { show: false },
        axes: [{ ...axis, label: xLabel, labelSize: 20, size: 32 }, { ...axis, size: 56 }],
        cursor: { y: false, points: { size: 7 }, ...(sync ? { sync: { key: sync } } : {}) },
        hooks: { setCursor: [(own) => tell(own.cursor.idx)] },
      }, rows, place);
    }

    place.style.minHeight = `${height}px`;
    const watch = new ResizeObserver(() => {
      const width = place.clientWidth;
      if (!width) return;
      if (!plot) make();
      else if (width !== plot.width) plot.setSize({ width, height });
    });
    watch.observe(place);
    const own = {
      redraw() { if (plot) { plot.destroy(); make(); } },
      close() { watch.disconnect(); if (plot) plot.destroy(); },
      point(index) { if (plot) plot.setCursor({ left: plot.valToPos(x[index], "x"), top: 1 }); },
    };
    plots.push(own);
    return { element: h("div", null, place, legend), ...own };
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((each) => each.redraw()));

  // --- start and storage -------------------------------------------------------------------------

  const environments = (facts) => [...new Set(facts.runs.map(
    (run) => run.environment?.id ?? run.environment?.type ?? "unknown environment"))].join(", ");

  const summarised = (facts) => ({
    environment: environments(facts), format: facts.format, rows: facts.rows, size: bytes(facts.bytes),
    ...(facts.ring ? { ring: `the last ${number(facts.ring)} rows` } : {}),
    runs: facts.runs.length, created: facts.created, ...(facts.being_written ? { state: "being written" } : {}),
    ...(facts.ledger ?? {}),
  });

  async function start(names) {
    const all = await Promise.all(names.map(async (name, index) => {
      try {
        return { name, index, facts: await load(`api/${index}/summary`), trends: await load(`api/${index}/trends`) };
      } catch (error) {
        return { name, index, error };
      }
    }));
    const good = all.filter((each) => !each.error);
    const told = good.map((each) => summarised(each.facts));
    const fields = [...new Set(told.flatMap(Object.keys))];
    const found = [h("h1", null, `${names.length} storages`)];
    for (const each of all.filter((one) => one.error)) found.push(h("h2", null, each.name), problem(each.error));
    found.push(h("div", { class: "wide compared" }, h("table", null,
      h("thead", null, h("tr", null, h("th"), good.map((each) => h("th", { scope: "col" },
        h("a", { href: `#/${each.index}` }, each.name))))),
      h("tbody", null, fields.map((field) => h("tr", null, h("th", { scope: "row" }, field),
        told.map((each) => h("td", null, number(each[field])))))))));
    for (const [title, of] of [["Returns", (trends) => trends.returns[0]], ["Lengths", (trends) => trends.lengths]]) {
      const shown = good.filter((each) => of(each.trends));
      const x = [...new Set(shown.flatMap((each) => each.trends.x))].sort((a, b) => a - b);
      const lines = shown.map((each) => {
        const mean = new Map(each.trends.x.map((row, index) => [row, of(each.trends).mean[index]]));
        return { name: each.name, values: x.map((row) => mean.get(row)) };
      });
      if (x.length) found.push(h("h2", null, `${title} of episodes`), chart({ x, lines, xLabel: "row" }).element);
    }
    found.push(later("Histograms of columns with declared bounds", async () => histograms(await Promise.all(
      good.map(async ({ name, index }) => ({ name, columns: await load(`api/${index}/histograms`) }))))));
    return found;
  }

  function trendCharts(trends) {
    if (!trends.x.length) return [h("p", { class: "quiet" }, "No episode from its first step on has ended yet.")];
    const { x } = trends, one = trends.returns.length === 1;
    const spread = (name, of) => ({ name, values: of.mean, low: of.low, high: of.high });
    const charts = [
      ["Returns", trends.returns.map((each, index) => spread(one ? "mean" : `mean of reward ${index}`, each))],
      ["Lengths", [spread("mean", trends.lengths)]],
      ["Shares of ends", trends.end_names.map((name, index) => ({ name, values: trends.ends[index] }))],
    ];
    return [
      h("p", { class: "quiet" }, `${number(trends.episodes)} episodes from their first step on. Bands are the `
        + "least and the greatest value at a point."),
      h("div", { class: "many" }, charts.map(([title, lines]) =>
        h("section", null, h("h3", null, title), chart({ x, lines, xLabel: "row", sync: "trends" }).element))),
    ];
  }

  const COLUMNS = [["id", "id"], ["lane", "lane"], ["length", "length"], ["return", "return"], ["end", "end"],
    ["first_row", "first row"], ["version_first", "first policy version"], ["version_last", "last policy version"]];

  function episodeTable(dataset) {
    const state = { where: "", sort: "first_row", descending: false, page: 0 };
    const body = h("tbody"), note = h("div", { class: "quiet", role: "status" });
    const input = h("input", { type: "search", placeholder: "return > 5 and end == 'terminated'", spellcheck: "false" });
    const heads = COLUMNS.map(([field, title]) => h("th", { scope: "col", class: field === "end" ? null : "n" },
      h("button", { type: "button", onclick() {
        Object.assign(state, { sort: field, descending: state.sort === field && !state.descending, page: 0 });
        show();
      } }, title)));
    const turnTo = (by) => () => { state.page += by; show(); };
    const back = h("button", { type: "button", onclick: turnTo(-1) }, "Previous");
    const on = h("button", { type: "button", onclick: turnTo(1) }, "Next");
    const own = turn;
    let asked = 0;

    function line(each) {
      const cells = COLUMNS.map(([field]) => field === "id"
        ? h("td", { class: "n" }, h("a", { href: `#/${dataset}/episode/${each.id}` }, each.id))
        : h("td", { class: field === "end" ? each.end : "n" }, field === "end" ? each.end : number(each[field])));
      return h("tr", null, cells, h("td", { class: "flag" }, each.flag));
    }

    async function show() {
      const mine = ++asked;
      let found;
      try {
        found = await episodesOf(dataset, state);
      } catch (error) {
        if (mine === asked) note.replaceChildren(problem(error));
        return;
      }
      if (mine !== asked || own !== turn) return;
      heads.forEach((head, index) => head.setAttribute("aria-sort",
        COLUMNS[index][0] !== state.sort ? "none" : state.descending ? "descending" : "ascending"));
      body.replaceChildren(...found.lines.map(line));
      const from = found.page * found.per_page;
      back.disabled = !from;
      on.disabled = from + found.per_page >= found.total;
      const shown = `${number(found.lines.length ? from + 1 : 0)} to ${number(from + found.lines.length)}`;
      note.replaceChildren(found.error ?? `${shown} of ${number(found.total)} episodes`
        + (found.total === found.counted ? "" : ` (${number(found.counted)} without the condition)`)
        + (found.complete ? "." : `. Counted ${number(found.rows)} of ${number(found.head)} rows so far.`)
        + (found.left_out ? ` ${found.left_out}` : ""));
      if (!found.complete) setTimeout(() => { if (mine === asked && own === turn) show(); }, POLL_MS);
    }

    show();
    const form = h("form", { onsubmit(event) {
      event.preventDefault();
      Object.assign(state, { where: input.value, page: 0 });
      show();
    } }, h("label", null, "Episodes where", input), h("button", null, "Filter"));
    return [h("h2", null, "Episodes"), kept ? null : form, note,
      h("div", { class: "wide" }, h("table", null, h("thead", null, h("tr", null, heads, h("th", null, "flag"))), body)),
      h("div", { class: "pager" }, back, on)];
  }

  // Histograms of columns with declared bounds. Those of several storages share a chart, as shares of their values.
  function histograms(sources) {
    const shown = new Map();
    for (const { name, columns } of sources) for (const column of columns) column.elements.forEach((each, index) => {
      const title = column.elements.length > 1 ? `${column.name}[${index}]` : column.name;
      shown.set(title, [...shown.get(title) ?? [], { name, rows: column.rows, ...each }]);
    });
    if (!shown.size) return [h("p", { class: "quiet" }, "No column has declared bounds.")];
    const several = sources.length > 1;
    const drawn = ([title, found]) => {
      const middles = (each) => each.counts.map((_, i) => (each.edges[i] + each.edges[i + 1]) / 2);
      const x = [...new Set(found.flatMap(middles))].sort((one, other) => one - other);
      const lines = found.map((each) => {
        const total = several ? each.counts.reduce((sum, count) => sum + count, 0) || 1 : 1;
        const counts = new Map(middles(each).map((middle, i) => [middle, each.counts[i] / total]));
        return { name: several ? each.name : "values", values: x.map((middle) => counts.get(middle)), bars: !several };
      });
      const facts = found.map((each) => {
        const outside = [["below", each.below], ["above", each.above], ["not finite", each.not_finite]]
          .filter(([, count]) => count).map(([name, count]) => `${number(count)} ${name}`).join(", ");
        return h("p", { class: outside ? "wrong" : "quiet" }, `${several ? `${each.name}: ` : ""}bounds `
          + `${number(each.low)} to ${number(each.high)}, ${number(each.rows)} rows`
          + (outside ? `; outside: ${outside}` : ""));
      });
      return h("section", null, h("h3", null, title), facts, chart({ x, lines, xLabel: "value", height: 160 }).element);
    };
    return [...(several ? [h("p", { class: "quiet" }, "Each line is one storage: the share of its values in each bin.")] : []),
      h("div", { class: "many" }, [...shown].map(drawn))];
  }

  // A section that loads when it is opened.
  function later(title, make) {
    const box = h("div");
    return h("details", { async ontoggle(event) {
      if (!event.target.open || box.childNodes.length) return;
      box.replaceChildren(h("p", { class: "quiet", role: "status" }, "Reading …"));
      box.replaceChildren(...await make().catch((error) => [problem(error)]));
    } }, h("summary", null, title), box);
  }

  function verification(dataset) {
    const box = h("div", { role: "status" }), own = turn;
    const list = (found, kind) => found.map((each) => h("div", null, h("h3", null, kind + each.text),
      h("ul", null, each.places.map((place) => h("li", null, place.trajectory === null ? place.text
        : h("a", { href: `#/${dataset}/episode/${place.trajectory}` }, place.text))))));
    function show(found) {
      button.disabled = found.state === "running";
      if (found.state === "running")
        box.replaceChildren(`Verifying: ${bytes(found.done)} of ${bytes(found.total)}.`);
      else if (found.state === "failed") box.replaceChildren(problem(new Error(found.error)));
      else if (found.state === "done")
        box.replaceChildren(h("p", { class: found.sound ? "complete" : "wrong" }, found.sound ? "Sound: " : "Not sound: ",
          `${found.checked.length} checks of ${number(found.rows)} rows, ${found.findings.length} findings.`),
        ...list(found.findings, ""), ...list(found.notes, "note: "));
      if (found.state === "running") setTimeout(() => { if (own === turn) run(load(path)); }, POLL_MS);
    }
    const path = `api/${dataset}/verify`;
    const run = (answer) => answer.then(show, (error) => box.replaceChildren(problem(error)));
    const button = h("button", { type: "button", onclick: () => run(change(path, "")) }, "Verify all rows");
    run(load(path));
    return [h("h2", null, "Verification"), kept ? null : h("div", { class: "bar-of-buttons" }, button), box];
  }

  async function storage(dataset) {
    const facts = await load(`api/${dataset}/summary`), trends = h("div"), own = turn;
    async function showTrends() {
      const found = await load(`api/${dataset}/trends`).catch((error) => error);
      if (own !== turn) return;
      trends.replaceChildren(...found instanceof Error ? [problem(found)] : trendCharts(found));
      if (found.complete === false) setTimeout(() => { if (own === turn) showTrends(); }, 3 * POLL_MS);
    }
    showTrends();
    const { ledger, ...rest } = summarised({ ...facts, ledger: null });
    return [
      h("h1", null, environments(facts)), h("p", { class: "quiet" }, facts.path),
      kept ? h("p", { class: "problems" }, kept.left_out) : null,
      h("div", { class: "many" },
        h("section", null, h("h2", null, "Storage"), tree(rest)),
        h("section", null, h("h2", null, "Ledger"), facts.ledger ? tree(facts.ledger)
          : h("p", { class: "quiet" }, "No ledger: no collector wrote these rows last."))),
      h("p", null, h("a", { href: `#/${dataset}/episode/first` }, "Show the first episode")),
      h("h2", null, "Trends"), trends,
      ...episodeTable(dataset),
      later("Histograms of columns with declared bounds", async () => histograms([{ name: "", columns: await load(`api/${dataset}/histograms`) }])),
      ...verification(dataset),
      h("h2", null, "Columns and provenance"),
      h("details", null, h("summary", null, `${facts.columns.length} columns`), tree(Object.fromEntries(
        facts.columns.map((each) => [each.name, `${each.dtype} [${each.shape.join(", ")}]`])))),
      facts.runs.map((run, index) => h("details", null, h("summary", null, `Run ${index}: ${number(run.rows)} rows`), tree(run))),
    ].flat();
  }

  // --- episode -----------------------------------------------------------------------------------

  function images(encoding, content, { height, width, channels }) {
    const data = new Uint8Array(content), found = [];
    if (encoding === "raw") {
      for (let begin = 0; begin < data.length; begin += height * width * channels) {
        const image = new ImageData(width, height);
        for (let pixel = 0; pixel < height * width; pixel++) {
          for (let channel = 0; channel < 3; channel++)
            image.data[4 * pixel + channel] = data[begin + pixel * channels + (channels === 3 ? channel : 0)];
          image.data[4 * pixel + 3] = 255;
        }
        found.push(image);
      }
      return Promise.all(found);
    }
    const view = new DataView(content);
    for (let at = 0; at < data.length;) {
      const size = view.getUint32(at, true);
      found.push(createImageBitmap(new Blob([data.subarray(at + 4, at + 4 + size)], { type: "image/webp" })));
      at += 4 + size;
    }
    return Promise.all(found);
  }

  async function framesOf(dataset, id, column, start, picture) {
    const path = `api/${dataset}/frames/${id}?column=${column}&start=${start}`;
    if (kept) {
      const found = await load(path);
      return images("raw", Uint8Array.from(atob(found.content), (each) => each.charCodeAt(0)).buffer, found);
    }
    const answer = await ask(path);
    return images(answer.headers.get("x-encoding"), await answer.arrayBuffer(), picture);
  }

  // The frames of one column. `moved` is called with the step that is shown.
  function film(dataset, episode, moved) {
    const canvas = h("canvas", { class: "film", width: 1, height: 1, role: "img", "aria-label": "frame" });
    const context = canvas.getContext("2d"), blocks = new Map(), own = turn;
    const last = episode.length - 1, note = h("output"), wrong = h("div");
    let step = 0, column = 0, drawing = 0, timer = null;

    function block(index) {
      const key = `${column}/${index}`;
      if (!blocks.has(key)) {
        blocks.set(key, framesOf(dataset, episode.id, column, index * FRAMES, episode.pictures[column]));
        for (const old of [...blocks.keys()].slice(0, -FRAMES_KEPT)) blocks.delete(old);
      }
      return blocks.get(key);
    }

    async function show(to) {
      step = Math.max(0, Math.min(last, to));
      slider.value = String(step);
      note.textContent = `step ${number(step + episode.first_step)} of ${number(last + episode.first_step)}`;
      const mine = ++drawing;
      try {
        const frame = (await block(Math.floor(step / FRAMES)))[step % FRAMES];
        if (mine !== drawing || !frame) return;
        if (canvas.width !== frame.width || canvas.height !== frame.height)
          Object.assign(canvas, { width: frame.width, height: frame.height });
        if (frame instanceof ImageData) context.putImageData(frame, 0, 0);
        else context.drawImage(frame, 0, 0);
        wrong.replaceChildren();
        const next = Math.floor(step / FRAMES) + 1;
        if (next * FRAMES <= last && !kept) block(next).catch(() => blocks.delete(`${column}/${next}`));
      } catch (error) {
        blocks.delete(`${column}/${Math.floor(step / FRAMES)}`);
        stop();
        wrong.replaceChildren(problem(error));
      }
    }

    function stop() {
      cancelAnimationFrame(timer);
      timer = null;
      play.textContent = "Play";
    }

    function run() {
      let before = performance.now(), busy = false;
      if (step >= last) step = -1;
      play.textContent = "Pause";
      const tick = async (now) => {
        if (own !== turn || timer === null) return;
        timer = requestAnimationFrame(tick);
        if (busy || now - before < 1000 / RATE - 2) return;
        before = now;
        busy = true;
        await show(step + 1);
        moved(step);
        busy = false;
        if (step >= last) stop();
      };
      timer = requestAnimationFrame(tick);
    }

    const slider = h("input", { type: "range", min: 0, max: last, value: 0, "aria-label": "step", oninput() {
      stop();
      show(Number(slider.value));
      moved(step);
    } });
    const play = h("button", { type: "button", onclick: () => (timer === null ? run() : stop()) }, "Play");
    const choice = h("select", { "aria-label": "column", onchange() { column = choice.selectedIndex; show(step); } },
      episode.pictures.map((each) => h("option", null, each.name)));
    show(0);
    return { show, element: h("section", null, h("h2", null, "Frames"), canvas, wrong,
      h("div", { class: "bar-of-buttons" }, play, slider, note, episode.pictures.length > 1 ? choice : null)) };
  }

  function flagForm(dataset, episode) {
    const input = h("input", { value: episode.flag, maxlength: 1000 }), note = h("span", { role: "status" });
    return h("form", { async onsubmit(event) {
      event.preventDefault();
      const said = await change(`api/${dataset}/flag/${episode.id}`, input.value)
        .then(() => "Saved.", (error) => error.message);
      note.textContent = visible(said);
    } }, h("label", null, "Flag", input), h("button", null, "Save"), note);
  }

  async function episode(dataset, id) {
    const [facts, found] = await Promise.all([load(`api/${dataset}/summary`), load(`api/${dataset}/episode/${id}`)]);
    const charts = [];
    let following = false;
    const moved = (step) => {
      following = true;
      if (charts.length) charts[0].point(Math.min(found.x.length - 1, Math.round(step * found.x.length / found.length)));
      following = false;
    };
    const shown = found.pictures.length ? film(dataset, found, moved) : null;
    const x = found.x.map((each) => each + found.first_step);
    const sections = found.columns.map((column) => {
      const scalar = column.elements === 1;
      const lines = column.values.map((values, index) =>
        ({ name: scalar ? column.name : `[${index}]`, values, steps: column.steps }));
      const made = chart({ x, lines, xLabel: "step", sync: "episode", height: scalar ? 140 : 220,
        onStep: (index) => { if (shown && !following) shown.show(found.x[index]); } });
      charts.push(made);
      return h("section", null, h("h3", null, column.name
        + (column.elements > lines.length ? `: ${lines.length} of ${number(column.elements)} elements` : "")),
      column.not_finite ? h("p", { class: "wrong" }, `${number(column.not_finite)} values are not finite`) : null, made.element);
    });
    const link = (to, title) => to === null ? null : h("a", { href: `#/${dataset}/episode/${to}` }, title);
    const names = ["end", "return", "length", "lane", "reset_seed", "first_row", "last_row", "first_step",
      "version_first", "version_last"];
    return [
      h("nav", null, h("a", { href: `#/${dataset}` }, facts.path), " · ", link(found.before, "previous episode"), " ",
        link(found.after, "next episode")),
      h("h1", null, `Episode ${found.id}`),
      tree(Object.fromEntries(names.filter((name) => found[name] !== undefined)
        .map((name) => [name.replaceAll("_", " "), found[name]]))),
      facts.flags ? flagForm(dataset, found) : found.flag ? h("p", { class: "flag" }, found.flag) : null,
      shown?.element ?? null,
      h("h2", null, "Curves"),
      found.every > 1 ? h("p", { class: "quiet" }, `Each two points are the least and the greatest of ${found.every} steps.`) : null,
      ...sections,
    ];
  }

  // --- pages -------------------------------------------------------------------------------------

  async function route() {
    const own = ++turn;
    plots.forEach((each) => each.close());
    plots = [];
    page.setAttribute("aria-busy", "true");
    let content;
    try {
      const { datasets } = await load("api");
      const [, dataset, what, id] = location.hash.split("/");
      if (!dataset && datasets.length > 1) content = await start(datasets);
      else if (what === "episode") content = await episode(Number(dataset), id);
      else content = await storage(Number(dataset ?? 0));
      if (datasets.length > 1 && dataset) content = [h("nav", null, h("a", { href: "#/" }, "All storages")), ...content];
    } catch (error) {
      content = [h("h1", null, "This page cannot be shown"), problem(error), h("p", null, h("a", { href: "#/" }, "Start page"))];
    }
    if (own !== turn) return;
    page.replaceChildren(...content.filter((each) => each !== null));
    page.setAttribute("aria-busy", "false");
    document.title = visible(`${page.querySelector("h1").textContent} · Tallyroll`);
    scrollTo(0, 0);
  }

  addEventListener("hashchange", route);
  route();
})();
