// One episode: its curves and slots over epochs, and each decision with all that stood behind it.

import { html, useState } from "./vendor/preact-htm.js";
import { useView } from "./live.js";
import { Absent, COLOURS, OCCUPIED, OPS, Section, StageLegend, STAGES, Tile } from "./parts.js";
import { go, to } from "./routes.js";
import { lower, number, percent, rows, signed, whole } from "./words.js";

const LEFT = 70; // of the drawing, for names
const WIDE = 960;
const HIGH = 170; // of the curves
const ROW = 26; // of a slot
const MARKS = { GERMINATE: "▲", ADVANCE: "▶", FOSSILIZE: "◆", PRUNE: "✕" };

export function Episode({ route }) {
  const { run, round, env } = route;
  const { answer, error } = useView("episode", { run, round, env });
  if (error) return html`<${Absent}>${error}<//>`;
  if (!answer) return html`<p class="reading" role="status">Reading …</p>`;
  const steps = rows(answer.steps);
  if (!steps.length) return html`<${Absent}>Round ${round} has no steps of environment ${env}.<//>`;
  const chosen = route.step ?? steps.at(-1).step;
  return html`
    <nav class="bar" aria-label="environments"><h2>Environment ${env}, round ${round}</h2>
      <span class="buttons">
        ${env > 0 && html`<a href=${to.episode(run, round, env - 1)}>‹ environment ${env - 1}</a>`}
        <a href=${to.episode(run, round, env + 1)}>environment ${env + 1} ›</a>
        <a href=${to.round(run, round)}>all environments</a>
      </span></nav>
    <${Ending} answer=${answer} steps=${steps}/>
    <${Drawing} answer=${answer} steps=${steps} route=${route} chosen=${chosen}/>
    <${Decision} route=${route} step=${chosen} steps=${steps}/>
    <${Changes} answer=${answer}/>`;
}

function Ending({ answer, steps }) {
  const [ended] = rows(answer.ended);
  const [failed] = rows(answer.failed);
  const now = steps.at(-1);
  return html`<dl class="figures">
    <${Tile} what="accuracy now" value=${percent(now.accuracy)} more="committed ${percent(now.committed)}"/>
    <${Tile} what="return so far" value=${signed(steps.reduce((sum, row) => sum + (row.reward ?? 0), 0))} more="${steps.length} epochs"/>
    <${Tile} what="parameters added" value=${whole(now.added ?? 0)} more="in seeds"/>
    ${ended && html`<${Tile} what="net gain" value=${signed(ended.net_gain)} more="${ended.context}, case ${ended.seed}"/>`}
    ${ended && html`<${Tile} what="never grown" value=${percent(ended.control)} more="the same case"/>`}
    ${failed && html`<${Tile} what="rolled back" value="epoch ${failed.step + 1}" more=${failed.reason}/>`}
  </dl>`;
}

// What each slot holds at the end of each step: [{slot, step, stage, blueprint, alpha}].
function cells(answer, steps) {
  const held = {};
  const changes = rows(answer.changes);
  return steps.flatMap((row) => {
    for (const change of changes) if (change.step === row.step) held[change.slot] = change;
    return answer.layout.slots.map((slot) => ({
      slot, step: row.step, stage: held[slot]?.after ?? "DORMANT", blueprint: held[slot]?.blueprint,
      alpha: row[`alpha_${slot}`] ?? 1,
    }));
  });
}

