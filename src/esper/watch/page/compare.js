// Two or more runs side by side: curves overlaid, figures, and the settings that differ.

import { html, useEffect, useState } from "./vendor/preact-htm.js";
import { Lines } from "./charts.js";
import { standings } from "./evaluation.js";
import { useView } from "./live.js";
import { described } from "./overview.js";
import { Absent, Badge, flat, Section, SERIES, Table } from "./parts.js";
import { to } from "./routes.js";
import { number, rows, signed } from "./words.js";

const colour = (n) => SERIES[n % SERIES.length];
const metric = (name) => (answer) => rows(answer.health).filter((row) => row.name === name).map((row) => [row.round, row.mean]);
const epochs = (name) => (answer) => rows(answer.epochs).map((row) => [row.round, row[name]]);

function evaluations(answer) {
  const all = rows(answer.evaluations);
  const learned = all.find((row) => row.round > 0)?.controller;
  return all.filter((row) => row.controller === learned).map((row) => [row.round, row.score]);
}

// By kind of run: what is drawn, and its points [[round, value]].
const CURVES = {
  training: {
    "Score by evaluation": evaluations,
    "Mean return of training episodes": (answer) => rows(answer.returns).map((row) => [row.round, row.mean]),
    "KL of updates": metric("kl"),
    "Entropy of the head op": metric("heads.op.entropy"),
  },
  growth: {
    "Score on validation data": epochs("score"),
    "Validation loss": epochs("val_loss"),
    "Parameters in seeds": epochs("added"),
  },
};

export function Compare({ runs }) {
  const [found, setFound] = useState({});
  const tell = (run, what) => setFound((before) => ({ ...before, [run]: what }));
  const known = runs.filter((run) => found[run]).map((run, n) => ({ ...found[run], n }));
  const kinds = [...new Set(known.map((run) => run.kind))];
  const of = (kind) => known.filter((run) => run.kind === kind);
  return html`
    <div class="bar"><h1>Compared</h1><a href=${to.overview()}>‹ all runs</a></div>
    ${runs.map((run) => html`<${Reader} key=${run} run=${run} tell=${tell}/>`)}
    ${runs.length < 2 && html`<${Absent}>Choose two or more runs in the list.<//>`}
    <ul class="legend large">${known.map(
      (run) => html`<li><i style=${{ background: colour(run.n) }}></i>
        <a href=${to.run(run.run)}>${run.run}</a> <${Badge} ...${run}/></li>`,
    )}</ul>
    ${kinds.map((kind) => html`
      <${Overlaid} key=${kind} kind=${kind} known=${of(kind)}/>
      ${kind === "evaluation" && html`<${Standing} known=${of(kind)}/>`}
      <${Differing} known=${of(kind)}/>`)}`;
}

// Reads a run and hands on what was found; the second part knows which kind of run it is.
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

function Overlaid({ kind, known }) {
  if (!CURVES[kind]) return null;
  const unit = kind === "training" ? "round" : "epoch";
  return html`<${Section} title=${kind === "training" ? "Training" : "Growing"}><div class="charts large">
    ${Object.entries(CURVES[kind]).map(([title, pick]) => {
      const curves = known.map((run) => ({ run, points: new Map(pick(run.answer)) })).filter((one) => one.points.size);
      const x = [...new Set(curves.flatMap((one) => [...one.points.keys()]))].sort((a, b) => a - b);
      const drawn = curves.map(({ run, points }) => ({
        label: run.run,
        colour: colour(run.n),
        y: x.map((round) => points.get(round) ?? null),
      }));
      return drawn.length > 0 && html`<${Lines} title=${title} x=${x} lines=${drawn} xLabel=${unit} height=${240}/>`;
    })}</div><//>`;
}

function Standing({ known }) {
  const tables = known.map((run) => new Map(standings(run.answer).map((each) => [each.name, each.score])));
  const names = [...new Set(tables.flatMap((scores) => [...scores.keys()]))];
  return html`<${Section} title="Evaluations">
    <${Table} head=${["controller", ...known.map((run) => run.run)]} figures=${known.map((_, n) => n + 1)}
      rows=${names.map((name) => [name, ...tables.map((scores) => signed(scores.get(name)))])}/>
  <//>`;
}

function Differing({ known }) {
  if (known.length < 2) return null;
  const settings = known.map(({ answer }) => new Map(flat({ ...answer.config, model: answer.config.model?.name ?? null })));
  const names = [...new Set(settings.flatMap((each) => [...each.keys()]))].sort();
  const differing = names.filter((name) => new Set(settings.map((each) => each.get(name) ?? "—")).size > 1);
  const cells = differing.map((name) => [name, ...settings.map((each) => each.get(name) ?? "—")]);
  return html`<${Section} title="Settings that differ" reading="${number(names.length - differing.length)} others are the same.">
    ${differing.length === 0 && html`<${Absent}>None does.<//>`}
    ${differing.length > 0 && html`<${Table} head=${["setting", ...known.map((run) => run.run)]} rows=${cells}/>`}
  <//>`;
}
