"use strict";

(async () => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const main = document.querySelector("main");

  function colour(place) {
    const { theme = "auto" } = document.documentElement.dataset;
    const dark = theme === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : theme === "dark";
    const colours = data.colours[dark ? "dark" : "light"];
    return colours[place % colours.length];
  }
  const DASHES = { solid: "", dash: "8 4", dot: "2 3", dashdot: "8 3 2 3", longdash: "14 4" };
  const AXES = {
    round: "Communication rounds", bytes: "Total communication (bytes)", seconds: "Wall-clock time (s)",
  };
  const state = { axis: "round", band: "range", smoothing: 0, logx: false, logy: false };
  const BUTTONS = [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];
  const touched = matchMedia("(pointer: coarse)").matches;

  const groups = data.groups.map((name, i) => ({
    name,
    shown: true,
    get colour() { return colour(data.styles[i][0]); },
    dash: Object.keys(DASHES)[data.styles[i][1] % Object.keys(DASHES).length],
    runs: data.runs.filter((run) => run.group === i),
  }));
  const shown = () => groups.filter((group) => group.shown);
  const names = data.runs.map((_, i) => data.partitions.find(({ runs }) => runs.includes(i))?.names);
  const describeClient = (run, client) => {
    const name = names[data.runs.indexOf(run)]?.clients[client];
    return name === undefined ? `client ${client}` : `client ${client} (${name})`;
  };
  const redraws = []; // functions that redraw a part of the page; called when a control changes

  // --- elements: text from a run is inserted as text, never as markup ---

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  function section(id, title, note = "") {
    const place = make("section", { id }, make("h2", { id: `${id}-title`, textContent: title }));
    place.setAttribute("aria-labelledby", `${id}-title`);
    if (note) place.append(make("p", { className: "note", textContent: note }));
    main.append(place);
    return place;
  }

  function choice(place, label, names, changed) {
    const select = make("select", { onchange: changed }, ...names.map((name) => make("option", { textContent: name })));
    if (names.length > 1) place.append(make("p", { className: "choice" }, make("label", {}, `${label} `, select)));
    return select;
  }

  // Allows line breaks after the dots, slashes and underscores of keys and metrics.
  const breakable = (content) => [content].flat().flatMap((part) => (typeof part === "string"
    ? part.split(/(?<=[./_])/).flatMap((piece) => [piece, document.createElement("wbr")])
    : [part]));

  // A wide table is scrolled inside its own region, which the keyboard can reach.
  function table(caption, head, rows) {
    const cell = (scope, content) => scope
      ? make("th", { scope }, ...breakable(content))
      : make("td", {}, typeof content === "string" ? content.replaceAll("± ", "±\u00a0") : content ?? "–");
    const body = rows.map(([first, ...rest]) =>
      make("tr", {}, cell("row", first), ...rest.map((content) => cell("", content))));
    const top = make("tr", {}, ...head.map((content) => cell("col", content)));
    const scroll = make("div", { className: "scroll", tabIndex: 0 },
      make("table", {}, make("thead", {}, top), make("tbody", {}, ...body)));
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", caption);
    return scroll;
  }

  function swatch(group) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const drawn = { x1: 0, x2: 28, y1: 4, y2: 4, "stroke-width": 3, "stroke-dasharray": DASHES[group.dash] };
    for (const [key, value] of Object.entries(drawn)) line.setAttribute(key, value);
    redraws.push(() => line.setAttribute("stroke", group.colour));
    svg.setAttribute("class", "swatch");
    svg.setAttribute("aria-hidden", "true");
    svg.append(line);
    return svg;
  }

  // --- Plotly ---

  // Plotly interprets some tags, entities and TeX in texts. Escaping these characters prevents it.
  const plain = (text) => String(text).replace(/[&<>$]/g, (sign) => `&#${sign.codePointAt(0)};`);
  const cut = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

  // Plotly's script is compressed in the page to a third of its size. The page's policy contains its hash.
  async function loadPlotly() {
    const packed = Uint8Array.from(atob($("plotly").textContent), (character) => character.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    document.head.append(make("script", { textContent: await new Response(stream).text() }));
  }

  // A place for a figure, followed by its values as a table for readers who do not see it.
  function plotPlace(section, className = "") {
    const place = make("div", { className: `plot ${className}`.trim() });
    const values = make("details", { className: "values" }, make("summary", { textContent: "Values as a table" }));
    values.addEventListener("toggle", () => fillValues(place));
    section.append(place, values);
    return place;
  }

  function fillValues(place) {
    const values = place.nextElementSibling;
    if (!values.open) return;
    values.querySelector(".scroll")?.remove();
    values.append(table(place.values.title, place.values.head, place.values.rows()));
  }

  // Describes a drawn figure for screen readers: an image with a name, and where its values are.
  function describe(place, values) {
    const [image, ...others] = place.querySelectorAll("svg.main-svg");
    image?.setAttribute("role", "img");
    image?.setAttribute("aria-label", `${values.title}. The values are in the table that follows.`);
    others.forEach((layer) => layer.setAttribute("aria-hidden", "true"));
    place.values = values;
    fillValues(place);
  }

  // Up to 12 places among a number of rounds, with the last one.
  const samples = (count) => [...new Set(Array.from({ length: Math.min(count, 12) }, (_, i) =>
    Math.round(((i + 1) * count) / Math.min(count, 12)) - 1))];
  const figure = (value) => (value === undefined || value === null ? "–" : Number(value).toPrecision(4));

  function draw(place, traces, { x, y, ...layout }, values) {
    const text = getComputedStyle(document.body).color;
    const line = getComputedStyle(main.firstElementChild).borderTopColor;
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
    Plotly.react(place, traces, {
      height: 380,
      margin: { l: 50, r: 12, t: 10, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: text, family: "system-ui, sans-serif", size: 12 },
      hoverlabel: { align: "left", namelength: 60 },
      hovermode: "closest",
      showlegend: false,
      dragmode: touched ? false : "zoom", // a finger on a figure scrolls the page
      xaxis: { ...axis, ...x },
      yaxis: { ...axis, ...y },
      ...layout,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: text },
    }, {
      responsive: true, displayModeBar: touched ? false : "hover", displaylogo: false, modeBarButtons: BUTTONS,
      toImageButtonOptions: { format: "svg", filename: place.closest("section").id },
    });
    describe(place, values);
  }

  const xAxis = () => ({
    title: { text: AXES[state.axis] },
    type: state.logx ? "log" : "linear",
    exponentformat: "SI",
  });
  const label = (metric) => (Object.hasOwn(data.labels, metric) ? data.labels[metric] : metric);
  const yAxis = (metric) => ({ title: { text: plain(label(metric)) }, type: state.logy ? "log" : "linear" });

  // The area between two lines. With a logarithmic axis it is drawn only above 0.
  function surface(x, low, high, group, opacity) {
    const kept = x.map((_, i) => i).filter((i) => !state.logy || low[i] > 0);
    const back = [...kept].reverse();
    return {
      x: [...kept, ...back].map((i) => x[i]),
      y: [...kept.map((i) => high[i]), ...back.map((i) => low[i])],
      fill: "toself", fillcolor: group.colour, opacity, line: { width: 0 }, mode: "lines", hoverinfo: "skip",
    };
  }

  // --- curves: for each group the mean over its seeds as a line, and their spread as a band ---

  // An exponential moving average with bias correction, over the rounds that have a value.
  function smoothed(values) {
    let sum = 0;
    let weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = state.smoothing * sum + (1 - state.smoothing) * value;
      weight = state.smoothing * weight + (1 - state.smoothing);
      return sum / weight;
    });
  }

  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  function band(values) {
    if (state.band === "range") return [Math.min(...values), Math.max(...values)];
    const middle = mean(values);
    const squares = values.reduce((sum, value) => sum + (value - middle) ** 2, 0);
    const std = Math.sqrt(squares / Math.max(values.length - 1, 1));
    return [middle - std, middle + std];
  }

  function curve(group, metric) {
    const rounds = new Map();
    for (const run of group.runs.filter((one) => metric in one.metrics)) {
      const values = smoothed(run.metrics[metric]);
      run.axes.round.forEach((round, i) => {
        const x = run.axes[state.axis][i];
        if (values[i] === null || x === null) return;
        if (!rounds.has(round)) rounds.set(round, { round, x: [], y: [] });
        rounds.get(round).x.push(x);
        rounds.get(round).y.push(values[i]);
      });
    }
    return [...rounds.values()].sort((a, b) => a.round - b.round);
  }

  function curveTraces(group, metric) {
    const points = curve(group, metric);
    const x = points.map((point) => mean(point.x));
    const bands = points.map((point) => band(point.y));
    const line = {
      x, y: points.map((point) => mean(point.y)),
      name: plain(group.name),
      mode: points.length > 40 ? "lines" : "lines+markers",
      line: { color: group.colour, dash: group.dash, width: 2 },
      marker: { size: 4 },
      customdata: points.map(({ round, y }, i) =>
        `round ${round}${y.length > 1 ? `, ${y.length} runs: ${bands[i].map((end) => end.toPrecision(4)).join(" to ")}` : ""}`),
      hovertemplate: `%{y:.4g}${state.axis === "round" ? "" : ", at %{x:.4s}"}<br>%{customdata}`,
    };
    const spread = state.band !== "none" && points.some((point) => point.y.length > 1);
    const ends = (i) => bands.map((ends) => ends[i]);
    return spread ? [surface(x, ends(0), ends(1), group, 0.18), line] : [line];
  }

  function curveValues(metric) {
    const drawn = shown();
    return {
      title: `${label(metric)} by round: means over the runs of ${drawn.map((group) => group.name).join(", ") || "no group"}`,
      head: ["round", ...drawn.map((group) => group.name)],
      rows() {
        const means = drawn.map((group) => new Map(curve(group, metric).map(({ round, y }) => [round, mean(y)])));
        const rounds = [...new Set(means.flatMap((each) => [...each.keys()]))].sort((a, b) => a - b);
        return samples(rounds.length).map((i) => [String(rounds[i]), ...means.map((each) => figure(each.get(rounds[i])))]);
      },
    };
  }

  function curves(place, metrics) {
    const select = choice(place, "metric", metrics, () => show());
    const plot = plotPlace(place);
    const show = () => draw(plot, shown().flatMap((group) => curveTraces(group, select.value)),
      { x: xAxis(), y: yAxis(select.value) }, curveValues(select.value));
    redraws.push(show);
  }

  // --- clients: quantiles by round of one run, and all clients in the last evaluated round ---

  function spread(place, measures) {
    const measure = choice(place, "measure", measures, () => show());
    const which = choice(place, "run", data.runs.map((run) => run.name), () => show());
    const fan = plotPlace(place, "fan");
    const note = place.appendChild(make("p", { className: "note" }));
    const points = plotPlace(place, "points");

    function drawFan() {
      const available = data.runs.map((run) => groups[run.group].shown && measure.value in run.clients);
      [...which.options].forEach((option, i) => { option.disabled = !available[i]; });
      if (!available[which.selectedIndex]) which.selectedIndex = available.indexOf(true);
      const run = data.runs[which.selectedIndex];
      const title = `${label(measure.value)} by round: distribution over clients of ${run?.name ?? "no run"}`;
      const head = ["round", "lowest", "10 %", "median", "90 %", "highest"];
      if (!run) return draw(fan, [], { x: xAxis(), y: yAxis(measure.value) }, { title, head, rows: () => [] });
      const { rounds, quantiles: [lowest, low, median, high, highest] } = run.clients[measure.value];
      const place = new Map(run.axes.round.map((round, i) => [round, i]));
      const x = rounds.map((round) => run.axes[state.axis][place.get(round)]);
      const group = groups[run.group];
      const line = {
        x, y: median, name: plain(run.name), line: { color: group.colour, width: 2 },
        mode: x.length > 40 ? "lines" : "lines+markers", marker: { size: 4 },
        customdata: rounds.map((round, i) => `round ${round}: from ${lowest[i]} to ${highest[i]}`),
        hovertemplate: "median %{y:.4g}<br>%{customdata}",
      };
      return draw(fan,
        [surface(x, lowest, highest, group, 0.12), surface(x, low, high, group, 0.2), line],
        { x: xAxis(), y: yAxis(measure.value) },
        {
          title, head,
          rows: () => samples(rounds.length).map((i) =>
            [String(rounds[i]), ...[lowest, low, median, high, highest].map((each) => figure(each[i]))]),
        });
    }

    function drawPoints() {
      const measured = shown().filter((group) => group.runs.some((run) => measure.value in run.clients));
      const traces = measured.map((group, i) => {
        const last = group.runs.filter((run) => measure.value in run.clients).flatMap((run) => {
          const { round, client, value } = run.clients[measure.value].last;
          return value.map((x, k) => ({ x, text: plain(`${describeClient(run, client[k])}, round ${round}, ${run.name}`) }));
        });
        return {
          type: "box", orientation: "h", boxpoints: "all", jitter: 0.7, pointpos: 0, hoveron: "points",
          x: last.map((point) => point.x), y: last.map(() => i), text: last.map((point) => point.text),
          name: plain(group.name), hovertemplate: "%{x:.4g}<br>%{text}",
          line: { color: group.colour, width: 1.5 }, marker: { color: group.colour, size: 4, opacity: 0.6 },
          fillcolor: "rgba(0,0,0,0)", width: 0.7,
        };
      });
      const length = innerWidth < 700 ? 14 : 40;
      draw(points, traces, {
        height: 90 + 46 * measured.length,
        x: { ...yAxis(measure.value), type: state.logy ? "log" : "linear" },
        y: {
          tickvals: measured.map((_, i) => i), ticktext: measured.map((group) => plain(cut(group.name, length))),
          autorange: "reversed", zeroline: false,
        },
      }, {
        title: `${label(measure.value)} of each client in the last round, by group`,
        head: ["group", "clients", "lowest", "median", "highest"],
        rows: () => measured.map(({ name }, i) => {
          const sorted = [...traces[i].x].sort((a, b) => a - b);
          const middle = (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
          return [name, String(sorted.length), figure(sorted[0]), figure(middle), figure(sorted.at(-1))];
        }),
      });
    }

    function show() {
      drawFan();
      drawPoints();
      note.textContent = "Above: median, 10 % to 90 % and lowest to highest client of one run. "
        + "Below: each client in the last round that measured it, all runs of a group.";
    }
    redraws.push(show);
  }

  // --- partition ---

  function partition(place) {
    const names = data.partitions.map(({ runs }) => `${data.runs[runs[0]].name}${runs.length > 1 ? ` and ${runs.length - 1} more` : ""}`);
    const select = choice(place, "of", names, () => show());
    const note = place.appendChild(make("p", { className: "note" }));
    const sizes = place.appendChild(make("p", { className: "note sizes" }));
    const plot = plotPlace(place);
    // All partitions have one scale: that of bubbles, and that of heat maps of many clients.
    const isGrouped = ({ counts, clients }) => counts.length < clients;
    const largestOf = (grouped) => data.partitions.filter((one) => isGrouped(one) === grouped)
      .reduce((most, { counts }) => Math.max(most, ...counts.flat()), 1);
    const most = Math.max(...data.partitions.filter((one) => !isGrouped(one)).map(({ counts }) => counts.length));

    // The axis of clients or classes, with the given names at about 40 ticks.
    function axis(title, labels) {
      const ticks = labels.map((_, i) => i).filter((i) => i % Math.ceil(labels.length / 40) === 0);
      const named = { tickvals: ticks, ticktext: ticks.map((i) => plain(cut(labels[i], 16))) };
      return { title: { text: title }, zeroline: false, ...(labels.length ? named : {}) };
    }

    const widest = () => Math.max(6, Math.min(26, 1.6 * plot.clientWidth / most)); // diameter of the largest bubble

    // Bubbles of three sizes with their numbers of samples.
    function sizeLegend() {
      const largest = largestOf(false);
      const counts = [...new Set([largest, ...[4, 16].map((part) => Number((largest / part).toPrecision(1)) || 1)])];
      return counts.map((count) => {
        const bubble = make("i");
        const side = `${(widest() * Math.sqrt(count / largest)).toFixed(1)}px`;
        Object.assign(bubble.style, { width: side, height: side, background: colour(0) });
        return make("span", {}, bubble, `${count} samples`);
      });
    }

    function bubbles(counts, { clients, classes }) {
      const cells = counts.flatMap((row, client) => row.map((count, label) => ({ client, label, count })))
        .filter((cell) => cell.count > 0);
      const largest = largestOf(false);
      return {
        x: cells.map((cell) => cell.client), y: cells.map((cell) => cell.label),
        text: cells.map(({ client, label, count }) =>
          plain(`client ${clients[client] ?? client}, class ${classes[label] ?? label}: ${count} training samples`)),
        mode: "markers", hovertemplate: "%{text}<extra></extra>",
        marker: {
          size: cells.map((cell) => cell.count), sizemode: "area", sizeref: 2 * largest / widest() ** 2, sizemin: 1,
          color: colour(0), opacity: 0.7, line: { width: 0 },
        },
      };
    }

    function show() {
      const { counts, clients, names } = data.partitions[select.selectedIndex];
      const grouped = isGrouped(data.partitions[select.selectedIndex]);
      note.textContent = grouped ? "" : "The area of a bubble is proportional to the number of training samples.";
      sizes.replaceChildren(...(grouped ? [] : sizeLegend()));
      const heat = {
        type: "heatmap", zmin: 0, zmax: largestOf(true), z: counts[0].map((_, label) => counts.map((row) => row[label])), colorscale: "Blues",
        reversescale: false, hovertemplate: "class %{y}: %{z} training samples<extra></extra>",
      };
      draw(plot, [grouped ? heat : bubbles(counts, names)], {
        height: Math.min(700, 130 + 22 * counts[0].length),
        x: grouped ? axis(`${clients} clients, sorted by the class they hold most of`, []) : axis("client", names.clients),
        y: axis("class", names.classes),
      }, {
        title: `Training samples of ${clients} clients by class`,
        head: [grouped ? "group of clients" : "client", ...counts[0].map((_, i) => names.classes[i] ?? `class ${i}`)],
        rows: () => counts.map((row, i) => [(!grouped && names.clients[i]) || String(i), ...row.map(String)]),
      });
    }
    redraws.push(show);
  }

  // --- images and settings ---

  function images(place) {
    const large = make("img", { alt: "" });
    const dialog = document.body.appendChild(make("dialog", { onclick: () => dialog.close() }, large));
    for (const name of new Set(data.images.map((image) => image.name))) {
      const kind = data.images.filter((image) => image.name === name);
      const grid = make("div", { className: "images" });
      for (const { run, round, reduced, source } of kind) {
        const caption = `${data.runs[run].name}, round ${round}${reduced ? " (reduced)" : ""}`;
        const open = () => { large.src = source; dialog.showModal(); };
        const image = make("img", { src: source, alt: `${name}: ${caption}` });
        const button = make("button", { type: "button", title: "enlarge", onclick: open }, image);
        const figure = make("figure", {}, button, make("figcaption", { textContent: caption }));
        redraws.push(() => { figure.hidden = !groups[data.runs[run].group].shown; });
        grid.append(figure);
      }
      const title = make("summary", { textContent: `${name} (${kind.length})` });
      place.append(make("details", { open: kind.length <= 3 }, title, grid));
    }
  }

  function extraSection({ title, tables, figures }, i) {
    const [heading, ...rest] = title.split("; ");
    const place = section(`section-${i}`, heading, rest.join("; "));
    for (const source of figures) place.append(make("img", { src: source, alt: heading, className: "figure" }));
    for (const { header, rows, notes } of tables) {
      place.append(table(heading, header, rows), ...notes.map((text) => make("p", { className: "note", textContent: text })));
    }
  }

  function settings(place) {
    const own = [...new Set(data.runs.flatMap((run) => Object.keys(run.settings)))];
    const valuesOf = (group, key) => [...new Set(group.runs.map((run) => run.settings[key] ?? "–"))].join(", ");
    if (own.length) {
      const cells = own.map((key) => [key, ...groups.map((group) => valuesOf(group, key))]);
      const lines = [["differs", ...groups.map((group) => group.name)], ...cells];
      const [head, ...rows] = groups.length > own.length ? lines[0].map((_, i) => lines.map((line) => line[i])) : lines;
      place.append(table("Settings that differ", head, rows));
    }
    for (const run of data.runs) {
      const whole = { ...data.common, ...run.settings };
      const details = make("details", {}, make("summary", { textContent: `config of ${run.name}` }));
      const fill = () => details.append(table(`Config of ${run.name}`, ["key", "value"], Object.entries(whole)));
      details.addEventListener("toggle", fill, { once: true });
      place.append(details);
    }
  }

  // --- the page ---

  function namesOf(pick) {
    const first = (name) => ["global/", "client/", "new_client/", "time/", ""].findIndex((start) => name.startsWith(start));
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run[pick])))];
    return names.sort((a, b) => first(a) - first(b) || (a < b ? -1 : 1));
  }

  function addSections() {
    const metrics = namesOf("metrics");
    const measures = namesOf("clients");
    const part = (name) => name.split("/").pop();
    const is = {
      accuracy: (name) => part(name).startsWith("acc"),
      loss: (name) => part(name).includes("loss") || part(name).startsWith("train_"),
      cost: (name) => /^(time|comm)\//.test(name),
      drift: (name) => /^drift[/_]/.test(name),
      weight: (name) => name === "weight",
    };
    const rest = (name) => !Object.values(is).some((holds) => holds(name));
    const among = (names, holds, then) => names.some(holds) && then(names.filter(holds));

    data.sections.forEach(extraSection);
    const rows = data.summary.rows.map((row, i) => [[swatch(groups[i]), " ", groups[i].name], ...row]);
    const overview = table("Summary", ["group", ...data.summary.columns], rows);
    overview.querySelectorAll("tbody tr").forEach((row, i) => redraws.push(() => { row.hidden = !groups[i].shown; }));
    const unfinished = data.groups.some((name) => name.includes("(not finished: "))
      ? " Runs marked as not finished are in no mean and no test." : "";
    const notes = data.summary.notes.map((textContent) => make("p", { className: "note", textContent }));
    section("summary", "Summary", `Means over a group's runs ± standard deviation.${unfinished}`).append(overview, ...notes);
    among(metrics, is.accuracy, (names) => curves(section("accuracy", "Accuracy"), names));
    among(metrics, is.loss, (names) => curves(section("loss", "Loss"), names));
    among(measures, (name) => !is.drift(name) && !is.weight(name), (names) => spread(section("clients", "Clients"), names));
    if (data.partitions.length) partition(section("partition", "Partition"));
    among(measures, is.weight, (names) => spread(section("weights", "Aggregation weights"), names));
    if (metrics.some(is.drift) || measures.some(is.drift)) {
      const place = section("drift", "Drift");
      among(metrics, is.drift, (names) => curves(place, names));
      among(measures, is.drift, (names) => spread(place, names));
    }
    among(metrics, rest, (names) => curves(section("other", "Other metrics"), names));
    among(metrics, is.cost, (names) => curves(section("cost", "Time and bytes"), names));
    if (data.images.length) images(section("images", "Images"));
    settings(section("settings", "Settings"));
    if (data.left_out.length) {
      section("left-out", "Left out").append(make("ul", {}, ...data.left_out.map((text) => make("li", { textContent: text }))));
    }
  }

  const redraw = () => redraws.forEach((show) => show());

  function legend() {
    for (const group of groups) {
      const button = make("button", { type: "button", title: "click: on or off; double click: only this one" },
        swatch(group), make("span", { textContent: group.name }));
      const mark = () => button.setAttribute("aria-pressed", group.shown);
      button.onclick = () => { group.shown = !group.shown; redraw(); };
      button.ondblclick = () => {
        const alone = shown().length === 1 && group.shown;
        groups.forEach((other) => { other.shown = alone || other === group; });
        redraw();
      };
      redraws.push(mark);
      $("legend").append(button);
    }
  }

  function connectControls() {
    const turn = (id, event, read) => {
      $(id).addEventListener(event, () => { state[id] = read($(id)); redraw(); });
    };
    turn("axis", "change", (input) => input.value);
    turn("band", "change", (input) => input.value);
    turn("smoothing", "input", (input) => { input.nextElementSibling.value = input.value; return Number(input.value); });
    turn("logx", "change", (input) => input.checked);
    turn("logy", "change", (input) => input.checked);
    for (const axis of Object.keys(AXES)) {
      const known = data.runs.some((run) => run.axes[axis].some((x) => x !== null));
      $("axis").querySelector(`[value=${axis}]`).disabled = !known;
    }
  }

  function connectThemeButton() {
    const names = ["auto", "light", "dark"];
    $("theme").onclick = () => {
      const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % names.length];
      document.documentElement.dataset.theme = next;
      $("theme").textContent = `Theme: ${next}`;
      redraw();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  try {
    await loadPlotly();
    addSections();
    legend();
    connectControls();
    connectThemeButton();
    $("bar").hidden = false;
    redraw();
    document.documentElement.dataset.drawn = "yes";
  } catch (error) {
    $("trouble").textContent = `The figures cannot be drawn: ${error}. A browser of 2024 or later is needed.`;
    $("trouble").hidden = false;
    throw error;
  }
})();
