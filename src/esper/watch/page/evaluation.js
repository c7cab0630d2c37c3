// Controllers against each other on the same cases, as results arrive.

import { html } from "./vendor/preact-htm.js";
import { useView } from "./live.js";
import { Absent, COLOURS, Section } from "./parts.js";
import { percent, rows, signed, whole } from "./words.js";

const CERTAIN = 1.96; // standard errors of a 95 % interval

// Every controller: its mean over contexts and what is known of its spread within them.
export function standings(answer) {
  const groups = rows(answer.groups);
  const names = [...new Set([...(answer.config.controllers ?? []), ...groups.map((row) => row.controller)])];
  return names.map((name) => {
    const own = groups.filter((row) => row.controller === name);
    const mean = (column) => own.reduce((sum, row) => sum + row[column], 0) / (own.length || 1);
    const errors = own.filter((row) => row.episodes > 1).map((row) => Math.max(0, row.squares - row.score ** 2) / (row.episodes - 1));
    const error = errors.length && errors.length === own.length ? Math.sqrt(errors.reduce((a, b) => a + b, 0)) / own.length : null;
    return {
      name, own, error,
      episodes: own.reduce((sum, row) => sum + row.episodes, 0),
      score: own.length ? mean("score") : null,
      gain: mean("gain"), added: mean("added"), interventions: mean("interventions"), harmful: mean("harmful"),
    };
  });
}

export function Evaluation({ run }) {
  const { answer, error } = useView("evaluation", { run });
  if (error) return html`<${Absent}>${error}<//>`;
  if (!answer) return html`<p class="reading" role="status">Reading …</p>`;
  const found = standings(answer);
  const total = answer.config.episodes ? answer.config.episodes / (found.length || 1) : null;
  return html`
    <${Section} title="Controllers" reading="Mean score over contexts (net gain in units of what can be gained there; never growing is 0) with a 95 % interval from the spread within contexts, which needs two cases of each.">
      <${Standings} found=${found} total=${total}/>
    <//>
    <${Matrix} found=${found}/>`;
}

function Standings({ found, total }) {
  const ends = found.filter((each) => each.score !== null).flatMap((each) => [each.score - CERTAIN * (each.error ?? 0), each.score + CERTAIN * (each.error ?? 0)]);
  const [least, most] = [Math.min(0, ...ends), Math.max(0.1, ...ends)];
  const x = (value) => 4 + (192 * (value - least)) / (most - least);
  return html`<div class="wide"><table><thead><tr><th>controller</th><th>score</th><th></th><th>net gain</th><th>harmful</th><th>parameters</th><th>decisions</th><th>episodes</th></tr></thead>
    <tbody>${found.map((each) => html`<tr><td><b>${each.name}</b></td>
      <td class="figure">${signed(each.score)}${each.error === null ? "" : ` ± ${(CERTAIN * each.error).toFixed(2)}`}</td>
      <td>${each.score !== null && html`<svg class="interval" viewBox="0 0 200 18" role="img" aria-label="${each.name} ${signed(each.score)}">
        <line class="zero" x1=${x(0)} x2=${x(0)} y1="0" y2="18"/>
        ${each.error !== null && html`<line class="range" x1=${x(each.score - CERTAIN * each.error)} x2=${x(each.score + CERTAIN * each.error)} y1="9" y2="9"/>`}
        <circle cx=${x(each.score)} cy="9" r="4.5" fill=${COLOURS.blue}/></svg>`}</td>
      <td class="figure">${signed(each.gain, 1)}</td><td class="figure">${percent(100 * each.harmful, 0)}</td>
      <td class="figure">${whole(each.added)}</td><td class="figure">${each.interventions.toFixed(1)}</td>
      <td class="figure">${each.episodes}${total ? ` / ${whole(total)}` : ""}</td></tr>`)}</tbody></table></div>`;
}

function Matrix({ found }) {
  const contexts = [...new Set(found.flatMap((each) => each.own.map((row) => row.context)))].sort();
  if (!contexts.length) return html`<${Absent}>No episode is over yet.<//>`;
  return html`<${Section} title="By context" reading="Mean score of every controller in every context.">
    <div class="wide"><table class="heat"><thead><tr><th></th>${found.map((each) => html`<th>${each.name}</th>`)}</tr></thead>
    <tbody>${contexts.map((context) => html`<tr><th>${context}</th>${found.map((each) => {
      const row = each.own.find((own) => own.context === context);
      if (!row) return html`<td class="none">·</td>`;
      const strong = Math.min(1, Math.abs(row.score)) * 0.8;
      return html`<td title="${row.episodes} episodes" style=${{ "--strong": `${Math.round(100 * strong)}%`, "--heat": row.score < 0 ? COLOURS.vermilion : COLOURS.green }}>${signed(row.score)}</td>`;
    })}</tr>`)}</tbody></table></div>
  <//>`;
}
