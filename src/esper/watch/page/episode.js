// One episode: its curves and slots over epochs, and each decision with all that stood behind it.

import { html, useState } from "./vendor/preact-htm.js";
import { useView } from "./live.js";
import { Absent, COLOURS, Gauge, Reading, Section, StageLegend, STAGES, Table, Tile } from "./parts.js";
import { go, to } from "./routes.js";
import { points, Timeline } from "./timeline.js";
import { lower, number, percent, rows, signed, whole } from "./words.js";

const UNWATCHED = `Probabilities, masks and observations are kept of the watched environments only, which are the first
  ones.`;

export function Episode({ route }) {
  const { run, round, env } = route;
  const { answer, error } = useView("episode", { run, round, env });
  if (error) return html`<${Absent}>${error}<//>`;
  if (!answer) return html`<${Reading}/>`;
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
  const returned = steps.reduce((sum, row) => sum + (row.reward ?? 0), 0);
  return html`<dl class="figures">
    <${Tile} what="accuracy now" value=${percent(now.accuracy)} more="committed ${percent(now.committed)}"/>
    <${Tile} what="return so far" value=${signed(returned)} more="${steps.length} epochs"/>
    <${Tile} what="parameters added" value=${whole(now.added ?? 0)} more="in seeds"/>
    ${ended && html`<${Tile} what="net gain" value=${signed(ended.net_gain)} more="${ended.context}, case ${ended.seed}"/>`}
    ${ended && html`<${Tile} what="never grown" value=${percent(ended.control)} more="the same case"/>`}
    ${failed && html`<${Tile} what="rolled back" value="epoch ${failed.step + 1}" more=${failed.reason}/>`}
  </dl>`;
}

function Drawing({ answer, steps, route, chosen }) {
  const ops = answer.layout.actions[0];
  const drawn = [
    { label: "network as it is", colour: COLOURS.blue, points: points(steps, "accuracy") },
    { label: "what is permanent", colour: COLOURS.green, dash: "6 3", points: points(steps, "committed") },
    { label: "never grown", colour: "var(--ink)", dash: "1 3", points: [...(answer.control ?? []).entries()] },
  ];
  const reading = "A step is a decision and then an epoch. Choose one with the mouse, or with the arrow keys.";
  return html`<${Section} title="Epoch by epoch" reading=${reading} more=${html`<${StageLegend}/>`}>
    <${Timeline} slots=${answer.layout.slots} steps=${steps} changes=${rows(answer.changes)} lines=${drawn}
      marks=${rows(answer.decisions).map((row) => ({ step: row.step, op: ops[row.op] }))}
      horizon=${Math.max(answer.about.horizon ?? 0, steps.at(-1).step + 1)} chosen=${chosen}
      choose=${(step) => go(to.decision(route.run, route.round, route.env, step))}
      said="accuracy and slots over ${steps.length} epochs; arrow keys choose an epoch"/>
  <//>`;
}

export function Decision({ route, step, steps, title = `Decision before epoch ${step + 1}` }) {
  const { run, round, env } = route;
  const { answer } = useView("decision", { run, round, env, step });
  const found = answer?.decision;
  const more = html`<span class="buttons">
    ${step > 0 && html`<a href=${to.decision(run, round, env, step - 1)}>‹ before</a>`}
    ${step < steps.at(-1).step && html`<a href=${to.decision(run, round, env, step + 1)}>after ›</a>`}</span>`;
  if (!answer) return html`<${Section} title=${title} more=${more}><${Reading}/><//>`;
  if (!found) return html`<${Section} title=${title} more=${more}><${Absent}>It was not recorded.<//><//>`;
  const chosen = Object.entries(found.actions).map(([head, name]) => `${head} ${name}`).join(", ");
  const [after] = rows(answer.steps);
  return html`<${Section} title=${title} more=${more}>
    <p class="headline">${chosen || "nothing"}</p>
    ${found.value !== null && html`<dl class="figures">
      <${Tile} what="value" value=${number(found.value)} more="what the critic expects"/>
      ${found.reward !== null &&
      html`<${Tile} what="reward" value=${signed(found.reward, 3)} more="of the epoch that followed"/>`}
      <${Tile} what="log-probability" value=${number(found.log_prob)} more="of all heads that mattered"/>
    </dl>`}
    ${!found.legal && html`<${Absent}>${UNWATCHED}<//>`}
    <div class="heads">
      ${found.legal &&
      answer.layout.heads.map(
        (head, n) => html`<${Head} key=${head} head=${head} names=${answer.layout.actions[n]} found=${found}
          refused=${rows(answer.refusals)}/>`,
      )}
      ${after && html`<${Terms} after=${after}/>`}
    </div>
    ${found.observation && html`<${Observation} values=${found.observation}/>`}
  <//>`;
}

