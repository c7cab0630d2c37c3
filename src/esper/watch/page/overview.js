// All runs as rows: state, progress, a curve, the best score, anomalies. Sort, filter, compare.

import { html, useErrorBoundary, useState } from "./vendor/preact-htm.js";
import { useView } from "./live.js";
import { Absent, Ago, Badge, Progress, Sparkline } from "./parts.js";
import { go, to } from "./routes.js";
import { interval, percent, signed } from "./words.js";

const cell = (run, name, place = 0) => run[name]?.rows?.[0]?.[place] ?? null;

const KINDS = {
  training: {
    unit: "rounds",
    total: (run) => run.about.rounds,
    what: (run) => `training on ${run.about.suite ?? "a suite"}`,
    best: (run) => `${signed(cell(run, "best"))} ${interval({ low: cell(run, "best", 1), high: cell(run, "best", 2) })}`,
    curve: "mean return",
  },
  growth: {
    unit: "epochs",
    total: (run) => run.about.epochs,
    what: (run) => `${run.about.model ?? "a network"} growing under ${run.about.controller ?? "?"}`,
    best: (run) => percent(cell(run, "best"), 2),
    curve: "score",
  },
  evaluation: {
    unit: "episodes",
    total: (run) => run.about.episodes,
    what: (run) => `evaluation of ${(run.about.controllers ?? []).length} controllers`,
    best: (run) => `${cell(run, "best", 3)} ${signed(cell(run, "best"))}`,
    curve: "mean score of each controller",
  },
};

const RANK = ["failed", "stale", "running", "stopped", "finished", "unreadable"];
const ORDERS = {
  name: (a, b) => a.run.localeCompare(b.run, "en", { numeric: true }),
  state: (a, b) => RANK.indexOf(a.state) - RANK.indexOf(b.state),
  progress: (a, b) => b.share - a.share,
  best: (a, b) => (cell(b, "best") ?? -Infinity) - (cell(a, "best") ?? -Infinity),
  "last word": (a, b) => b.time - a.time,
  anomalies: (a, b) => (cell(b, "anomalies") ?? 0) - (cell(a, "anomalies") ?? 0),
};

export function described(run) {
  const kind = KINDS[run.kind];
  if (!kind) return { ...run, share: -1 };
  const done = cell(run, "done") ?? 0;
  const total = kind.total(run) ?? null;
  const since = run.kind === "evaluation" ? 0 : run.about.began_at;
  const pace = run.about.began && done > since ? (run.time - run.about.began) / (done - since) : null;
  const left = pace !== null && total ? (total - done) * pace : null;
  return { ...run, done, total, left, unit: kind.unit, share: total ? done / total : 0 };
}

export function Overview() {
  const { answer, error } = useView("summary", {});
  const [order, setOrder] = useState("last word");
  const [words, setWords] = useState("");
  const [chosen, setChosen] = useState(new Set());
  if (error) return html`<${Absent}>${error}<//>`;
  if (!answer) return html`<p class="reading" role="status">Looking for runs …</p>`;
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = answer
    .map(described)
    .filter((run) => wanted.every((word) => `${run.run} ${run.state} ${run.kind}`.toLowerCase().includes(word)))
    .sort((a, b) => ORDERS[order](a, b) || ORDERS.name(a, b));
  const toggle = (name) => {
    const next = new Set(chosen);
    if (!next.delete(name)) next.add(name);
    setChosen(next);
  };
  const heading = (name, by) => html`<th aria-sort=${order === by ? "descending" : "none"}>
    <button type="button" onClick=${() => setOrder(by)}>${name}${order === by ? " ↓" : ""}</button></th>`;
  return html`
    <div class="bar">
      <h1>Runs <small>${answer.length}</small></h1>
      <label class="search">Filter <input type="search" value=${words} placeholder="name, state or kind"
        onInput=${(event) => setWords(event.target.value)}/></label>
      <button type="button" class="action" disabled=${chosen.size < 2}
        onClick=${() => go(to.compare([...chosen]))}>Compare ${chosen.size > 1 ? chosen.size : ""}</button>
    </div>
    ${answer.length === 0 && html`<${Absent}>There is no run here yet; it appears as soon as one begins.<//>`}
    <div class="wide"><table class="runs">
      <thead><tr><th><span class="unseen">compare</span></th>${heading("run", "name")}${heading("state", "state")}
        ${heading("progress", "progress")}<th>curve</th>${heading("best", "best")}
        ${heading("anomalies", "anomalies")}${heading("last word", "last word")}</tr></thead>
      <tbody>${shown.map((run) => html`<${Line} key=${run.run} run=${run} chosen=${chosen.has(run.run)}
        toggle=${() => toggle(run.run)}/>`)}</tbody>
    </table></div>`;
}

function Line({ run, chosen, toggle }) {
  const [failure] = useErrorBoundary(); // one that cannot be shown hides no other
  const kind = failure ? null : KINDS[run.kind];
  if (!kind || run.state === "unreadable") {
    return html`<tr><td></td><td><b>${run.run}</b></td><td><${Badge} ...${run}/></td>
      <td colspan="5" class="faint">${run.why || "it cannot be shown"}</td></tr>`;
  }
  const anomalies = cell(run, "anomalies") ?? 0;
  const values = (run.curve?.rows ?? []).map((row) => row[1]);
  return html`<tr class=${run.state}>
    <td><input type="checkbox" checked=${chosen} onChange=${toggle} aria-label="compare ${run.run}"/></td>
    <td><a href=${to.run(run.run)}>${run.run}</a><small>${kind.what(run)}</small></td>
    <td><${Badge} ...${run}/></td>
    <td><${Progress} ...${run}/></td>
    <td><${Sparkline} values=${values} label="${kind.curve} of ${run.run}"/></td>
    <td class="figure">${cell(run, "best") === null ? "—" : kind.best(run)}</td>
    <td class="figure">${anomalies ? html`<span class="badge failed">${anomalies}</span>` : "none"}</td>
    <td class="faint"><${Ago} run=${run.run} time=${run.time}/></td>
  </tr>`;
}