function Drawing({ answer, steps, route, chosen }) {
  const slots = answer.layout.slots;
  const ops = answer.layout.actions[0];
  const horizon = Math.max(answer.about.horizon ?? 0, steps.at(-1).step + 1);
  const wide = (WIDE - LEFT) / horizon;
  const x = (step) => LEFT + wide * step;
  const drawn = [
    ["network as it is", COLOURS.blue, steps.map((row) => [row.step, row.accuracy]), ""],
    ["what is permanent", COLOURS.green, steps.map((row) => [row.step, row.committed]), "6 3"],
    ["never grown", "var(--ink)", (answer.control ?? []).map((value, step) => [step, value]), "1 3"],
  ].map(([label, colour, points, dash]) => ({ label, colour, dash, points: points.filter(([, value]) => value !== null && value !== undefined) }));
  const values = drawn.flatMap((line) => line.points.map(([, value]) => value));
  const [least, most] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
  const y = (value) => HIGH - 8 - ((HIGH - 20) * (value - least)) / (most - least || 1);
  const total = HIGH + 14 + slots.length * ROW + 26;
  const decisions = rows(answer.decisions);
  const press = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    const next = Math.min(steps.at(-1).step, Math.max(0, chosen + by));
    go(to.decision(route.run, route.round, route.env, next));
    event.preventDefault();
  };
  const choose = (step) => go(to.decision(route.run, route.round, route.env, step));
  return html`<${Section} title="Epoch by epoch" reading="A step is a decision and then an epoch. Choose one with the mouse, or with the arrow keys."
      more=${html`<${StageLegend}/>`}>
    <div class="wide"><svg class="episode" viewBox="0 0 ${WIDE + 8} ${total}" tabindex="0" onKeyDown=${press} role="group"
        aria-label="accuracy and slots over ${steps.length} epochs; arrow keys choose an epoch">
      <rect class="chosen" x=${x(chosen)} y="0" width=${wide} height=${total - 18}/>
      ${[least, (least + most) / 2, most].map((value) => html`<g class="tick"><line x1=${LEFT} x2=${WIDE} y1=${y(value)} y2=${y(value)}/><text x=${LEFT - 8} y=${y(value) + 4} text-anchor="end">${percent(value, 0)}</text></g>`)}
      ${drawn.map((line) => html`<polyline points=${line.points.map(([step, value]) => `${x(step + 0.5).toFixed(1)},${y(value).toFixed(1)}`).join(" ")}
        fill="none" stroke=${line.colour} stroke-width="2" stroke-dasharray=${line.dash} stroke-linejoin="round"/>`)}
      ${slots.map((slot, n) => html`<text x=${LEFT - 8} y=${HIGH + 14 + n * ROW + 16} text-anchor="end">${slot}</text>
        <line class="row" x1=${LEFT} x2=${WIDE} y1=${HIGH + 14 + n * ROW + 12} y2=${HIGH + 14 + n * ROW + 12}/>`)}
      ${cells(answer, steps).map((cell) => drawnCell(cell, x(cell.step), wide, HIGH + 14 + slots.indexOf(cell.slot) * ROW))}
      ${names(cells(answer, steps), slots).map(({ slot, from, until, blueprint }) => html`<text class="seed" x=${(x(from) + x(until + 1)) / 2}
        y=${HIGH + 14 + slots.indexOf(slot) * ROW + 16} text-anchor="middle">${blueprint}</text>`)}
      ${decisions.map((row) => html`<g class="decision" onClick=${() => choose(row.step)}>
        <rect x=${x(row.step)} y="0" width=${wide} height=${total - 18} fill="transparent"><title>epoch ${row.step + 1}: ${lower(ops[row.op])}</title></rect>
        <text x=${x(row.step + 0.5)} y=${total - 22} text-anchor="middle" fill=${OPS[ops[row.op]]}>${MARKS[ops[row.op]] ?? "·"}</text></g>`)}
      ${steps.map((row) => (row.step + 1) % Math.ceil(horizon / 13) === 0 && html`<text x=${x(row.step + 0.5)} y=${total - 4} text-anchor="middle">${row.step + 1}</text>`)}
    </svg></div>
    <ul class="legend">${drawn.filter((line) => line.points.length).map((line) => html`<li><i style=${{ background: line.colour }}></i>${line.label}</li>`)}
      ${Object.entries(MARKS).map(([op, mark]) => html`<li><span style=${{ color: OPS[op] }}>${mark}</span> ${lower(op)}</li>`)}</ul>
  <//>`;
}

const drawnCell = (cell, x, wide, y) => {
  if (cell.stage === "DORMANT") return null;
  const full = OCCUPIED.has(cell.stage);
  const alpha = cell.stage === "FOSSILIZED" ? 1 : cell.alpha;
  return html`<rect x=${x} y=${y + (full ? 3 : 9)} width=${wide + 0.5} height=${full ? 18 : 6} fill=${STAGES[cell.stage]}
    fill-opacity=${0.28 + 0.72 * alpha}/>`;
};

// Each seed from its planting to its end, for its name.
function names(found, slots) {
  const lives = [];
  for (const slot of slots) {
    let life = null;
    for (const cell of found.filter((each) => each.slot === slot)) {
      if (!OCCUPIED.has(cell.stage)) {
        life = null;
      } else if (life) {
        life.until = cell.step;
      } else {
        lives.push((life = { slot, from: cell.step, until: cell.step, blueprint: cell.blueprint }));
      }
    }
  }
  return lives;
}

function Decision({ route, step, steps }) {
  const { run, round, env } = route;
  const { answer } = useView("decision", { run, round, env, step });
  const found = answer?.decision;
  const title = `Decision before epoch ${step + 1}`;
  const more = html`<span class="buttons">
    ${step > 0 && html`<a href=${to.decision(run, round, env, step - 1)}>‹ before</a>`}
    ${step < steps.at(-1).step && html`<a href=${to.decision(run, round, env, step + 1)}>after ›</a>`}</span>`;
  if (!answer) return html`<${Section} title=${title} more=${more}><p class="reading">Reading …</p><//>`;
  if (!found) return html`<${Section} title=${title} more=${more}><${Absent}>It was not recorded.<//><//>`;
  const chosen = Object.entries(found.actions).map(([head, name]) => `${head} ${name}`).join(", ");
  const [after] = rows(answer.steps);
  return html`<${Section} title=${title} more=${more}>
    <p class="headline">${chosen}</p>
    <dl class="figures">
      <${Tile} what="value" value=${number(found.value)} more="what the critic expects"/>
      <${Tile} what="reward" value=${signed(found.reward, 3)} more="of the epoch that followed"/>
      <${Tile} what="log-probability" value=${number(found.log_prob)} more="of all heads that mattered"/>
    </dl>
    ${!found.probabilities && html`<${Absent}>Probabilities, masks and observations are kept of the watched environments only, which are the first ones; a rule has no probabilities.<//>`}
    <div class="heads">
      ${found.legal && Object.keys(found.legal).map((head) => html`<${Head} head=${head} found=${found} refused=${rows(answer.refusals)} names=${answer.names[head]}/>`)}
      ${after && html`<${Terms} after=${after}/>`}
    </div>
    ${found.observation && html`<${Observation} values=${found.observation}/>`}
  <//>`;
}