function Head({ head, found, refused, names }) {
  const mattered = head in found.actions;
  return html`<div class="headbox ${mattered ? "" : "idle"}">
    <h3>${head} <small>${mattered ? "" : "did not matter"}</small></h3>
    <ul class="actions">${(mattered ? names : []).map(
      (name) => html`<${Action} key=${name} name=${name} taken=${found.actions[head] === name}
        legal=${found.legal[head].includes(name)} chance=${found.probabilities?.[head]?.[name] ?? null}
        why=${grouped(refused.filter((row) => row.op === name))}/>`,
    )}</ul></div>`;
}

function Action({ name, taken, legal, chance, why }) {
  const width = `${100 * (legal ? (chance ?? 0) : 0)}%`;
  const figure = chance === null ? "legal" : `${(100 * chance).toFixed(1)} %`;
  return html`<li class="${taken ? "taken" : ""} ${legal ? "" : "closed"}" title=${legal ? "" : "no gate is open for it now"}>
    <span class="name">${name}</span>
    <span class=${chance === null ? "" : "gauge"}><i style=${{ width }}></i></span>
    <span class="figure">${legal ? figure : "closed"}</span>
    ${why.length > 0 && html`<small>${why.join("; ")}</small>`}</li>`;
}

// Slots with the same reason are told together.
function grouped(refused) {
  const slots = new Map();
  for (const row of refused) slots.set(row.reason, [...(slots.get(row.reason) ?? []), row.slot]);
  return [...slots].map(([reason, names]) => `${names.join(", ")}: ${reason}`);
}

function Terms({ after }) {
  const terms = Object.entries(after).filter(([name, value]) => name.startsWith("reward_") && value !== null);
  if (!terms.length) return null;
  const most = Math.max(...terms.map(([, value]) => Math.abs(value)), 1e-9);
  return html`<div class="headbox"><h3>reward <small>term by term</small></h3>
    <ul class="actions">${[...terms, ["sum", after.reward]].map(
      ([name, value]) => html`<li class=${name === "sum" ? "taken" : ""}>
        <span class="name">${name.replace("reward_", "")}</span>
        <${Gauge} value=${value} most=${most}/>
        <span class="figure">${signed(value, 3)}</span></li>`,
    )}</ul></div>`;
}

// Features named "slot:feature" as a table of slots, all others as a list.
function Observation({ values }) {
  const [words, setWords] = useState("");
  const names = Object.keys(values).filter((name) => name.toLowerCase().includes(words.toLowerCase()));
  const own = names.filter((name) => name.includes(":")).map((name) => name.split(/:(.*)/));
  const slots = [...new Set(own.map(([slot]) => slot))];
  const all = [...new Set(own.map(([, feature]) => feature))];
  const features = all.filter((feature) => words || slots.some((slot) => values[`${slot}:${feature}`]));
  const hidden = all.length - features.length;
  const cell = (slot, feature) => {
    const value = values[`${slot}:${feature}`];
    return html`<span class=${value ? "" : "zero"}>${value === undefined ? "" : number(value)}</span>`;
  };
  return html`<details class="observation" open>
    <summary>What it saw <small>${Object.keys(values).length} features</small></summary>
    <label class="search">Filter <input type="search" value=${words} onInput=${(event) => setWords(event.target.value)}/></label>
    <div class="columns">${names
      .filter((name) => !name.includes(":"))
      .map((name) => html`<div><span class="faint">${name}</span> <b>${number(values[name])}</b></div>`)}</div>
    ${slots.length > 0 && html`<${Table} head=${["of each slot", ...slots]} figures=${slots.map((_, n) => n + 1)}
      rows=${features.map((feature) => [feature, ...slots.map((slot) => cell(slot, feature))])}/>`}
    ${hidden > 0 && html`<p class="reading">${hidden} features that are 0 in every slot are not shown; filter to see them.</p>`}
  </details>`;
}

const CHANGES = ["epoch", "slot", "seed", "from", "to", "by", "why the gate was open"];

function Changes({ answer }) {
  const changes = rows(answer.changes);
  if (!changes.length) return null;
  const cells = changes.map((row) => [
    row.step + 1,
    row.slot,
    row.blueprint,
    lower(row.before),
    html`<span class="dot" style=${{ background: STAGES[row.after] }}></span>${lower(row.after)}`,
    lower(row.cause),
    row.reason,
  ]);
  return html`<${Section} title="What became of its slots"><${Table} head=${CHANGES} rows=${cells} figures=${[0]}/><//>`;
}
