// SPDX-License-Identifier: Apache-2.0
//
// Draws a sidecar's status and keeps it up to date. Data reaches the document only as text nodes, as attributes that
// cannot run anything, and as strokes on a canvas or in an SVG: nothing here parses HTML.
"use strict";

(function () {
  const root = document.getElementById("headgate");
  const here = document.currentScript.src;
  const statusAddress = new URL("status.json", here).href;
  const sparkBase = root.dataset.spark;
  const alone = document.body.classList.contains("hg-alone");
  const HEADING = alone ? "h2" : "h4";
  const SUBHEADING = alone ? "h3" : "h5";
  const POLL_MS = 1000;
  const EAGER_MS = 250;
  const GONE_MS = 5000;
  const POINTS_MAX = 180;
  const LANES_MAX = 24;
  const STATES = [
    ["r", "ready"], ["f", "finished"], ["w", "waiting"], ["s", "stuck"],
    ["a", "accepted"], ["o", "over"], ["n", "not started"],
  ];
  const MEANING = {
    r: "works", f: "has ended well", w: "waits for something", s: "has waited for 5 s or longer",
    a: "restores its state", o: "its last attempt is over, the next has not begun", n: "no task yet",
  };
  const PHASES = ["waiting", "closing", "snapshotting", "acknowledging", "collecting", "uploading", "storing"];
  const BINS = 28; // four for each decade
  const LINE_MAX = 48; // a longer text in a table is wrapped
  const LATENCIES = [
    ["confirm", "Event confirmed", "until the other end has an event"],
    ["request", "Request answered", "until a subtask has the answer to its request"],
    ["checkpoint", "Checkpoint", "from its trigger until it is complete"],
    ["fact", "Fact of Spark", "until the coordinator knows it"],
  ];

  let status = null;
  let link = {kind: "waiting", text: "waiting for the sidecar"};
  let view = null;
  let span = 600;
  const points = new Map();

  // --- the document --------------------------------------------------------------------------------------------

  function el(tag, attributes, ...children) {
    return furnish(document.createElement(tag), attributes, children);
  }

  function svg(tag, attributes, ...children) {
    return furnish(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  }

  function furnish(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined) node.setAttribute(name, value);
    }
    for (const child of children.flat()) {
      if (child !== null && child !== undefined) node.append(child);
    }
    return node;
  }

  function say(node, text) {
    const wanted = String(text);
    if (node.textContent !== wanted) node.textContent = wanted;
  }

  function show(node, visible) {
    if (node.hidden === visible) node.hidden = !visible;
  }

  // Rows are lists of cells; a cell is a text or {text, href, kind, title, node}. A cell that has not changed is not
  // touched, so that focus and selection stay where they are, even if a time beside them changes.
  function setRows(body, rows, empty) {
    const wanted = rows.length || !empty ? rows : [[{text: empty, kind: "hg-empty", span: 99}]];
    while (body.rows.length > wanted.length) body.deleteRow(-1);
    wanted.forEach((cells, index) => {
      const row = body.rows[index] || body.insertRow();
      while (row.cells.length > cells.length) row.deleteCell(-1);
      cells.forEach((cell, place) => {
        const old = row.cells[place];
        const key = JSON.stringify(cell);
        if (old && old.hgKey === key) return;
        const made = makeCell(cell);
        made.hgKey = key;
        if (old) old.replaceWith(made);
        else row.append(made);
      });
    });
  }

  function makeCell(cell) {
    const spec = typeof cell === "object" && cell !== null ? cell : {text: cell};
    const node = el(spec.head ? "th" : "td", {class: spec.kind, colspan: spec.span, scope: spec.head ? "row" : null});
    if (spec.title) node.title = spec.title;
    if (String(spec.text).length > LINE_MAX) node.classList.add("hg-wrap");
    if (spec.phases) node.append(phaseBar(spec.phases, spec.longest));
    else if (spec.href) node.append(el("a", {href: spec.href}, String(spec.text)));
    else if (spec.tag) node.append(el("span", {class: "hg-tag hg-" + spec.tag}, String(spec.text)));
    else if (spec.long) node.append(el("div", {class: "hg-long"}, String(spec.text)));
    else node.append(String(spec.text));
    return node;
  }

  function table(label, columns) {
    const heads = columns.map(([name, kind]) => el("th", {scope: "col", class: kind}, name));
    const body = el("tbody");
    const frame = el(
      "div", {class: "hg-scroll", role: "region", tabindex: "0", "aria-label": label},
      el("table", {class: "hg-table"}, el("thead", null, el("tr", null, heads)), body),
    );
    return {frame, body};
  }

  function section(title, note, ...children) {
    const aside = el("span", {class: "hg-note"}, note || "");
    return {
      node: el("section", {class: "hg-section"}, el(HEADING, null, title, " ", aside), children),
      note: aside,
    };
  }

  // --- words and numbers ---------------------------------------------------------------------------------------

  const whole = new Intl.NumberFormat("en-US", {maximumFractionDigits: 0});

  // An integer that is too long for a number comes as its digits.
  function number(value) {
    return whole.format(typeof value === "string" && /^-?\d+$/.test(value) ? BigInt(value) : value);
  }

  // A share or an amount of money, which has decimals, beside counts.
  function figureText(value) {
    return typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : number(value);
  }

  function rate(value) {
    return value > 0 && value < 99.95 ? value.toFixed(1) : number(value);
  }

  function micros(value) {
    if (value === null) return "–";
    if (value < 999.5) return value.toFixed(0) + " µs";
    if (value < 999500) return (value / 1e3).toPrecision(3) + " ms";
    return (value / 1e6).toFixed(2) + " s";
  }

  function seconds(value) {
    if (value === null || value === undefined) return "–";
    if (value < 0.9995) return (value * 1e3).toFixed(0) + " ms";
    if (value < 9.95) return value.toFixed(1) + " s";
    if (value < 90) return value.toFixed(0) + " s";
    if (value < 5400) return Math.floor(value / 60) + " min" + (value % 60 < 1 ? "" : " " + Math.floor(value % 60) + " s");
    return Math.floor(value / 3600) + " h " + Math.floor((value % 3600) / 60) + " min";
  }

  function ago(at) {
    const age = status.taken_at - at;
    return age < 1 ? "now" : (age < 90 ? Math.floor(age) + " s" : seconds(age)) + " ago";
  }

  function clock(at) {
    return new Date(at * 1000).toLocaleTimeString("en-GB");
  }

  function bytes(value) {
    if (value < 1000) return value + " B";
    if (value < 1e6) return (value / 1e3).toPrecision(3) + " kB";
    if (value < 1e9) return (value / 1e6).toPrecision(3) + " MB";
    return (value / 1e9).toPrecision(3) + " GB";
  }

  function many(count, one, more) {
    return number(count) + " " + (count === 1 ? one : more || one + "s");
  }

  function color(name) {
    return getComputedStyle(root).getPropertyValue("--hg-" + name).trim();
  }

  function operatorHash(name, subtask) {
    return "#/operator/" + encodeURIComponent(name) + (subtask === undefined ? "" : "/subtask/" + subtask);
  }

  function route() {
    const [, kind, name, , subtask] = location.hash.split("/");
    if (kind !== "operator" || !name) return {name: null};
    try {
      return {name: decodeURIComponent(name), subtask: /^\d+$/.test(subtask || "") ? Number(subtask) : null};
    } catch (error) {
      return {name: null};
    }
  }

  function at(operator, column, index) {
    const values = operator.attempts[column];
    return Array.isArray(values) ? values[index] : values;
  }

  function countCells(text) {
    const counts = {};
    for (const letter of text) counts[letter] = (counts[letter] || 0) + 1;
    return counts;
  }

  // --- pieces --------------------------------------------------------------------------------------------------

  // A stacked bar of what becomes of the subtasks.
  function stateBar() {
    const parts = STATES.map(([letter]) => el("span", {class: "hg-part hg-cell-" + letter}));
    const bar = el("div", {class: "hg-states", role: "img"}, parts);
    return {
      node: bar,
      update(operator) {
        const counts = countCells(operator.cells);
        STATES.forEach(([letter], index) => {
          parts[index].style.flexGrow = String(counts[letter] || 0);
          show(parts[index], Boolean(counts[letter]));
        });
        const text = STATES.filter(([letter]) => counts[letter]).map(([letter, name]) => counts[letter] + " " + name);
        bar.setAttribute("aria-label", "Subtasks: " + text.join(", "));
      },
    };
  }

  // A line for each series over the last three minutes, or less if the page has been open for less.
  function sparkline(label, series) {
    const lines = series.map((one) => svg("polyline", {class: "hg-line hg-line-" + one.kind}));
    const areas = series.map((one) => svg("polygon", {class: "hg-area hg-area-" + one.kind}));
    const values = series.map((one) => el("span", {class: "hg-value hg-value-" + one.kind}));
    const chart = svg(
      "svg", {class: "hg-spark", viewBox: "0 0 180 36", preserveAspectRatio: "none", "aria-hidden": "true"},
      areas, lines,
    );
    const legend = series.map((one, index) => el("span", {class: "hg-figure"}, values[index], " ", el("small", null, one.name)));
    return {
      node: el("div", {class: "hg-meter"}, el("div", {class: "hg-label"}, label), el("div", {class: "hg-figures"}, legend), chart),
      update(name, operator) {
        const known = points.get(name) || [];
        const end = known.length ? known[known.length - 1].at : 0;
        const stretch = known.length ? 180 / Math.max(20, end - known[0].at) : 1;
        const top = Math.max(1, ...known.map((point) => Math.max(...series.map((one) => point.rates[one.index]))));
        series.forEach((one, index) => {
          say(values[index], rate(operator.rates[one.index]));
          const drawn = known.map((point) => {
            const x = 180 - (end - point.at) * stretch;
            return x.toFixed(1) + "," + (35 - (33 * point.rates[one.index]) / top).toFixed(1);
          });
          lines[index].setAttribute("points", drawn.join(" "));
          const first = known.length ? 180 - (end - known[0].at) * stretch : 180;
          areas[index].setAttribute("points", [first.toFixed(1) + ",36", ...drawn, "180,36"].join(" "));
        });
      },
    };
  }

  function tile(label) {
    const value = el("div", {class: "hg-big"});
    const note = el("div", {class: "hg-note"});
    return {
      node: el("div", {class: "hg-tile"}, el("div", {class: "hg-label"}, label), value, note),
      set(text, more, kind) {
        say(value, text);
        say(note, more || "");
        value.className = "hg-big" + (kind ? " hg-" + kind : "");
      },
    };
  }

  function phaseBar(phases, longest) {
    const total = PHASES.reduce((sum, phase) => sum + (phases[phase] || 0), 0);
    const bar = el("div", {class: "hg-phases", role: "img"});
    const text = [];
    for (const phase of PHASES) {
      const lasted = phases[phase] || 0;
      if (!lasted) continue;
      const part = el("span", {class: "hg-phase hg-phase-" + phase, title: phase + " " + seconds(lasted)});
      part.style.flexGrow = String(lasted / total);
      bar.append(part);
      text.push(phase + " " + seconds(lasted));
    }
    bar.style.width = Math.max(4, (100 * total) / (longest || total || 1)) + "%";
    bar.setAttribute("aria-label", text.join(", ") || "no phase");
    return bar;
  }

  // --- the line about the sidecar, and the diagnosis -------------------------------------------------------------

  const dot = el("span", {class: "hg-dot"});
  const linkText = el("strong");
  const facts = {};
  const factNodes = ["Address", "Up for", "Facts from Spark", "Event loop, p99", "Cores"].map((name) => {
    facts[name] = el("dd");
    return el("div", null, el("dt", null, name), facts[name]);
  });
  const bar = el("div", {class: "hg-bar"}, el("div", {class: "hg-live", role: "status"}, dot, linkText), el("dl", null, factNodes));
  const diagnosisList = el("ul");
  const diagnosisTitle = el(HEADING);
  const diagnosis = el("div", {class: "hg-diagnosis", role: "status", "aria-label": "Diagnosis"}, diagnosisTitle, diagnosisList);
  const nothing = el("p", {class: "hg-empty"}, "No figures yet. The sidecar sends them within some seconds; if none come, its log says why.");
  const stage = el("div", {class: "hg-view", tabindex: "-1"});
  root.replaceChildren(bar, diagnosis, nothing, stage);

  function drawBar() {
    dot.className = "hg-dot hg-dot-" + link.kind;
    say(linkText, link.text);
    root.classList.toggle("hg-stale", link.kind !== "live");
    show(bar.lastChild, status !== null);
    show(diagnosis, status !== null);
    show(nothing, status === null && link.kind === "waiting");
    if (!status) return;
    say(facts.Address, status.address + (status.tls ? " (TLS)" : ""));
    say(facts["Up for"], seconds(Math.floor(status.uptime_s)));
    say(facts["Facts from Spark"], number(status.relay.facts) + (status.relay.dropped ? ", " + number(status.relay.dropped) + " lost" : "") + " (" + status.relay.kind + ")");
    facts["Facts from Spark"].className = status.relay.dropped ? "hg-bad" : "";
    say(facts["Event loop, p99"], status.loop_lag_ms[0].toFixed(1) + " ms late, max " + status.loop_lag_ms[1].toFixed(0) + " ms");
    facts["Event loop, p99"].className = status.loop_lag_ms[1] >= 250 ? "hg-bad" : "";
    show(facts.Cores.parentNode, status.cores !== null);
    say(facts.Cores, status.cores === null ? "" : status.cores);
    drawDiagnosis();
  }

  function drawDiagnosis() {
    const sentences = status.sentences;
    diagnosis.className = "hg-diagnosis " + (sentences.length ? "hg-waits" : "hg-moves");
    say(diagnosisTitle, sentences.length ? "What waits, and for whom" : "Nothing waits");
    while (diagnosisList.children.length > sentences.length) diagnosisList.lastChild.remove();
    sentences.forEach((sentence, index) => {
      const text = sentence.charAt(0).toUpperCase() + sentence.slice(1) + ".";
      if (!diagnosisList.children[index]) diagnosisList.append(el("li"));
      say(diagnosisList.children[index], text);
    });
    show(diagnosisList, sentences.length > 0);
  }

  // --- overview ------------------------------------------------------------------------------------------------

  function overview() {
    const cards = new Map();
    const grid = el("div", {class: "hg-grid"});
    const none = el("p", {class: "hg-empty"}, "No operator is coordinated now.");
    stage.replaceChildren(grid, none);
    return {
      name: null,
      update() {
        const names = status.operators.map((operator) => operator.name);
        for (const [name, card] of cards) {
          if (!names.includes(name)) {
            card.node.remove();
            cards.delete(name);
          }
        }
        status.operators.forEach((operator, index) => {
          let card = cards.get(operator.name);
          if (!card) {
            card = operatorCard(operator.name);
            cards.set(operator.name, card);
            grid.insertBefore(card.node, grid.children[index] || null);
          }
          card.update(operator);
        });
        show(none, names.length === 0);
      },
    };
  }

  function operatorCard(name) {
    const events = sparkline("Events per second", [
      {name: "from tasks", kind: "up", index: 0}, {name: "to tasks", kind: "down", index: 1},
    ]);
    const requests = sparkline("Requests per second", [{name: "from tasks", kind: "request", index: 2}]);
    const states = stateBar();
    const ready = el("span", {class: "hg-ready"});
    const mode = el("span", {class: "hg-tag"});
    const run = el("span", {class: "hg-note"});
    const checkpoint = el("dd");
    const failures = el("dd");
    const call = el("dd");
    return {
      node: el(
        "article", {class: "hg-card", "aria-label": "Operator " + name},
        el("header", null, el(HEADING, null, el("a", {href: operatorHash(name)}, name)), mode, run, ready),
        states.node,
        el("div", {class: "hg-meters"}, events.node, requests.node),
        el(
          "dl", {class: "hg-facts"},
          el("div", null, el("dt", null, "Last checkpoint"), checkpoint),
          el("div", null, el("dt", null, "Failures, resets"), failures),
          el("div", null, el("dt", null, "Coordinator"), call),
        ),
      ),
      update(operator) {
        const counts = operator.counts;
        say(ready, number(operator.ready) + " of " + number(operator.parallelism) + " ready");
        say(mode, operator.mode);
        say(run, operator.run ? "stage " + operator.run.stage_id : "no run now");
        states.update(operator);
        events.update(name, operator);
        requests.update(name, operator);
        say(checkpoint, lastCheckpoint(operator));
        checkpoint.className = counts.checkpoints_aborted && !operator.checkpoint_history.slice(-1).some((one) => one.outcome === "completed") ? "hg-warn" : "";
        say(failures, number(counts.failures) + ", " + number(counts.subtask_resets + counts.operator_resets));
        failures.className = counts.failures ? "hg-warn" : "";
        say(call, coordinatorText(operator));
        call.className = operator.call && operator.call.running_s >= 5 ? "hg-bad" : "";
      },
    };
  }

  function lastCheckpoint(operator) {
    const done = operator.checkpoint_history.filter((one) => one.outcome === "completed");
    const last = done[done.length - 1];
    if (last) return last.checkpoint_id + ", " + ago(last.triggered_at + last.duration_s) + ", took " + seconds(last.duration_s);
    return operator.last_completed_checkpoint_id >= 0 ? String(operator.last_completed_checkpoint_id) : "none";
  }

  function coordinatorText(operator) {
    const waiting = operator.queued ? ", " + many(operator.queued, "message") + " behind it" : "";
    if (!operator.call) return "idle" + (operator.queued ? waiting : "");
    return operator.call.name + " for " + seconds(operator.call.running_s) + waiting;
  }

  // --- one operator --------------------------------------------------------------------------------------------

  function operatorView(name) {
    const tiles = {
      ready: tile("Subtasks ready"), checkpoint: tile("Last checkpoint"), failures: tile("Failures"), call: tile("Coordinator"),
    };
    const events = sparkline("Events per second", [
      {name: "from tasks", kind: "up", index: 0}, {name: "to tasks", kind: "down", index: 1},
    ]);
    const requests = sparkline("Requests per second", [{name: "from tasks", kind: "request", index: 2}]);
    const map = heatMap(name);
    const attempts = table("Attempts of the selected subtask", [
      ["Attempt", "hg-number"], ["Task", "hg-number"], ["State"], ["Since", "hg-number"], ["Where"], ["Waits for"],
      ["Unconfirmed", "hg-number"], ["Held", "hg-number"], ["Untaken", "hg-number"], ["Bytes", "hg-number"],
      ["Last sign of life", "hg-number"],
    ]);
    const chosen = el(SUBHEADING);
    const lives = timeline();
    const latencies = latencyTable();
    const counters = table("Counters", [["Counter"], ["Sum of all tasks", "hg-number"]]);
    const used = table("Ready-made parts", [["Part"], ["Figure"], ["Value", "hg-number"]]);
    const sources = table("Sources", [
      ["Stage"], ["Splits not handed out", "hg-number"], ["Splits in tasks", "hg-number"], ["Backlog", "hg-number"],
    ]);
    const splits = table("Largest splits", [["Stage"], ["Subtask", "hg-number"], ["Split", "hg-wide"], ["Backlog", "hg-number"]]);
    const checkpoints = table("Checkpoints", [
      ["Checkpoint", "hg-number"], ["Triggered", "hg-number"], ["Outcome"], ["Took", "hg-number"], ["Phases", "hg-wide"], ["Why"],
    ]);
    const failures = table("Recent failures", [
      ["When", "hg-number"], ["Subtask", "hg-number"], ["Attempt", "hg-number"], ["Kind"], ["Reason", "hg-wide"],
    ]);
    const links = el("span", {class: "hg-links"});
    const mode = el("span", {class: "hg-tag"});
    const gone = el("p", {class: "hg-empty"}, "This operator is not coordinated now.");
    const phases = PHASES.map((phase) => el("span", {class: "hg-key"}, el("span", {class: "hg-swatch hg-phase-" + phase}), phase));
    const parts = {
      subtasks: section("Subtasks", "", map.node, chosen, attempts.frame),
      timeline: section("Timeline", "", lives.node),
      latencies: section("Latencies", "p50 · p99 · p99.9; the histogram, with a line for each of them, is since the operator was coordinated", latencies.node),
      counters: section("Counters", "what the tasks count with context.count, and how many values they observe", counters.frame),
      used: section("Ready-made parts", "the figures of a part that several operators share are those of all of them", used.frame),
      sources: section("Sources", "what is not read yet; the backlog is in the units of the readers, bytes for files", sources.frame, splits.frame),
      checkpoints: section("Checkpoints", "", el("div", {class: "hg-keys"}, phases), checkpoints.frame),
      failures: section("Recent failures", "", failures.frame),
    };
    const body = el(
      "div", null,
      el("div", {class: "hg-tiles"}, tiles.ready.node, tiles.checkpoint.node, tiles.failures.node, tiles.call.node),
      el("div", {class: "hg-meters hg-panel"}, events.node, requests.node),
      Object.values(parts).map((part) => part.node),
    );
    stage.replaceChildren(
      el(
        "nav", {class: "hg-crumbs", "aria-label": "Operators"},
        el("a", {href: "#/"}, "All operators"), el("span", {"aria-hidden": "true"}, " / "), el("strong", null, name), mode, links,
      ),
      gone, body,
    );
    return {
      name,
      update() {
        const operator = status.operators.find((one) => one.name === name);
        show(gone, !operator);
        show(body, Boolean(operator));
        if (!operator) return;
        say(mode, operator.mode);
        drawTiles(tiles, operator);
        drawLinks(links, operator);
        events.update(name, operator);
        requests.update(name, operator);
        map.update(operator);
        say(parts.subtasks.note, operator.run ? many(operator.run.task_count, "task") + ", " + operator.run.tasks_started + " started" : "no run now");
        const subtask = map.selected();
        say(chosen, "Subtask " + subtask + ": " + map.nameOf(subtask));
        setRows(attempts.body, attemptRows(operator, subtask), "No attempt of this subtask in this run.");
        say(parts.timeline.note, lives.update(operator, subtask));
        latencies.update(operator);
        show(parts.counters.node, operator.counters.length > 0);
        setRows(counters.body, operator.counters.map(([name, value]) => [{text: name, head: true}, {text: number(value), kind: "hg-number"}]), "Nothing is counted.");
        show(parts.used.node, operator.parts.length > 0);
        setRows(used.body, operator.parts.map(([name, figure, value]) => [
          {text: name, head: true}, {text: figure.replaceAll("_", " ")}, {text: figureText(value), kind: "hg-number"},
        ]), "No figures.");
        show(parts.sources.node, operator.sources.length > 0);
        setRows(sources.body, operator.sources.map(([name, pending, inHand, backlog]) => [
          {text: name || operator.name, head: true},
          ...[pending, inHand, backlog].map((amount) => ({text: amount === null ? "not known" : number(amount), kind: "hg-number"})),
        ]), "No source.");
        const largest = operator.sources.flatMap(([name, , , , ofSource]) => ofSource.map((split) => [name, ...split]));
        show(splits.frame, largest.length > 0);
        setRows(splits.body, largest.map(([name, subtask, split, backlog]) => [
          {text: name || operator.name, head: true}, {text: number(subtask), kind: "hg-number"}, {text: split},
          {text: number(backlog), kind: "hg-number"},
        ]), "No split.");
        setRows(checkpoints.body, checkpointRows(operator), "No checkpoint yet.");
        say(parts.checkpoints.note, number(operator.counts.checkpoints_completed) + " completed, " + number(operator.counts.checkpoints_aborted) + " aborted" + filesOfLast(operator));
        setRows(failures.body, failureRows(operator), "No failure.");
        say(parts.failures.note, many(operator.counts.failures, "failure") + " of attempts in all");
      },
    };
  }

  function drawTiles(tiles, operator) {
    const counts = operator.counts;
    const missing = operator.parallelism - operator.ready;
    const attempts = operator.run ? many(counts.attempts, "attempt") + " in all" : "no run now";
    tiles.ready.set(
      number(operator.ready) + " / " + number(operator.parallelism),
      attempts + (operator.autoscale ? "; autoscale: " + operator.autoscale : ""), missing && operator.run ? "warn" : "",
    );
    const history = operator.checkpoint_history;
    const under = operator.checkpoints[0];
    const last = history.filter((one) => one.outcome === "completed").slice(-1)[0];
    tiles.checkpoint.set(
      last ? String(last.checkpoint_id) : operator.last_completed_checkpoint_id >= 0 ? String(operator.last_completed_checkpoint_id) : "none",
      under ? under.checkpoint_id + " is " + under.phase + " for " + seconds(under.phase_s) : last ? ago(last.triggered_at + last.duration_s) + ", took " + seconds(last.duration_s) : "",
      under && under.phase_s >= 5 ? "bad" : "",
    );
    tiles.failures.set(
      number(counts.failures), many(counts.subtask_resets, "subtask reset") + ", " + many(counts.operator_resets, "operator reset"),
      counts.failures ? "warn" : "",
    );
    tiles.call.set(
      operator.call ? seconds(operator.call.running_s) : "idle",
      operator.call ? "in " + operator.call.name + (operator.queued ? ", " + many(operator.queued, "message") + " behind it" : "") : many(operator.queued, "message") + " queued",
      operator.call && operator.call.running_s >= 5 ? "bad" : "",
    );
  }

  function drawLinks(node, operator) {
    const wanted = sparkBase && operator.run ? String(operator.run.stage_id) : "";
    if (!sparkBase || node.dataset.stage === wanted) return;
    node.dataset.stage = wanted;
    node.replaceChildren(
      ...(wanted ? [el("a", {href: sparkBase + "stages/stage/?id=" + encodeURIComponent(wanted) + "&attempt=0"}, "Stage " + wanted)] : []),
      el("a", {href: sparkBase + "executors/"}, "Executors"),
    );
  }

  // --- the heat map --------------------------------------------------------------------------------------------

  function heatMap(name) {
    const HEIGHT = 300;
    const canvas = el("canvas", {
      class: "hg-map", tabindex: "0", role: "slider", "aria-label": "Subtask", "aria-valuemin": "0",
      title: "Arrow keys move, Home and End jump",
    });
    const hint = el("div", {class: "hg-hint", "aria-hidden": "true"});
    const keys = STATES.map(([letter, meaning]) => {
      const count = el("span", {class: "hg-count"});
      return {letter, count, node: el("span", {class: "hg-key", title: MEANING[letter]}, el("span", {class: "hg-swatch hg-cell-" + letter}), count, " ", meaning)};
    });
    const frame = el("div", {class: "hg-mapframe"}, canvas, hint);
    let selected = route().subtask || 0;
    let hovered = null;
    let operator = null;
    let grid = {columns: 1, size: 10, gap: 1};

    function lay() {
      const count = operator.parallelism;
      const width = Math.max(120, frame.clientWidth);
      let size = Math.floor(Math.sqrt((width * HEIGHT) / count));
      size = Math.max(4, Math.min(34, size));
      while (size > 4 && Math.ceil(count / Math.floor(width / size)) * size > HEIGHT) size -= 1;
      const columns = Math.max(1, Math.floor(width / size));
      grid = {columns, size, gap: size > 12 ? 3 : size > 6 ? 2 : 1};
      const rows = Math.ceil(count / columns);
      canvas.dataset.grid = columns + "x" + size;
      const ratio = window.devicePixelRatio || 1;
      const wide = Math.min(columns, count) * size;
      if (canvas.hgSize !== wide + "x" + rows * size + "@" + ratio) {
        canvas.hgSize = wide + "x" + rows * size + "@" + ratio;
        canvas.width = Math.round(wide * ratio);
        canvas.height = Math.round(rows * size * ratio);
        canvas.style.width = wide + "px";
        canvas.style.height = rows * size + "px";
      }
      return ratio;
    }

    function draw() {
      if (!operator) return;
      const ratio = lay();
      const pen = canvas.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, canvas.width, canvas.height);
      const {columns, size, gap} = grid;
      const side = size - gap;
      const cells = operator.cells;
      for (const [letter] of STATES) {
        pen.fillStyle = color("cell-" + letter);
        for (let index = cells.indexOf(letter); index >= 0; index = cells.indexOf(letter, index + 1)) {
          pen.fillRect((index % columns) * size, Math.floor(index / columns) * size, side, side);
        }
      }
      if (size >= 22) drawNumbers(pen, cells);
      for (const [index, style, wide] of [[hovered, "mark", 1], [selected, "ink", 2]]) {
        if (index === null || index >= operator.parallelism) continue;
        pen.strokeStyle = color(style);
        pen.lineWidth = wide;
        const inset = wide / 2;
        pen.strokeRect((index % columns) * size + inset, Math.floor(index / columns) * size + inset, side - wide, side - wide);
      }
    }

    function drawNumbers(pen, cells) {
      const {columns, size, gap} = grid;
      pen.font = Math.min(11, Math.floor(size / 2.4)) + "px sans-serif";
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      for (let index = 0; index < cells.length; index += 1) {
        pen.fillStyle = color("on-" + cells[index]);
        const middle = (size - gap) / 2;
        pen.fillText(index, (index % columns) * size + middle, Math.floor(index / columns) * size + middle + 0.5);
      }
    }

    function nameOf(index) {
      const found = STATES.find(([letter]) => letter === operator.cells[index]);
      return found ? found[1] + " (" + MEANING[found[0]] + ")" : "unknown";
    }

    function describe() {
      canvas.setAttribute("aria-valuemax", String(operator.parallelism - 1));
      canvas.setAttribute("aria-valuenow", String(selected));
      canvas.setAttribute("aria-valuetext", "subtask " + selected + ", " + nameOf(selected));
    }

    function choose(index) {
      selected = Math.max(0, Math.min(operator.parallelism - 1, index));
      history.replaceState(null, "", operatorHash(name, selected));
      render();
    }

    function under(event) {
      const box = canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left) / grid.size);
      const index = Math.floor((event.clientY - box.top) / grid.size) * grid.columns + column;
      return column >= 0 && column < grid.columns && index >= 0 && index < operator.parallelism ? index : null;
    }

    function place() {
      show(hint, hovered !== null);
      if (hovered === null) return;
      say(hint, "subtask " + hovered + ": " + nameOf(hovered));
      hint.style.left = Math.min(frame.clientWidth - 230, (hovered % grid.columns) * grid.size + grid.size) + "px";
      hint.style.top = (Math.floor(hovered / grid.columns) + 1) * grid.size + 2 + "px";
    }

    canvas.addEventListener("mousemove", (event) => {
      if (!operator) return;
      const now = under(event);
      if (now === hovered) return;
      hovered = now;
      place();
      draw();
    });
    canvas.addEventListener("mouseleave", () => {
      hovered = null;
      place();
      draw();
    });
    canvas.addEventListener("click", (event) => {
      const index = operator ? under(event) : null;
      if (index !== null) choose(index);
    });
    canvas.addEventListener("keydown", (event) => {
      const steps = {
        ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.columns, ArrowUp: -grid.columns,
        PageDown: 10 * grid.columns, PageUp: -10 * grid.columns,
      };
      let target = null;
      if (event.key in steps) target = selected + steps[event.key];
      if (event.key === "Home") target = 0;
      if (event.key === "End") target = operator ? operator.parallelism - 1 : 0;
      if (target === null || !operator || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      if (target >= 0 && target < operator.parallelism) choose(target);
    });
    show(hint, false);

    return {
      node: el("div", null, el("div", {class: "hg-keys"}, keys.map((key) => key.node)), frame),
      selected: () => selected,
      nameOf,
      redraw: draw,
      update(newest) {
        operator = newest;
        selected = Math.min(selected, operator.parallelism - 1);
        const counts = countCells(operator.cells);
        for (const key of keys) {
          say(key.count, number(counts[key.letter] || 0));
          key.node.classList.toggle("hg-none", !counts[key.letter]);
        }
        draw();
        place();
        describe();
      },
    };
  }

  function attemptRows(operator, subtask) {
    const rows = [];
    for (let index = 0; index < operator.attempts.count; index += 1) {
      if (at(operator, "subtask", index) !== subtask) continue;
      const get = (column) => at(operator, column, index);
      const host = get("host");
      const executor = get("executor_id");
      const where = host ? host + (executor ? " (" + executor + ")" : "") : "–";
      const over = get("state") === "over" || get("state") === "finished";
      const request = get("requested_at") === null ? null : status.taken_at - get("requested_at");
      const deferred = get("deferred_at") === null ? null : status.taken_at - get("deferred_at");
      const since = request === null ? deferred : request;
      const waits = get("waits_for") + (since !== null ? " for " + seconds(since) : "");
      rows.push([
        number(get("attempt")), number(get("task_attempt_id")),
        {text: get("state") + (get("failure") ? ", " + get("failure").replaceAll("_", " ") : ""), tag: get("state")},
        clock(get("accepted_at")),
        sparkBase && host ? {text: where, href: sparkBase + "executors/"} : where,
        {text: over ? "–" : waits || "nothing", kind: request !== null && request >= 5 ? "hg-bad" : ""},
        number(get("events_unconfirmed")), number(get("events_held")), number(get("events_untaken")), bytes(get("bytes")),
        get("heard_at") === null ? "–" : seconds(Math.max(0, status.taken_at - get("heard_at"))) + " ago",
      ].map((cell, place) => (typeof cell === "string" && ![4, 5].includes(place) ? {text: cell, kind: "hg-number"} : cell)));
    }
    if (operator.run) {
      for (const [held, task, waited, waitsFor] of operator.run.registrations) {
        if (held === subtask) rows.push([{text: "–", kind: "hg-number"}, {text: number(task), kind: "hg-number"}, {text: "registered", tag: "accepted"}, "–", "–", "to be accepted for " + seconds(waited) + ": " + waitsFor, "", "", "", "", ""]);
      }
    }
    return rows;
  }

  // --- the timeline --------------------------------------------------------------------------------------------

  function timeline() {
    const chart = svg("svg", {class: "hg-timeline", role: "img"});
    const spans = [[60, "1 min"], [600, "10 min"], [Infinity, "all"]];
    const buttons = spans.map(([length, text]) => {
      const button = el("button", {type: "button", class: "hg-button", "aria-pressed": String(length === span)}, text);
      button.addEventListener("click", () => {
        span = length;
        buttons.forEach((one, index) => one.setAttribute("aria-pressed", String(spans[index][0] === span)));
        render();
      });
      return button;
    });
    const keys = [
      ["hg-life-accepted", "restores"], ["hg-life-ready", "ready"], ["hg-life-finished", "finished"], ["hg-life-failed", "failed"],
      ["hg-checkpoint-completed", "checkpoint"], ["hg-checkpoint-aborted", "aborted"], ["hg-reset", "reset"],
    ].map(([kind, text]) => el("span", {class: "hg-key"}, el("span", {class: "hg-swatch " + kind}), text));
    return {
      node: el("div", null, el("div", {class: "hg-keys"}, keys, el("span", {class: "hg-buttons", role: "group", "aria-label": "Time shown"}, buttons)), chart),
      update: (operator, subtask) => drawTimeline(chart, operator, subtask),
    };
  }

  // What is known of each attempt, from the timeline and from the attempts of this run.
  function livesOf(operator) {
    const lives = new Map();
    const life = (subtask, attempt) => {
      const key = subtask + "/" + attempt;
      if (!lives.has(key)) lives.set(key, {subtask, attempt, accepted: null, ready: null, end: null, how: ""});
      return lives.get(key);
    };
    for (const [when, what, subtask, attempt, text] of operator.timeline) {
      if (attempt === null) continue;
      const one = life(subtask, attempt);
      if (what === "accepted" || what === "ready") one[what] = when;
      else Object.assign(one, {end: when, how: what, text});
    }
    for (let index = 0; index < operator.attempts.count; index += 1) {
      const state = at(operator, "state", index);
      if (state === "over" || state === "finished") continue;
      const one = life(at(operator, "subtask", index), at(operator, "attempt", index));
      if (one.accepted === null) one.accepted = at(operator, "accepted_at", index);
      if (one.ready === null && state !== "accepted") one.ready = one.accepted;
      one.live = true;
    }
    return [...lives.values()];
  }

  function lanesOf(operator, lives, subtask) {
    if (operator.parallelism <= LANES_MAX) return [...Array(operator.parallelism).keys()];
    const lanes = new Set([subtask]);
    const stuck = [...operator.cells].map((letter, index) => (letter === "s" ? index : -1)).filter((index) => index >= 0);
    const failed = lives.filter((one) => one.how === "failed").sort((a, b) => b.end - a.end).map((one) => one.subtask);
    const latest = lives.slice(-LANES_MAX).map((one) => one.subtask);
    for (const index of [...failed.slice(0, LANES_MAX / 2), ...stuck, ...failed, ...latest]) {
      if (lanes.size < LANES_MAX) lanes.add(index);
    }
    return [...lanes].sort((a, b) => a - b);
  }

  function drawTimeline(chart, operator, subtask) {
    const lives = livesOf(operator);
    const lanes = lanesOf(operator, lives, subtask);
    const now = status.taken_at;
    const moments = [...operator.timeline.map((one) => one[0]), ...operator.checkpoint_history.map((one) => one.triggered_at)];
    const first = Math.min(now - 10, ...moments, ...lives.map((one) => one.accepted === null ? now : one.accepted));
    const begin = Math.max(first, now - span);
    const width = Math.max(320, chart.parentNode.clientWidth);
    const left = 96;
    const right = width - 8;
    const lane = lanes.length > 12 ? 14 : 20;
    const head = 24;
    const height = head + lane * lanes.length + 26;
    const x = (moment) => left + ((Math.min(Math.max(moment, begin), now) - begin) / (now - begin)) * (right - left);
    const drawn = [];
    const label = (text, y) => svg("text", {x: left - 8, y, class: "hg-axis", "text-anchor": "end"}, text);
    const mark = (node, text) => {
      node.append(svg("title", null, text));
      drawn.push(node);
    };

    for (const tick of ticks(begin, now)) {
      drawn.push(svg("line", {x1: x(tick), x2: x(tick), y1: 0, y2: height - 20, class: "hg-gridline"}));
      drawn.push(svg("text", {x: x(tick), y: height - 6, class: "hg-axis", "text-anchor": "middle"}, clock(tick)));
    }
    drawn.push(label("checkpoints", 15));
    for (const one of operator.checkpoint_history) {
      if (one.triggered_at + one.duration_s < begin) continue;
      const from = x(one.triggered_at);
      const node = svg("rect", {x: from, y: 5, width: Math.max(3, x(one.triggered_at + one.duration_s) - from), height: 13, rx: 1, class: "hg-checkpoint-" + one.outcome});
      mark(node, "checkpoint " + one.checkpoint_id + " " + one.outcome + " after " + seconds(one.duration_s) + (one.reason ? ": " + one.reason : ""));
    }
    for (const one of operator.checkpoints) {
      const from = x(one.triggered_at);
      mark(svg("rect", {x: from, y: 5, width: Math.max(3, right - from), height: 13, rx: 1, class: "hg-checkpoint-pending"}), "checkpoint " + one.checkpoint_id + ": " + one.phase);
    }
    const row = new Map(lanes.map((index, place) => [index, head + place * lane]));
    for (const [index, y] of row) {
      if (lane > 14 || index % 2 === 0 || operator.parallelism > LANES_MAX) drawn.push(label("subtask " + index, y + lane - 6));
      drawn.push(svg("rect", {x: left, y: y + 2, width: right - left, height: lane - 4, class: index === subtask ? "hg-lane hg-lane-selected" : "hg-lane"}));
    }
    let failures = 0;
    const crosses = new Map();
    for (const one of lives) {
      const y = row.get(one.subtask);
      const from = one.accepted === null ? begin : one.accepted;
      const until = one.end === null ? now : one.end;
      if (one.how === "failed" && until >= begin) failures += 1;
      if (y === undefined || until < begin) continue;
      const says = "subtask " + one.subtask + ", attempt " + one.attempt + (one.how ? ": " + one.how + (one.text ? " (" + one.text.replaceAll("_", " ") + ")" : "") + " after " + seconds(until - from) : "");
      const opened = one.ready === null ? until : one.ready;
      if (opened > from) mark(svg("rect", {x: x(from), y: y + 3, width: Math.max(1, x(opened) - x(from)), height: lane - 6, class: "hg-life-accepted"}), says);
      if (one.ready !== null) mark(svg("rect", {x: x(opened), y: y + 3, width: Math.max(1, x(until) - x(opened)), height: lane - 6, class: one.how === "finished" ? "hg-life-finished" : "hg-life-ready"}), says);
      if (one.how === "failed") {
        const cross = x(until);
        crosses.set(one.subtask, cross);
        const d = "M" + (cross - 4) + " " + (y + lane / 2 - 4) + "l8 8m0 -8l-8 8";
        drawn.push(svg("path", {d, class: "hg-halo"}));
        mark(svg("path", {d, class: "hg-life-failed"}), says);
      }
    }
    let resets = 0;
    for (const [when, what, index, , text] of operator.timeline) {
      if (when < begin) continue;
      if (what === "subtask reset" && row.has(index)) {
        const y = row.get(index) + lane / 2;
        const cross = crosses.get(index);
        const place = Math.abs(x(when) - cross) < 12 ? cross + 12 : x(when);
        mark(svg("path", {d: "M" + (place - 5) + " " + y + "l5 -5l5 5l-5 5z", class: "hg-reset"}), "subtask " + index + " reset");
        resets += 1;
      }
      if (what === "operator reset" || what === "run started" || what === "run ended") {
        mark(svg("line", {x1: x(when), x2: x(when), y1: 0, y2: height - 20, class: what === "operator reset" ? "hg-border hg-border-reset" : "hg-border"}), what + (text ? ": " + text : ""));
        if (what === "operator reset") resets += 1;
      }
    }
    chart.setAttribute("viewBox", "0 0 " + width + " " + height);
    chart.setAttribute("width", String(width));
    chart.setAttribute("height", String(height));
    chart.replaceChildren(...drawn);
    const summary = many(failures, "failure") + " and " + many(resets, "reset") + " in the last " + seconds(Math.round(now - begin));
    chart.setAttribute("aria-label", "Timeline: " + summary);
    return summary + (lanes.length < operator.parallelism ? "; " + lanes.length + " of " + number(operator.parallelism) + " subtasks: the selected one, failed and stuck ones first" : "");
  }

  function ticks(begin, end) {
    const steps = [5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];
    const step = steps.find((one) => (end - begin) / one <= 9) || 604800;
    const found = [];
    for (let tick = Math.ceil((begin + (end - begin) * 0.02) / step) * step; tick < end - (end - begin) * 0.03; tick += step) found.push(tick);
    return found;
  }

  // --- latencies, checkpoints, failures --------------------------------------------------------------------------

  function latencyTable() {
    const tableOf = table("Latencies", [
      ["Latency"], ["Samples", "hg-number"], ["Last minute", "hg-number"], ["Last five minutes", "hg-number"], ["Since the start", "hg-number"],
      ["Histogram, 10 µs to 100 s", "hg-wide"],
    ]);
    const rows = LATENCIES.map(([key, name, meaning]) => {
      const cells = [1, 2, 3, 4].map(() => el("td", {class: "hg-number"}));
      const bars = Array.from({length: BINS}, (_, bin) => svg("rect", {x: bin * 10 + 0.5, width: 9, class: "hg-bar"}));
      const marks = ["p50", "p99", "p999"].map((kind) => svg("line", {y1: 0, y2: 28, class: "hg-quantile hg-quantile-" + kind}));
      const lines = [1, 2, 3, 4, 5, 6].map((decade) => svg("line", {x1: decade * 40, x2: decade * 40, y1: 0, y2: 28, class: "hg-gridline"}));
      const chart = svg("svg", {class: "hg-scale", viewBox: "0 0 280 28", width: "280", height: "28", "aria-hidden": "true"}, lines, bars, marks);
      tableOf.body.append(el("tr", null, el("th", {scope: "row", title: meaning}, name), cells, el("td", {class: "hg-wide"}, chart)));
      return {key, cells, bars, marks};
    });
    return {
      node: tableOf.frame,
      update(operator) {
        for (const row of rows) {
          const [samples, minute, fiveMinutes, quantiles, histogram] = operator.latencies[row.key];
          const texts = [minute, fiveMinutes, quantiles].map((three) => (three[0] === null ? "–" : three.map(micros).join(" · ")));
          [number(samples), ...texts].forEach((text, index) => say(row.cells[index], text));
          const most = Math.max(1, ...histogram);
          row.bars.forEach((node, bin) => {
            const height = histogram[bin] ? Math.max(2, (histogram[bin] / most) * 28) : 0;
            node.setAttribute("y", String(28 - height));
            node.setAttribute("height", String(height));
          });
          row.marks.forEach((node, index) => {
            const place = quantiles[index] === null ? 0 : Math.min(279, Math.max(1, (Math.log10(quantiles[index]) - 1) * 40));
            node.setAttribute("visibility", quantiles[index] === null ? "hidden" : "visible");
            node.setAttribute("x1", String(place));
            node.setAttribute("x2", String(place));
          });
        }
      },
    };
  }

  function filesOfLast(operator) {
    if (!operator.last_checkpoint_files_bytes) return "";
    return "; the last has files of " + bytes(operator.last_checkpoint_files_bytes) + ", of which " + bytes(operator.last_checkpoint_uploaded_bytes) + " were uploaded for it";
  }

  function checkpointRows(operator) {
    const longest = Math.max(0.001, ...operator.checkpoint_history.map((one) => one.duration_s));
    const pending = operator.checkpoints.map((one) => [
      {text: (one.savepoint ? "savepoint " : "") + one.checkpoint_id, kind: "hg-number", head: true},
      {text: clock(one.triggered_at), kind: "hg-number"}, {text: one.phase, tag: "pending"},
      {text: seconds(status.taken_at - one.triggered_at), kind: "hg-number"},
      {text: one.phase + " for " + seconds(one.phase_s) + (one.uploading ? ", " + many(one.uploading, "subtask") + " of " + number(one.subtasks) + " storing files" : ""), kind: "hg-wide"},
      one.awaited_count ? "waits for " + (one.awaited_count === 1 ? "subtask " : "subtasks ") + one.awaited.join(", ") + (one.awaited_count > one.awaited.length ? " and " + number(one.awaited_count - one.awaited.length) + " more" : "") : "",
    ]);
    const ended = [...operator.checkpoint_history].reverse().map((one) => [
      {text: (one.savepoint ? "savepoint " : "") + one.checkpoint_id, kind: "hg-number", head: true},
      {text: clock(one.triggered_at), kind: "hg-number"}, {text: one.outcome, tag: one.outcome},
      {text: seconds(one.duration_s), kind: "hg-number"},
      {text: "", phases: one.phases_s, longest, kind: "hg-wide"}, {text: one.reason, long: true},
    ]);
    return [...pending, ...ended];
  }

  function failureRows(operator) {
    return [...operator.failures].reverse().map(([when, subtask, attempt, kind, reason]) => [
      {text: clock(when), kind: "hg-number"},
      subtask === null ? {text: "all", kind: "hg-number"} : {text: number(subtask), href: operatorHash(operator.name, subtask), kind: "hg-number"},
      {text: attempt === null ? "–" : number(attempt), kind: "hg-number"},
      {text: kind.replaceAll("_", " "), tag: "over"}, {text: reason, long: true, kind: "hg-wide"},
    ]);
  }

  // --- asking, and drawing what came -----------------------------------------------------------------------------

  function remember(newest) {
    for (const operator of newest.operators) {
      const known = points.get(operator.name) || [];
      known.push({at: newest.taken_at, rates: operator.rates});
      while (known.length > POINTS_MAX || newest.taken_at - known[0].at > POINTS_MAX) known.shift();
      points.set(operator.name, known);
    }
    for (const name of points.keys()) {
      if (!newest.operators.some((operator) => operator.name === name)) points.delete(name);
    }
  }

  function render() {
    drawBar();
    if (!status) return;
    const wanted = route().name;
    const begun = performance.now();
    if (!view || view.name !== wanted) view = wanted === null ? overview() : operatorView(wanted);
    view.update();
    performance.clearMeasures("headgate-draw");
    performance.measure("headgate-draw", {start: begun, end: performance.now()});
  }

  let changed = 0;

  async function ask() {
    let wait = POLL_MS;
    try {
      const answer = await fetch(statusAddress, {cache: "no-store", credentials: "same-origin"});
      if (answer.status === 200) {
        const newest = await answer.json();
        if (!status || newest.taken_at !== status.taken_at) {
          changed = performance.now();
          status = newest;
          remember(newest);
        }
        const age = (performance.now() - changed) / 1000;
        link = age > 5 ? {kind: "waiting", text: "no news for " + seconds(Math.floor(age))} : {kind: "live", text: "live"};
      } else if (answer.status === 204) {
        link = {kind: "waiting", text: "waiting for the sidecar"};
        wait = EAGER_MS;
      } else if (answer.status === 404) {
        link = {kind: "gone", text: "the sidecar has left"};
        wait = GONE_MS;
      } else {
        link = {kind: "gone", text: (await answer.text()).slice(0, 300) || "status " + answer.status};
        wait = GONE_MS;
      }
    } catch (error) {
      link = {kind: "gone", text: "no answer: the application has ended, or cannot be reached"};
      wait = GONE_MS;
    }
    render();
    setTimeout(whenVisible, wait);
  }

  // A page that nobody sees does not ask, so the sidecar has no work with it.
  function whenVisible() {
    if (document.visibilityState === "visible") ask();
    else document.addEventListener("visibilitychange", whenVisible, {once: true});
  }

  function redraw() {
    if (view && status) view.update();
  }

  if (alone) {
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    const follow = () => document.documentElement.setAttribute("data-bs-theme", dark.matches ? "dark" : "light");
    dark.addEventListener("change", follow);
    follow();
  }
  new MutationObserver(redraw).observe(document.documentElement, {attributes: true, attributeFilter: ["data-bs-theme"]});
  window.addEventListener("resize", redraw);
  window.addEventListener("hashchange", () => {
    view = null;
    render();
    stage.focus();
  });
  render();
  ask();
})();
