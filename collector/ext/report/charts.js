// The learning curves of the page, drawn by uPlot from the numbers in #curves.
(() => {
  "use strict";
  const panels = JSON.parse(document.getElementById("curves").textContent);
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
  const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const whole = new Intl.NumberFormat("en");
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const height = (width) => Math.round(Math.min(380, Math.max(260, 0.42 * width)));

  function legendOf(box, panel, hidden, chart) {
    box.replaceChildren();
    const read = document.createElement("output");
    const values = panel.groups.map((group, number) => {
      const button = document.createElement("button");
      const swatch = document.createElement("span");
      const value = document.createElement("span");
      swatch.className = `swatch c${group.colour}`;
      button.type = "button";
      button.append(swatch, group.name, value);
      button.setAttribute("aria-pressed", String(!hidden.has(number)));
      button.addEventListener("click", () => {
        if (!hidden.delete(number)) hidden.add(number);
        button.setAttribute("aria-pressed", String(!hidden.has(number)));
        chart().show(number, !hidden.has(number));
      });
      box.append(button);
      return value;
    });
    box.append(read);
    return (at) => {
      const known = at !== null && at !== undefined;
      read.textContent = known ? `at ${whole.format(panel.at[at])} transitions` : "";
      panel.groups.forEach((group, number) => {
        const value = known ? group.value[at] : null;
        values[number].textContent = value === null ? "" : `: ${exact.format(value)}`;
      });
    };
  }

  function draw(place) {
    const panel = panels[Number(place.dataset.panel)];
    const hidden = new Set();
    let plot = null;
    const rows = [panel.at], series = [{}], bands = [], first = [];
    const chart = () => ({
      show(number, shown) {
        for (const at of first[number]) plot.setSeries(at, { show: shown });
      },
    });
    const tell = legendOf(place.nextElementSibling, panel, hidden, chart);

    function make() {
      rows.length = series.length = 1;
      bands.length = first.length = 0;
      panel.groups.forEach((group, number) => {
        const stroke = colour(`--c${group.colour}`), show = !hidden.has(number);
        const line = { show, stroke, width: 2, points: { show: false } };
        first.push([series.length]);
        if (group.low) {
          const edge = { show, stroke: "transparent", width: 0, points: { show: false } };
          const top = series.length;
          first[number].push(top + 1, top + 2);
          rows.push(group.high, group.low, group.value);
          series.push(edge, edge, line);
          bands.push({ series: [top, top + 1], fill: `${stroke}2e` });
        } else {
          rows.push(group.value);
          series.push(line);
        }
      });
      const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 },
        ticks: { show: false }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
        values: (_, at) => at.map((each) => (each === null ? "" : compact.format(each))) };
      const width = place.clientWidth;
      plot = new uPlot({
        width, height: height(width), series, bands,
        scales: { x: { time: false } },
        axes: [{ ...axis, label: "transitions", labelSize: 20, size: 32 }, { ...axis, label: "return", size: 52 }],
        legend: { show: false },
        cursor: { y: false, points: { size: 7 } },
        hooks: { setCursor: [(u) => tell(u.cursor.idx)] },
      }, rows, place);
    }

    make();
    new ResizeObserver(() => {
      const width = place.clientWidth;
      if (width && width !== plot.width) plot.setSize({ width, height: height(width) });
    }).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      plot.destroy();
      make();
    });
  }

  document.querySelectorAll(".chart").forEach(draw);
})();