function Head({ head, found, refused, names }) {
  const open = new Set(found.legal[head]);
  const chances = found.probabilities?.[head] ?? {};
  const mattered = head in found.actions;
  return html`<div class="headbox ${mattered ? "" : "idle"}"><h3>${head} <small>${mattered ? "" : "did not matter"}</small></h3>
    <ul class="actions">${names.map((name) => {
      const legal = open.has(name);
      const chance = chances[name] ?? null;
      const why = refused.filter((row) => row.op === name).map((row) => `${row.slot}: ${row.reason}`);
      const taken = found.actions[head] === name;
      return html`<li class="${taken ? "taken" : ""} ${legal ? "" : "closed"}" title=${legal ? "" : why.join("; ") || "no gate is open for it now"}>
        <span class="name">${name}</span>
        <span class="gauge"><i style=${{ width: `${100 * (legal ? (chance ?? 0) : 0)}%` }}></i></span>
        <span class="figure">${legal ? (chance === null ? "legal" : `${(100 * chance).toFixed(1)} %`) : "closed"}</span>
        ${!legal && why.length > 0 && html`<small>${why.join("; ")}</small>`}</li>`;
    })}</ul></div>`;
}

function Terms({ after }) {
  const terms = Object.entries(after).filter(([name, value]) => name.startsWith("reward_") && value !== null);
  if (!terms.length) return null;
  const most = Math.max(...terms.map(([, value]) => Math.abs(value)), 1e-9);
  return html`<div class="headbox"><h3>reward <small>term by term</small></h3>
    <ul class="actions">${[...terms, ["sum", after.reward]].map(([name, value]) => html`<li class=${name === "sum" ? "taken" : ""}>
      <span class="name">${name.replace("reward_", "")}</span>
      <span class="gauge"><i class=${value < 0 ? "bad" : ""} style=${{ width: `${Math.min(100, (100 * Math.abs(value)) / most)}%` }}></i></span>
      <span class="figure">${signed(value, 3)}</span></li>`)}</ul></div>`;
}

// Features named "slot:feature" as a table of slots, all others as a list.
function Observation({ values }) {
  const [words, setWords] = useState("");
  const entries = Object.entries(values).filter(([name]) => name.toLowerCase().includes(words.toLowerCase()));
  const global = entries.filter(([name]) => !name.includes(":"));
  const slots = [...new Set(entries.filter(([name]) => name.includes(":")).map(([name]) => name.split(":")[0]))];
  const features = [...new Set(entries.filter(([name]) => name.includes(":")).map(([name]) => name.split(":").slice(1).join(":")))];
  return html`<details class="observation" open><summary>What it saw <small>${Object.keys(values).length} features</small></summary>
    <label class="search">Filter <input type="search" value=${words} onInput=${(event) => setWords(event.target.value)}/></label>
    <div class="columns">${global.map(([name, value]) => html`<div><span class="faint">${name}</span> <b>${number(value)}</b></div>`)}</div>
    ${slots.length > 0 && html`<div class="wide"><table><thead><tr><th>of each slot</th>${slots.map((slot) => html`<th>${slot}</th>`)}</tr></thead>
      <tbody>${features.map((name) => html`<tr><td class="faint">${name}</td>${slots.map((slot) => {
        const value = values[`${slot}:${name}`];
        return html`<td class="figure ${value ? "" : "zero"}">${value === undefined ? "" : number(value)}</td>`;
      })}</tr>`)}</tbody></table></div>`}
  </details>`;
}

function Changes({ answer }) {
  const changes = rows(answer.changes);
  if (!changes.length) return null;
  return html`<${Section} title="What became of its slots">
    <div class="wide"><table><thead><tr><th>epoch</th><th>slot</th><th>seed</th><th>from</th><th>to</th><th>by</th><th>why the gate was open</th></tr></thead>
    <tbody>${changes.map((row) => html`<tr><td class="figure">${row.step + 1}</td><td>${row.slot}</td><td>${row.blueprint}</td><td class="faint">${lower(row.before)}</td>
      <td><span class="dot" style=${{ background: STAGES[row.after] }}></span>${lower(row.after)}</td><td>${lower(row.cause)}</td><td>${row.reason}</td></tr>`)}</tbody></table></div>
  <//>`;
}
