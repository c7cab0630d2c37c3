// Two or more runs side by side: curves overlaid, figures, and the settings that differ.

import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { Lines } from "./charts.js";
import { standings } from "./evaluation.js";
import { useView } from "./live.js";
import { described } from "./overview.js";
import { Absent, Badge, flat, Section, SERIES } from "./parts.js";
import { to } from "./routes.js";
import { number, rows, signed } from "./words.js";

// Reads a run and hands on what was found.
function Reader({ run, tell }) {
  const { answer: about } = useView("summary", { run });
  return about?.kind ? html`<${Whole} run=${run} about=${about} tell=${tell}/>` : null;
}

function Whole({ run, about, tell }) {
  const { answer } = useView(about.kind, { run });
  useEffect(() => {
    if (answer) tell(run, { ...described(about), answer });
  }, [answer, about]);
  return null;
}

const CURVES = {
  training: [
    ["Score by evaluation", (answer) => {
      const all = rows(answer.evaluations);
      const name = all.find((row) => row.round > 0)?.controller;
      return all.filter((row) => row.controller === name).map((row) => [row.round, row.score]);
    }],
    ["Mean return of training episodes", (answer) => rows(answer.returns).map((row) => [row.round, row.mean])],
    ["KL of updates", (answer) => rows(answer.health).filter((row) => row.name === "kl").map((row) => [row.round, row.mean])],
    ["Entropy of the head op", (answer) => rows(answer.health).filter((row) => row.name === "heads.op.entropy").map((row) => [row.round, row.mean])],
  ],
  growth: [
    ["Score on validation data", (answer) => rows(answer.epochs).map((row) => [row.round, row.score])],
    ["Validation loss", (answer) => rows(answer.epochs).map((row) => [row.round, row.val_loss])],
    ["Parameters in seeds", (answer) => rows(answer.epochs).map((row) => [row.round, row.added])],
  ],
};

export function Compare({ runs }) {
  const [found, setFound] = useState({});
  const tell = (run, what) => setFound((before) => ({ ...before, [run]: what }));
  const known = runs.filter((run) => found[run]).map((run) => found[run]);
  const kinds = [...new Set(known.map((run) => run.kind))];
  return html`
    <div class="bar"><h1>Compared</h1><a href=${to.overview()}>‹ all runs</a></div>
    ${runs.map((run) => html`<${Reader} key=${run} run=${run} tell=${tell}/>`)}
    ${runs.length < 2 && html`<${Absent}>Choose two or more runs in the list.<//>`}
    <ul class="legend large">${known.map((run, n) => html`<li><i style=${{ background: SERIES[n % SERIES.length] }}></i><a href=${to.run(run.run)}>${run.run}</a> <${Badge} ...${run}/></li>`)}</ul>
    ${kinds.map((kind) => html`<${Overlaid} key=${kind} kind=${kind} known=${known}/>`)}
    ${kinds.includes("evaluation") && html`<${Standing} known=${known.filter((run) => run.kind === "evaluation")}/>`}
    ${kinds.map((kind) => html`<${Differing} key=${kind} known=${known.filter((run) => run.kind === kind)}/>`)}`;
}

function Overlaid({ kind, known }) {
  if (!CURVES[kind]) return null;
  return html`<${Section} title=${kind === "training" ? "Training" : "Growing"}><div class="charts large">
    ${CURVES[kind].map(([title, pick]) => {
      const curves = known.map((run, n) => (run.kind === kind ? { run, n, points: new Map(pick(run.answer)) } : null)).filter((one) => one?.points.size);
      const x = [...new Set(curves.flatMap((one) => [...one.points.keys()]))].sort((a, b) => a - b);
      const drawn = curves.map((one) => ({ label: one.run.run, colour: SERIES[one.n % SERIES.length], y: x.map((round) => one.points.get(round) ?? null) }));
      return drawn.length ? html`<${Lines} title=${title} x=${x} lines=${drawn} xLabel=${kind === "training" ? "round" : "epoch"} height=${240}/>` : null;
    })}</div><//>`;
}

function Standing({ known }) {
  return html`<${Section} title="Evaluations"><div class="wide"><table><thead><tr><th>controller</th>${known.map((run) => html`<th>${run.run}</th>`)}</tr></thead>
    <tbody>${[...new Set(known.flatMap((run) => standings(run.answer).map((each) => each.name)))].map((name) => html`<tr><td>${name}</td>
      ${known.map((run) => html`<td class="figure">${signed(standings(run.answer).find((each) => each.name === name)?.score)}</td>`)}</tr>`)}</tbody></table></div><//>`;
}

function Differing({ known }) {
  if (known.length < 2) return null;
  const settings = known.map((run) => new Map(flat({ ...run.answer.config, model: run.answer.config.model?.name ?? null })));
  const names = [...new Set(settings.flatMap((each) => [...each.keys()]))].sort();
  const differing = names.filter((name) => new Set(settings.map((each) => each.get(name) ?? "—")).size > 1);
  return html`<${Section} title="Settings that differ" reading="${number(names.length - differing.length)} others are the same.">
    ${differing.length === 0 ? html`<${Absent}>None does.<//>` : html`<div class="wide"><table><thead><tr><th>setting</th>${known.map((run) => html`<th>${run.run}</th>`)}</tr></thead>
      <tbody>${differing.map((name) => html`<tr><td class="faint">${name}</td>${settings.map((each) => html`<td class="figure">${each.get(name) ?? "—"}</td>`)}</tr>`)}</tbody></table></div>`}
  <//>`;
}
