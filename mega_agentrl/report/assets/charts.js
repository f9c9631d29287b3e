// Shows the values under the pointer on a chart; the chart itself is drawn without a script.

function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= wanted) low = middle; else high = middle;
  }
  return Math.abs(steps[high] - wanted) < Math.abs(wanted - steps[low]) ? high : low;
}

function readChart(figure) {
  const plot = figure.querySelector("svg.plot"), cursor = plot.querySelector(".cursor");
  let chart = null;
  plot.addEventListener("pointermove", (event) => {
    chart = chart || readData(figure.dataset.chart);
    const box = plot.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    const inside = Math.min(1, Math.max(0, (share - chart.start) / (chart.stop - chart.start)));
    const wanted = chart.low + inside * (chart.high - chart.low);
    const all = [...new Set(chart.series.flatMap((series) => series.x))].sort((a, b) => a - b);
    const step = all[nearest(all, wanted)];
    const at = chart.start + (step - chart.low) / (chart.high - chart.low) * (chart.stop - chart.start);
    const x = at * plot.viewBox.baseVal.width;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.classList.add("on");
    const lines = chart.series.filter((series) => series.x.length).map((series) => {
      const index = nearest(series.x, step);
      const label = el("span", {}, el("i", { class: `swatch b${series.colour}` }), series.name || "value");
      return series.x[index] === step ? [label, `${shown(series.y[index])} ${chart.unit}`] : null;
    });
    showTip(event, el("div", { class: "head" }, `step ${step}`), rows(lines));
  });
  plot.addEventListener("pointerleave", () => {
    cursor.classList.remove("on");
    hideTip();
  });
}

function startCharts() {
  for (const figure of document.querySelectorAll("figure[data-chart]")) readChart(figure);
  const root = document.documentElement;
  const preset = /scheme=(dark|light)/.exec(location.hash);
  if (preset) root.dataset.scheme = preset[1];
  byId("scheme").addEventListener("click", () => {
    const dark = root.dataset.scheme ? root.dataset.scheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.scheme = dark ? "light" : "dark";
  });
}
