// Controllers against each other on the same cases, as results arrive.

import { html } from "./vendor/preact-htm.js";
import { useView } from "./live.js";
import { Absent, COLOURS, HeatMap, Reading, Section, Table } from "./parts.js";
import { percent, rows, signed, whole } from "./words.js";

const CERTAIN = 1.96; // standard errors of a 95 % interval
const WIDE = 200; // of an interval's drawing
const HEAD = ["controller", "score", "", "net gain", "harmful", "parameters", "decisions", "episodes"];
const SCORES = `Mean score over contexts (net gain in units of what can be gained there; never growing is 0) with a
  95 % interval from the spread within contexts, which needs two cases of each.`;

// Of a mean over contexts, from the spread within each; null where one has a single episode.
function standardError(own) {
  if (!own.length || own.some((row) => row.episodes < 2)) return null;
  const variances = own.map((row) => Math.max(0, row.squares - row.score ** 2) / (row.episodes - 1));
  return Math.sqrt(variances.reduce((sum, each) => sum + each, 0)) / own.length;
}

// Every controller: its means over contexts, and what is known of their spread.
export function standings(answer) {
  const groups = rows(answer.groups);
  const names = new Set([...(answer.config.controllers ?? []), ...groups.map((row) => row.controller)]);
  return [...names].map((name) => {
    const own = groups.filter((row) => row.controller === name);
    const mean = (column) => own.reduce((sum, row) => sum + row[column], 0) / (own.length || 1);
    return {
      name,
      own,
      reach: CERTAIN * (standardError(own) ?? 0),
      certain: standardError(own) !== null,
      episodes: own.reduce((sum, row) => sum + row.episodes, 0),
      score: own.length ? mean("score") : null,
      gain: mean("gain"),
      added: mean("added"),
      interventions: mean("interventions"),
      harmful: mean("harmful"),
    };
  });
}

export function Evaluation({ run }) {
  const { answer, error } = useView("evaluation", { run });
  if (error) return html`<${Absent}>${error}<//>`;
  if (!answer) return html`<${Reading}/>`;
  const found = standings(answer);
  const total = answer.config.episodes ? answer.config.episodes / (found.length || 1) : null;
  return html`
    <${Section} title="Controllers" reading=${SCORES}><${Standings} found=${found} total=${total}/><//>
    <${Matrix} found=${found}/>`;
}

function Standings({ found, total }) {
  const ends = found.filter((each) => each.score !== null).flatMap(({ score, reach }) => [score - reach, score + reach]);
  const [least, most] = [Math.min(0, ...ends), Math.max(0.1, ...ends)];
  const x = (value) => 4 + ((WIDE - 8) * (value - least)) / (most - least);
  const cells = found.map((each) => [
    html`<b>${each.name}</b>`,
    `${signed(each.score)}${each.certain ? ` ± ${each.reach.toFixed(2)}` : ""}`,
    each.score !== null && html`<${Interval} each=${each} x=${x}/>`,
    signed(each.gain, 1),
    percent(100 * each.harmful, 0),
    whole(each.added),
    each.interventions.toFixed(1),
    `${each.episodes}${total ? ` / ${whole(total)}` : ""}`,
  ]);
  return html`<${Table} head=${HEAD} rows=${cells} figures=${[1, 3, 4, 5, 6, 7]}/>`;
}

const Interval = ({ each, x }) => html`
  <svg class="interval" viewBox="0 0 ${WIDE} 18" role="img" aria-label="${each.name} ${signed(each.score)}">
    <line class="zero" x1=${x(0)} x2=${x(0)} y1="0" y2="18"/>
    ${each.certain && html`<line class="range" x1=${x(each.score - each.reach)} x2=${x(each.score + each.reach)} y1="9" y2="9"/>`}
    <circle cx=${x(each.score)} cy="9" r="4.5" fill=${COLOURS.blue}/>
  </svg>`;

function Matrix({ found }) {
  const contexts = [...new Set(found.flatMap((each) => each.own.map((row) => row.context)))].sort();
  if (!contexts.length) return html`<${Absent}>No episode is over yet.<//>`;
  const cell = (context, name) => {
    const row = found.find((each) => each.name === name).own.find((own) => own.context === context);
    const said = row && `${name} in ${context}: ${signed(row.score)}, ${row.episodes} episodes`;
    return row && { text: signed(row.score), said, strong: 0.8 * Math.min(1, Math.abs(row.score)), bad: row.score < 0 };
  };
  return html`<${Section} title="By context" reading="Mean score of every controller in every context.">
    <${HeatMap} rows=${contexts} columns=${found.map((each) => each.name)} cell=${cell}/>
  <//>`;
}
