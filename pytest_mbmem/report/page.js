"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);

  // Filters ----------------------------------------------------------------------------------------------------------

  const buttons = all("button[data-show]");
  const find = byId("find");
  const rows = all("#results tbody tr");
  const sections = all("section[data-verdicts]");
  let wanted = "";

  function filter() {
    const text = find.value.trim().toLowerCase();
    const named = (name) => name.toLowerCase().includes(text);
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.show === wanted));
    for (const row of rows)
      row.hidden = (wanted !== "" && row.dataset.verdict !== wanted) || !named(row.cells[0].textContent);
    const shown = new Set(rows.filter((row) => !row.hidden).map((row) => `test-${row.dataset.test}`));
    for (const section of sections) section.hidden = !shown.has(section.id);
    byId("none").hidden = shown.size > 0 || rows.length === 0;
  }

  for (const button of buttons)
    button.addEventListener("click", () => {
      wanted = button.dataset.show;
      filter();
    });
  find.addEventListener("input", filter);

  // Sorting ----------------------------------------------------------------------------------------------------------

  const FACTORS = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };

  function sortKey(text) {
    const match = /([+-]?[0-9]+(?:\.[0-9]+)?)(?: *([KMGT]?i?B)\b|%|$)/.exec(text);
    return match ? Number(match[1]) * (FACTORS[match[2]] ?? 1) : null;
  }

  function compare(a, b) {
    const [x, y] = [sortKey(a), sortKey(b)];
    if (x !== null && y !== null) return x - y;
    return x !== null ? -1 : y !== null ? 1 : a.localeCompare(b);
  }

  all("#results thead th").forEach((head, column, heads) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const text = (row) => row.cells[column].textContent;
      const textual = column === 0 || column === heads.length - 1;
      const order = textual ? (a, b) => a.localeCompare(b) : compare;
      const sorted = rows.slice().sort((a, b) => (down ? -1 : 1) * order(text(a), text(b)));
      sorted[0]?.parentNode.append(...sorted);
    });
  });

  // A link to a test opens it ------------------------------------------------------------------------------------------

  function openTarget() {
    const target = location.hash && byId(decodeURIComponent(location.hash.slice(1)));
    if (!target || !target.matches("section")) return;
    target.querySelector("details").open = true;
    target.scrollIntoView();
  }
  addEventListener("hashchange", openTarget);
  for (const link of all('#results a[href^="#"]'))
    link.addEventListener("click", () => {
      if (location.hash === link.hash) openTarget(); // no hashchange then
    });
  openTarget();

  // Plots --------------------------------------------------------------------------------------------------------------

  if (!byId("plots") || !("DecompressionStream" in window) || !("IntersectionObserver" in window)) return;
  document.documentElement.classList.add("plots");

  async function inflate(id) {
    const text = atob(byId(id).textContent);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  let loading = null;

  function load() {
    loading ??= (async () => {
      const [data, library] = await Promise.all([inflate("plots"), inflate("plotly")]);
      const script = document.createElement("script");
      script.textContent = library;
      document.head.append(script);
      return JSON.parse(data);
    })();
    return loading;
  }

  async function draw(place) {
    try {
      const { colors, plots } = await load();
      const plot = plots[place.dataset.plot];
      const { data, layout, keys } = FIGURES[plot.kind](plot, colors, theme(), place.clientWidth);
      await Plotly.react(place, data, layout, CONFIG);
      legend(place, keys);
      place.dataset.drawn = "";
    } catch (error) {
      const said = document.createElement("p");
      said.className = "error";
      said.textContent = `This plot cannot be drawn: ${error}`;
      place.replaceChildren(said);
      throw error;
    }
  }

  function legend(place, keys) {
    const found = place.nextElementSibling;
    const list = found?.matches("p.legend") ? found : document.createElement("p");
    list.className = "legend";
    list.replaceChildren(
      ...keys.flatMap(([name, color]) => {
        const [item, key] = [document.createElement("span"), document.createElement("span")];
        key.className = "key";
        key.style.background = color;
        item.append(key, name);
        return [item, " "];
      }),
    );
    place.after(list);
  }

  const seen = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries)
        if (isIntersecting) {
          seen.unobserve(target);
          draw(target);
        }
    },
    { rootMargin: "400px" },
  );
  for (const place of all(".plot")) seen.observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => all("[data-drawn]").forEach(draw));

  // What all figures have in common --------------------------------------------------------------------------------------

  const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset" };

  function theme() {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(
      ["text", "soft", "page", "line", "panel", "bad"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]),
    );
  }

  const UNITS = {
    B: [["B", 1], ["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30], ["TiB", 2 ** 40]],
    ns: [["ns", 1], ["us", 1e3], ["ms", 1e6], ["s", 1e9]],
    FLOP: [["FLOP", 1], ["kFLOP", 1e3], ["MFLOP", 1e6], ["GFLOP", 1e9], ["TFLOP", 1e12], ["PFLOP", 1e15]],
  };

  function unitOf(size, unit = "B") {
    return UNITS[unit].filter(([, factor]) => Number((Math.abs(size) / factor).toFixed(2)) >= 1).pop() ?? UNITS[unit][0];
  }

  function format(size, unit = "B") {
    const [name, factor] = unitOf(size, unit);
    return factor === 1 ? `${size} ${name}` : `${(size / factor).toFixed(2)} ${name}`;
  }

  // Plotly reads some markup in its texts, and takes what is between two $ for a formula.
  const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", $: "&#36;" };
  const safe = (text) => text.replace(/[&<>$]/g, (character) => ENTITIES[character]);

  // The end of a name says more than its beginning.
  const tail = (text, most) => safe(text.length > most ? `\u2026${text.slice(1 - most)}` : text);

  function layoutOf(colors, height, more) {
    const axis = { gridcolor: colors.line, zeroline: false, automargin: true, fixedrange: true, tickfont: { size: 12 }, ticklabeloverflow: "allow" };
    return {
      height,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colors.text, family: "system-ui, sans-serif", size: 13 },
      margin: { l: 8, r: 8, t: 28, b: 8 },
      hoverlabel: { align: "left", bgcolor: colors.panel, bordercolor: colors.soft, font: { color: colors.text, size: 12 } },
      dragmode: false, // a finger scrolls the page
      ...more,
      showlegend: false,
      xaxis: { ...axis, ...more.xaxis },
      yaxis: { ...axis, ...more.yaxis },
    };
  }

  const ticks = (unit) => ({ ticksuffix: ` ${unit}`, nticks: 6 });

  const total = (parts, index) => Object.values(parts).reduce((sum, sizes) => sum + sizes[index], 0);

  // The largest first, each with its size.
  function breakdown(parts, index) {
    return Object.entries(parts)
      .map(([name, sizes]) => [name, sizes[index]])
      .filter(([, size]) => size > 0)
      .sort((a, b) => b[1] - a[1])
      .map(([name, size]) => `${format(size)}  ${safe(name)}`)
      .join("<br>");
  }

  // The figures ----------------------------------------------------------------------------------------------------------

  function timeline({ phases, at, parts, peak, bounds }, colors, theme, width) {
    const [unit, factor] = unitOf(peak.size);
    const room = (width - 60) / at.length; // pixels of a point
    const points = at.map((_, point) => point);
    const areas = Object.entries(parts).map(([name, sizes]) => ({
      type: "scatter",
      mode: "lines",
      name: safe(name),
      x: points,
      y: sizes.map((size) => size / factor),
      stackgroup: "memory",
      line: { width: 0.5, color: theme.page },
      fillcolor: colors[name],
      hoverinfo: "skip",
    }));
    const levels = points.map((point) => total(parts, point));
    const said = points.map(
      (point) => `<b>${safe(phases[at[point]])}: ${format(levels[point])}</b><br>${breakdown(parts, point)}`,
    );
    const reading = {
      type: "scatter",
      mode: "lines",
      x: points,
      y: levels.map((level) => level / factor),
      line: { width: 1.5, color: theme.text },
      customdata: said,
      hovertemplate: "%{customdata}<extra></extra>",
    };
    const traces = [...areas, reading];
    const annotations = [];
    if (peak.point !== null) {
      // Plotly drops labels that are higher than the plot: two lines for each owner.
      const owners = peak.owners.map(([category, module, line, size]) => {
        const [first, second] = width < 500 ? ["", tail(module, 36)] : [` ${tail(module, 64)}`, tail(line, 72)];
        return `${format(size)}  ${safe(category)}${first}${second ? `<br>   ${second}` : ""}`;
      });
      if (peak.others) owners.push(`${format(peak.others)}  everything else`);
      const reach = Math.floor(8 / room); // points that no finger can tell from the peak
      said.fill(
        `<b>peak ${format(peak.size)} in ${safe(peak.phase)}</b><br>${owners.join("<br>")}`,
        Math.max(0, peak.point - reach),
        peak.point + reach + 1,
      );
      traces.push({
        type: "scatter",
        mode: "markers",
        x: [peak.point],
        y: [peak.size / factor],
        marker: { size: 11, symbol: "diamond", color: theme.bad, line: { width: 1.5, color: theme.page } },
        name: "peak",
        hoverinfo: "skip",
      });
      const right = peak.point > at.length / 2;
      const crowded = bounds.some(([, size]) => Math.abs(size / peak.size - 1) < 0.09);
      annotations.push({
        x: peak.point,
        y: peak.size / factor,
        text: `<b>peak ${format(peak.size)}</b>${width < 500 ? "" : `, ${safe(peak.phase)}`}`,
        showarrow: false,
        xanchor: right ? "right" : "left",
        yanchor: "bottom",
        yshift: crowded ? 22 : 8,
        font: { color: theme.bad },
      });
    }
    const runs = [];
    at.forEach((phase, point) => {
      if (point && at[point - 1] === phase) runs.at(-1).end = point;
      else runs.push({ phase, begin: point, end: point });
    });
    const [steps, parted] = [phases.map((phase) => phase.split("/")[0]), phases.map((phase) => phase.split("/").at(-1))];
    const shades = { forward: theme.line, backward: theme.soft };
    const shapes = runs.map(({ phase, begin, end }) => ({
      type: "rect", xref: "x", yref: "paper", x0: begin - 0.5, x1: end + 0.5, y0: -0.045, y1: -0.01,
      line: { width: 0 }, fillcolor: shades[parted[phase]] ?? theme.text,
    }));
    runs.forEach(({ phase, begin }, index) => {
      if (!index || steps[runs[index - 1].phase] === steps[phase]) return;
      shapes.push({
        type: "line", xref: "x", yref: "paper", x0: begin - 0.5, x1: begin - 0.5, y0: -0.045, y1: 1,
        line: { width: 1, color: theme.soft },
      });
    });
    const shade = (color) => `<span style="color:${color}">\u25a0</span>`;
    const others = [...new Set(runs.map(({ phase }) => parted[phase]))].filter((name) => !(name in shades));
    const strip = [
      ...Object.keys(shades).filter((name) => parted.includes(name)).map((name) => `${shade(shades[name])} ${name}`),
      ...(others.length ? [`${shade(theme.text)} ${safe(others.join(", "))}`] : []),
    ];
    for (const [name, size] of bounds) {
      shapes.push({
        type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: size / factor, y1: size / factor,
        line: { width: 1.5, color: theme.bad, dash: "dash" },
      });
      annotations.push({
        xref: "paper", x: 0, y: size / factor, xanchor: "left", yanchor: "bottom", showarrow: false,
        text: safe(`${name} ${format(size)}`), font: { size: 11, color: theme.bad },
      });
    }
    return {
      data: traces,
      layout: layoutOf(theme, 380, {
        hovermode: "x",
        hoverdistance: -1,
        shapes,
        annotations: [...annotations, ...stepNames(runs, phases, theme, room)],
        xaxis: {
          showgrid: false,
          range: [-0.5, at.length - 0.5],
          showticklabels: false,
          title: { text: strip.join("  "), font: { size: 12 }, standoff: 20 },
        },
        yaxis: { range: [0, (1.2 * Math.max(peak.size, ...bounds.map(([, size]) => size))) / factor], ...ticks(unit) },
      }),
      keys: Object.keys(parts).map((name) => [name, colors[name]]),
    };
  }

  function stepNames(runs, phases, theme, room) {
    const steps = [];
    for (const { phase, begin, end } of runs) {
      const [step, part] = phases[phase].split("/");
      if (part === undefined) continue; // its own name is below
      if (steps.at(-1)?.step === step) steps.at(-1).end = end;
      else steps.push({ step, begin, end });
    }
    return steps
      .filter(({ step, begin, end }) => (end - begin + 1) * room > 7 * step.length)
      .map(({ step, begin, end }) => ({
        x: (begin + end) / 2, yref: "paper", y: 1, yanchor: "bottom", showarrow: false, text: safe(step),
        font: { size: 12, color: theme.soft },
      }));
  }

  function segments({ names, segments, small }, colors, theme) {
    const parts = new Map([...Object.keys(colors), "free"].map((name) => [name, { base: [], x: [], y: [], customdata: [] }]));
    const totals = segments.map((blocks) => blocks.reduce((sum, value, i) => (i % 2 ? sum : sum + value), 0));
    const [unit, factor] = unitOf(Math.max(...totals));
    segments.forEach((blocks, row) => {
      let base = 0;
      for (let i = 0; i < blocks.length; i += 2) {
        const [size, name] = [blocks[i], names[blocks[i + 1]] ?? "free"];
        const part = parts.get(name);
        part.base.push(base / factor);
        part.x.push(size / factor);
        part.y.push(row);
        part.customdata.push(
          `<b>${format(size)}</b> ${safe(name)}<br>of a segment of ${format(totals[row])}` +
            (small[row] ? "<br>for requests of up to 1 MiB" : ""),
        );
        base += size;
      }
    });
    const data = [...parts]
      .filter(([, part]) => part.x.length)
      .map(([name, part]) => ({
        type: "bar",
        orientation: "h",
        name: safe(name),
        ...part,
        width: 0.8,
        marker:
          name === "free"
            ? { color: theme.page, pattern: { shape: "/", fgcolor: theme.soft, bgcolor: theme.page, size: 6, solidity: 0.2 },
                line: { width: 0.5, color: theme.soft } }
            : { color: colors[name], line: { width: 0.5, color: theme.page } },
        hovertemplate: "%{customdata}<extra></extra>",
      }));
    const height = Math.max(160, 18 * segments.length + 40);
    return {
      data,
      layout: layoutOf(theme, height, {
        barmode: "overlay",
        hovermode: "closest",
        xaxis: { ...ticks(unit), side: "top", rangemode: "tozero" },
        yaxis: { autorange: "reversed", showgrid: false, tickvals: totals.map((_, row) => row), ticktext: totals.map((size) => format(size)) },
        margin: { l: 8, r: 8, t: 8, b: 8 },
      }),
      keys: data.map(({ name }) => [name, colors[name] ?? `repeating-linear-gradient(135deg, ${theme.soft} 0 1px, ${theme.page} 1px 4px)`]),
    };
  }

  function peaks({ rows, parts }, colors, theme, width) {
    const totals = rows.map((_, row) => total(parts, row));
    const [unit, factor] = unitOf(Math.max(...totals));
    const keys = Object.keys(parts).map((name) => [name, colors[name]]);
    const bars = Object.entries(parts).map(([name, sizes]) => ({
      type: "bar",
      orientation: "h",
      name: safe(name),
      x: sizes.map((size) => size / factor),
      y: rows.map((_, row) => row),
      marker: { color: colors[name], line: { width: 0.5, color: theme.page } },
      customdata: rows.map((row, index) => `<b>${safe(row)}: ${format(totals[index])}</b><br>${breakdown(parts, index)}`),
      hovertemplate: "%{customdata}<extra></extra>",
    }));
    const most = Math.max(8, Math.floor(width / 24));
    const cut = (name) => (name.length > most ? `${name.slice(0, most - 1)}\u2026` : name);
    return {
      data: bars,
      layout: layoutOf(theme, 34 * rows.length + 50, {
        barmode: "stack",
        bargap: 0.25,
        hovermode: "closest",
        xaxis: { ...ticks(unit), side: "top", range: [0, ((1 + 75 / (width - 100)) * Math.max(...totals)) / factor] },
        yaxis: { autorange: "reversed", showgrid: false, tickvals: rows.map((_, row) => row), ticktext: rows.map((row) => safe(cut(row))) },
        annotations: totals.map((size, row) => ({
          x: size / factor, y: row, text: format(size), xanchor: "left", showarrow: false, font: { size: 12 },
        })),
        margin: { l: 8, r: 8, t: 8, b: 8 },
      }),
      keys,
    };
  }

  const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
  const MARKS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];

  function trend({ unit, runs, lines }, colors, theme) {
    const most = Math.max(...lines.flatMap(([, values]) => values.filter((value) => value !== null)));
    const [name, factor] = unitOf(most, unit);
    const data = lines.map(([line, values], number) => ({
      type: "scatter",
      mode: "lines+markers",
      name: safe(line),
      x: runs.map((_, run) => run),
      y: values.map((value) => (value === null ? null : value / factor)),
      connectgaps: true,
      line: { color: LINES[number % LINES.length], width: 2 },
      marker: { symbol: MARKS[number % MARKS.length], size: 8 },
      customdata: runs.map(([run, started], index) =>
        values[index] === null
          ? ""
          : `<b>${format(values[index], unit)}</b>  ${safe(line)}<br>${safe(run)}${started ? `<br>${safe(started)}` : ""}`,
      ),
      hovertemplate: "%{customdata}<extra></extra>",
    }));
    const every = Math.ceil(runs.length / 12);
    const shown = runs.map((_, run) => run).filter((run) => (runs.length - 1 - run) % every === 0);
    return {
      data,
      layout: layoutOf(theme, 320, {
        margin: { l: 8, r: 40, t: 28, b: 8 },
        hovermode: "closest",
        xaxis: { tickvals: shown, ticktext: shown.map((run) => safe(runs[run][0])), range: [-0.3, runs.length - 0.7] },
        yaxis: ticks(name),
      }),
      keys: lines.map(([line], number) => [line, LINES[number % LINES.length]]),
    };
  }

  const FIGURES = { timeline, segments, peaks, trend };
})();
