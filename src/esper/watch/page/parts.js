// Small pieces that every page is made of, and the colours of things.

import { html } from "./vendor/preact-htm.js";
import { live, useClock } from "./live.js";
import { ago, duration, lower } from "./words.js";

export const COLOURS = {
  orange: "#E69F00", sky: "#56B4E9", green: "#009E73", yellow: "#F0E442",
  blue: "#0072B2", vermilion: "#D55E00", purple: "#CC79A7", grey: "#9AA0A6",
};
export const STAGES = {
  DORMANT: COLOURS.grey, GERMINATED: COLOURS.orange, TRAINING: COLOURS.orange,
  BLENDING: COLOURS.sky, HOLDING: COLOURS.blue, FOSSILIZED: COLOURS.green,
  PRUNED: COLOURS.vermilion, EMBARGOED: COLOURS.purple, RESETTING: COLOURS.purple,
};
export const OPS = {
  WAIT: COLOURS.grey, GERMINATE: COLOURS.orange, ADVANCE: COLOURS.sky,
  FOSSILIZE: COLOURS.green, PRUNE: COLOURS.vermilion,
};
export const SERIES = [
  COLOURS.blue, COLOURS.orange, COLOURS.green, COLOURS.purple, COLOURS.sky, COLOURS.vermilion,
  "#999933", "#882255",
];
export const OCCUPIED = new Set(["GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED"]);

export const Badge = ({ state, why }) =>
  html`<span class="badge ${state}" title=${why || state}>${state}</span>`;

// How long ago a run's last word came; words are newer than answers.
export function Ago({ run, time }) {
  useClock();
  return ago(Math.max(time, live.runs.get(run)?.time ?? 0));
}

export const Tile = ({ what, value, more }) =>
  html`<div><dt>${what}</dt><dd>${value}<small>${more}</small></dd></div>`;

export const Section = ({ title, reading, id, more, children }) => html`
  <section aria-label=${title} id=${id}>
    <header class="section"><h2>${title}</h2>${more}</header>
    ${reading && html`<p class="reading">${reading}</p>`}
    ${children}
  </section>`;

// A table of cells; `figures` are the places of columns with numbers.
export const Table = ({ head, rows, figures = [] }) => html`
  <div class="wide"><table>
    <thead><tr>${head.map((name) => html`<th>${name}</th>`)}</tr></thead>
    <tbody>${rows.map(
      (row) => html`<tr>${row.map((cell, n) => html`<td class=${figures.includes(n) ? "figure" : ""}>${cell}</td>`)}</tr>`,
    )}</tbody>
  </table></div>`;

// A map of numbers: `cell(row, column)` is {text, said, strong (0 to 1), bad, mark} or nothing.
export const HeatMap = ({ rows, columns, cell }) => html`
  <div class="wide"><table class="heat">
    <thead><tr><th></th>${columns.map((column) => html`<th>${column}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr><th>${row}</th>${columns.map((column) => heat(cell(row, column)))}</tr>`)}</tbody>
  </table></div>`;

function heat(found) {
  if (!found) return html`<td class="none">·</td>`;
  const look = {
    "--strong": `${Math.round(100 * Math.min(1, found.strong))}%`,
    "--heat": found.bad ? COLOURS.vermilion : COLOURS.green,
  };
  return html`<td class=${found.mark ? "marked" : ""} title=${found.said} aria-label=${found.said} style=${look}>${found.text}</td>`;
}

// A bar as long as a number's share of the largest.
export const Gauge = ({ value, most }) => {
  const width = `${Math.min(100, (100 * Math.abs(value ?? 0)) / (most || 1))}%`;
  return html`<span class="gauge"><i class=${value < 0 ? "bad" : ""} style=${{ width }}></i></span>`;
};

export const Reading = () => html`<p class="reading" role="status">Reading …</p>`;

export const Absent = ({ children }) => html`<p class="absent">${children}</p>`;

export const Progress = ({ done, total, unit, left, state }) => {
  const share = total ? Math.min(1, done / total) : 0;
  const time = state === "running" && left !== null ? `${duration(left)} left` : "";
  return html`
    <div class="progress" role="progressbar" aria-valuenow=${done} aria-valuemax=${total || done}
      aria-label="${done} of ${total ?? "?"} ${unit}">
      <span class="track"><i style=${{ width: `${100 * share}%` }}></i></span>
      <small>${done}${total ? ` / ${total}` : ""} ${unit}${time && ` · ${time}`}</small>
    </div>`;
};

export const Sparkline = ({ values, label, wide = 120, high = 28, colour = "var(--accent)", least, most }) => {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return html`<span class="faint">—</span>`;
  const low = least ?? Math.min(...known);
  const top = most ?? Math.max(...known);
  const y = (value) => high - 2 - ((high - 4) * (value - low)) / (top - low || 1);
  const x = (n) => 1 + ((wide - 2) * n) / (values.length - 1);
  const points = values.map((value, n) => (value === null ? null : `${x(n).toFixed(1)},${y(value).toFixed(1)}`));
  return html`<svg class="spark" viewBox="0 0 ${wide} ${high}" role="img" aria-label=${label} preserveAspectRatio="none">
    <polyline points=${points.filter(Boolean).join(" ")} fill="none" stroke=${colour} stroke-width="1.6"
      vector-effect="non-scaling-stroke" stroke-linejoin="round"/>
  </svg>`;
};

// A slot as a bar: its colour is the stage, how far it is filled is alpha.
export const Slot = ({ name, slot }) => {
  const full = OCCUPIED.has(slot.stage);
  const said = full
    ? `${name}: ${slot.blueprint ?? "?"}, ${lower(slot.stage)}, alpha ${(slot.alpha ?? 0).toFixed(2)}`
    : `${name}: ${slot.stage === "DORMANT" ? "empty" : lower(slot.stage)}`;
  const fill = slot.stage === "FOSSILIZED" ? 1 : (slot.alpha ?? 0);
  return html`<span class="slot ${full ? "full" : ""} ${lower(slot.stage)}" title=${said} aria-hidden="true"
    style=${{ "--stage": STAGES[slot.stage] }}>
    <i style=${{ width: `${100 * Math.min(1, Math.max(0, fill))}%` }}></i><b>${full ? slot.blueprint : ""}</b>
  </span>`;
};

export const StageLegend = () => html`<ul class="legend" aria-label="colours of stages">
  ${["TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED", "EMBARGOED"].map(
    (stage) => html`<li><i style=${{ background: STAGES[stage] }}></i>${lower(stage)}</li>`,
  )}<li class="faint">filled as far as alpha</li></ul>`;

export const Settings = ({ config, versions }) => {
  const entries = flat(config);
  return html`<details class="settings"><summary>Settings and versions</summary>
    <div class="columns">${[...entries, ...flat(versions)].map(
      ([name, value]) => html`<div><span class="faint">${name}</span> ${value}</div>`,
    )}</div></details>`;
};

// Settings by dotted names, as text; lists of tables are only counted.
export function flat(config, before = "") {
  return Object.entries(config ?? {}).flatMap(([name, value]) => {
    if (Array.isArray(value)) {
      const inner = value.some((each) => each && typeof each === "object") ? `${value.length} entries` : value.join(", ");
      return [[before + name, inner || "none"]];
    }
    if (value && typeof value === "object") return flat(value, `${before}${name}.`);
    return [[before + name, String(value)]];
  });
}
