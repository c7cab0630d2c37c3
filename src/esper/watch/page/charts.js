// Curves over rounds or epochs, drawn by uPlot in the colours of the page.

import { html, useEffect, useRef } from "./vendor/preact-htm.js";
import { number } from "./words.js";

const uPlot = window.uPlot;
const HEIGHT = 190;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");
const drawn = new Set();
dark.addEventListener("change", () => drawn.forEach((plot) => plot.redraw(false, false)));

const axis = (label, more = {}) => ({
  stroke: () => colour("--faint"),
  grid: { stroke: () => colour("--line"), width: 1 },
  ticks: { show: false },
  font: "11px system-ui, sans-serif",
  labelFont: "11px system-ui, sans-serif",
  label,
  labelSize: label ? 16 : 0,
  gap: 4,
  ...more,
});

// Lines across the whole width (thresholds) and down the whole height (anomalies).
function marks(current) {
  return (plot) => {
    const { ctx, bbox } = plot;
    const { across = [], down = [] } = current();
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.textAlign = "left";
    ctx.textBaseline = "bottom";
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    for (const mark of across) {
      const y = plot.valToPos(mark.y, "y", true);
      if (!(y >= bbox.top && y <= bbox.top + bbox.height)) continue;
      ctx.strokeStyle = ctx.fillStyle = mark.colour ?? colour("--bad");
      ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      if (mark.label) ctx.fillText(mark.label, bbox.left + 4, y - 3 * devicePixelRatio);
    }
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const mark of down) {
      const x = plot.valToPos(mark.x, "x", true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.strokeStyle = mark.colour ?? colour("--bad");
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };
}

// Each line is a series; one with `low` and `high` has a band, of two series without strokes.
function plan(lines) {
  const series = [{ label: "" }];
  const bands = [];
  const data = [];
  for (const line of lines) {
    if (line.low) {
      const shade = `${line.colour}2b`;
      const edge = { width: 0, points: { show: false }, label: "", class: "hidden", value: () => "" };
      series.push({ ...edge }, { ...edge });
      bands.push({ series: [series.length - 1, series.length - 2], fill: shade });
      data.push(line.low, line.high);
    }
    const many = line.y.filter((value) => value !== null).length > 60;
    series.push({
      label: line.label,
      stroke: line.colour,
      width: line.width ?? 1.8,
      dash: line.dash,
      spanGaps: true,
      points: { show: line.points ?? !many, size: 4, fill: line.colour },
      value: (_, value) => (value === null || value === undefined ? "" : number(value)),
    });
    data.push(line.y);
  }
  return { series, bands, data };
}

// `lines`: [{label, colour, y, low?, high?, dash?, width?}] over `x`; `across`, `down`: marks.
export function Lines({ title, x, lines, across, down, xLabel, yLabel, height = HEIGHT, log, range, reading }) {
  const home = useRef(null);
  const plot = useRef(null);
  const now = useRef({});
  now.current = { across, down };
  const shape = JSON.stringify([lines.map((line) => [line.label, line.colour, !!line.low]), xLabel, yLabel, log, height]);
  const made = plan(lines);
  useEffect(() => {
    const element = home.current;
    const options = {
      width: Math.max(200, element.clientWidth),
      height,
      series: made.series,
      bands: made.bands,
      cursor: { points: { size: 6 }, y: false },
      legend: { live: true, markers: { width: 8 } },
      scales: {
        x: { time: false, range: (_, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) },
        y: { distr: log ? 3 : 1, range },
      },
      axes: [
        axis(xLabel, { size: 26, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4] }),
        axis(yLabel, { size: 48, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) }),
      ],
      hooks: { draw: [marks(() => now.current)] },
      padding: [8, 8, 0, 0],
    };
    plot.current = new uPlot(options, [x, ...made.data], element);
    drawn.add(plot.current);
    const watch = new ResizeObserver(() => plot.current.setSize({ width: Math.max(200, element.clientWidth), height }));
    watch.observe(element);
    return () => {
      watch.disconnect();
      drawn.delete(plot.current);
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape]);
  const values = JSON.stringify([x, made.data, across, down]);
  useEffect(() => {
    if (plot.current) plot.current.setData([x, ...made.data]);
  }, [shape, values]);
  const said = lines.map((line) => `${line.label} ${number(lastOf(line.y))}`).join(", ");
  return html`<figure class="chart">
    <figcaption>${title}${reading && html`<small>${reading}</small>`}</figcaption>
    <div ref=${home} role="img" aria-label="${title}: now ${said || "nothing"}"></div>
  </figure>`;
}

function lastOf(values) {
  for (let n = values.length - 1; n >= 0; n--) if (values[n] !== null) return values[n];
  return null;
}
