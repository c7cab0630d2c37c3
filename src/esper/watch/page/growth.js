// A network of a user's own that grows: its places, the audition, curves, budget, decisions.

import { html } from "./vendor/preact-htm.js";
import { Lines } from "./charts.js";
import { Decision } from "./episode.js";
import { useView } from "./live.js";
import { Absent, COLOURS, OCCUPIED, Section, SERIES, Settings, StageLegend, STAGES, Tile } from "./parts.js";
import { go, to } from "./routes.js";
import { points, Timeline } from "./timeline.js";
import { Told } from "./training.js";
import { lines, lower, number, percent, rows, signed, whole } from "./words.js";

export function Growth({ run, route }) {
  const { answer, error } = useView("growth", { run });
  if (error) return html`<${Absent}>${error}<//>`;
  if (!answer) return html`<p class="reading" role="status">Reading …</p>`;
  const facts = gathered(answer);
  if (route.env !== undefined) {
    return html`<p><a href=${to.run(run)}>‹ the whole run</a></p>
      <${Decision} route=${{ ...route, env: 0 }} step=${0} steps=${[{ step: 0 }]} title="Decision after epoch ${route.round}"/>`;
  }
  return html`
    <${Figures} facts=${facts}/>
    <${Budget} facts=${facts}/>
    <${Curves} facts=${facts}/>
    <${Course} facts=${facts} run=${run} route=${route}/>
    <div class="pair"><${Places} facts=${facts}/><${Audition} facts=${facts}/></div>
    <${Decisions} facts=${facts} run=${run}/>
    <${Told} found=${answer}/>
    <${Settings} config=${withoutModel(answer.config)} versions=${answer.versions}/>`;
}

const withoutModel = ({ model, ...config }) => config;

// Everything by name: slots with what they hold now, contributions, and what was decided.
function gathered(answer) {
  const model = answer.config.model ?? { parts: [], params: 0, room: null };
  const epochs = rows(answer.epochs);
  const slots = Object.fromEntries(answer.layout.slots.map((name) => [name, { name, stage: "DORMANT", tried: [] }]));
  const changes = rows(answer.changes);
  for (const change of changes) {
    const slot = slots[change.slot];
    if (!slot) continue;
    slot.stage = change.after;
    slot.blueprint = change.blueprint;
    if (change.after === "GERMINATED") slot.tried.push(change.blueprint);
  }
  for (const row of rows(answer.contributions)) if (slots[row.slot]) slots[row.slot].worth = row.contribution;
  return {
    answer, model, epochs, slots, changes,
    now: epochs.at(-1) ?? {},
    outcome: rows(answer.outcome)[0],
    ops: answer.layout.actions[0] ?? [],
  };
}

const living = (facts) => Object.values(facts.slots).filter((slot) => OCCUPIED.has(slot.stage));

function Figures({ facts }) {
  const { now, epochs, model, outcome, answer } = facts;
  const kept = living(facts).filter((slot) => slot.stage === "FOSSILIZED").length;
  return html`<dl class="figures">
    <${Tile} what=${answer.config.metric ?? "score"} value=${percent(now.score, 2)} more="before training ${percent(epochs[0]?.score, 2)}"/>
    ${outcome?.test_score != null && html`<${Tile} what="on test data" value=${percent(outcome.test_score, 2)} more="which nothing looked at"/>`}
    <${Tile} what="validation loss" value=${number(now.val_loss)} more="training loss ${number(now.train_loss)}"/>
    <${Tile} what="parameters" value="${whole(model.params)} + ${whole(now.added ?? 0)}" more="${signed((100 * (now.added ?? 0)) / (model.params || 1), 1)} %"/>
    <${Tile} what="seeds" value="${kept} kept" more="${living(facts).length - kept} on probation"/>
  </dl>`;
}

function Budget({ facts }) {
  const { model, now } = facts;
  const added = now.added ?? 0;
  const room = model.room;
  const total = model.params + Math.max(room ?? added, added);
  const share = (size) => ({ width: `${(100 * size) / (total || 1)}%` });
  const left = room === null || room === undefined ? null : Math.max(0, room - added);
  const said = `${whole(model.params)} of the model, ${whole(added)} in seeds${left === null ? ", no limit" : `, ${whole(left)} left`}`;
  return html`<div class="budget" role="img" aria-label="budget: ${said}">
    <span><i class="own" style=${share(model.params)}></i><i class="seeds" style=${share(added)}></i></span>
    <small>parameters: ${said}</small></div>`;
}

function Curves({ facts }) {
  const { epochs, answer } = facts;
  if (epochs.length < 2) return html`<${Section} title="Curves"><${Absent}>No epoch is over yet.<//><//>`;
  const x = epochs.map((row) => row.round);
  const column = (name) => epochs.map((row) => row[name]);
  const worth = lines({ columns: answer.contributions.columns.map((name) => (name === "contribution" ? "mean" : name)), rows: answer.contributions.rows }, "slot");
  const seeds = Object.entries(worth.lines).map(([slot, line], n) => ({ label: `without ${facts.slots[slot]?.blueprint ?? "?"} at ${slot}`, slot, colour: SERIES[(n + 2) % SERIES.length], y: line.y }));
  const score = new Map(epochs.map((row) => [row.round, row.score]));
  const without = seeds.map((seed) => ({
    ...seed, dash: [2, 3], width: 1.4,
    y: x.map((round) => {
      const place = worth.x.indexOf(round);
      return place < 0 || seed.y[place] === null ? null : score.get(round) - seed.y[place];
    }),
  }));
  const seconds = lines(answer.seconds);
  return html`<${Section} title="With and without what grew">
    <div class="charts large">
      <${Lines} title="Score on validation data" x=${x} xLabel="epoch" yLabel="%" height=${250} lines=${[
        { label: "as it is", colour: COLOURS.blue, width: 2.4, y: column("score") },
        { label: "permanent seeds only", colour: COLOURS.green, dash: [6, 3], y: column("committed") },
        ...without,
      ]}/>
      <${Lines} title="Loss" x=${x} xLabel="epoch" height=${250} lines=${[
        { label: "validation", colour: COLOURS.blue, y: column("val_loss") },
        { label: "training", colour: COLOURS.grey, y: column("train_loss") },
      ]}/>
      ${seeds.length > 0 && html`<${Lines} title="What each seed contributes" reading="points that the score falls by without it" x=${worth.x} xLabel="epoch"
        across=${[{ y: 0, colour: COLOURS.grey }]} lines=${seeds.map((seed) => ({ ...seed, label: seed.label.replace("without ", "") }))}/>`}
      ${seconds.x.length > 0 && html`<${Lines} title="Where the time goes" x=${seconds.x} xLabel="epoch" yLabel="seconds" lines=${
        Object.entries(seconds.lines).map(([phase, line], n) => ({ label: phase, colour: SERIES[n % SERIES.length], y: line.y }))}/>`}
    </div>
  <//>`;
}

function Course({ facts, run, route }) {
  const { answer, changes, epochs } = facts;
  // What is decided after an epoch acts on the next one, where it is drawn.
  const steps = epochs.filter((row) => row.round > 0).map((row) => ({ ...row, step: row.round - 1 }));
  if (!steps.length) return null;
  const held = changes.map((change) => ({ ...change, step: change.round }));
  const marks = rows(answer.decisions).map((row) => ({ step: row.round, op: facts.ops[row.op] }));
  const chosen = Math.min(route.round ?? steps.at(-1).step, steps.at(-1).step);
  const used = answer.layout.slots.filter((slot) => changes.some((change) => change.slot === slot));
  return html`<${Section} title="Epoch by epoch" reading="A decision ends an epoch and acts on the next. Choose one to see what was open, and why not the rest."
      more=${html`<${StageLegend}/>`}>
    <${Timeline} slots=${used} steps=${steps} changes=${held} marks=${marks.filter((mark) => mark.step <= steps.at(-1).step)}
      lines=${[
        { label: "as it is", colour: COLOURS.blue, points: points(steps, "score") },
        { label: "permanent seeds only", colour: COLOURS.green, dash: "6 3", points: points(steps, "committed") },
      ]}
      horizon=${Math.max(answer.about.epochs ?? 0, steps.length)} chosen=${chosen} choose=${(step) => step > 0 && go(to.decision(run, step, 0, 0))}
      said="score and slots over ${steps.length} epochs"/>
  <//>`;
}

function Places({ facts }) {
  const { model, slots } = facts;
  const most = Math.max(1, ...model.parts.filter((part) => !part.opened).map((part) => part.params));
  if (!model.parts.length) return html`<${Section} title="The model and its places"><${Absent}>Its parts were not recorded.<//><//>`;
  return html`<${Section} title="The model and its places" reading="Its modules from input to output, and what lives behind them.">
    <ol class="model">${model.parts.map((part) => html`<li class=${part.opened ? "opened" : ""} style=${{ marginLeft: `${part.depth}rem` }}>
      <span class="module"><b>${part.path || "(whole model)"}</b> <small>${part.kind} · ${part.params ? `${whole(part.params)} parameters` : "no parameters"}</small>
        ${!part.opened && html`<span class="gauge"><i class="quiet" style=${{ width: `${(100 * part.params) / most}%` }}></i></span>`}</span>
      ${part.slots.map((name) => html`<${Place} slot=${slots[name] ?? { name, stage: "DORMANT", tried: [] }}/>`)}
    </li>`)}</ol>
  <//>`;
}

function Place({ slot }) {
  const full = OCCUPIED.has(slot.stage);
  const more = full
    ? `${lower(slot.stage)}${slot.worth == null ? "" : `, ${signed(slot.worth)} points`}`
    : slot.tried.length ? `tried: ${[...new Set(slot.tried)].join(", ")}` : "empty";
  return html`<span class="place ${full ? "full" : ""}" style=${{ "--stage": STAGES[slot.stage] }}>
    <b>${full ? slot.blueprint : `slot ${slot.name}`}</b> <small>${more}</small></span>`;
}

// Gains of all that learns beside the network; colour by how certain they are.
function Audition({ facts }) {
  const heard = rows(facts.answer.auditions);
  if (!heard.length) return html`<${Section} title="Audition"><${Absent}>Nothing has learned beside the network yet; only the controller “audition” listens to candidates.<//><//>`;
  const places = facts.answer.layout.slots.filter((slot) => heard.some((row) => row.slot === slot));
  const blueprints = [...new Set(heard.map((row) => row.blueprint))];
  const most = Math.max(...heard.map((row) => Math.abs(row.gain ?? 0)), 1e-9);
  const latest = Math.max(...heard.map((row) => row.round));
  const found = (slot, blueprint) => heard.find((row) => row.slot === slot && row.blueprint === blueprint);
  return html`<${Section} title="Audition" reading="By how much each seed that learns beside the network would lower its validation loss; strong colours are certain, outlined ones still learn.">
    <div class="wide"><table class="heat"><thead><tr><th></th>${blueprints.map((name) => html`<th>${name}</th>`)}</tr></thead>
      <tbody>${places.map((slot) => html`<tr><th>${slot}</th>${blueprints.map((blueprint) => {
        const row = found(slot, blueprint);
        if (!row || row.gain === null) return html`<td class="none">·</td>`;
        const t = row.error ? row.gain / row.error : 0;
        const strong = Math.min(1, Math.abs(t) / 4) * Math.min(1, 0.25 + Math.abs(row.gain) / most);
        const said = `${blueprint} at ${slot}: gain ${signed(row.gain, 4)} ± ${number(row.error)}, after ${number(row.epochs)} epochs of learning`;
        return html`<td class=${row.round === latest ? "learning" : ""} title=${said} aria-label=${said}
          style=${{ "--strong": `${Math.round(100 * strong)}%`, "--heat": row.gain < 0 ? COLOURS.vermilion : COLOURS.green }}>${signed(row.gain, 3)}</td>`;
      })}</tr>`)}</tbody></table></div>
  <//>`;
}

function Decisions({ facts, run }) {
  const { answer, ops, changes } = facts;
  const heads = answer.layout.heads;
  const named = (row) => {
    const op = ops[row.op];
    const name = (head) => answer.layout.actions[heads.indexOf(head)]?.[row[head]];
    if (op === "GERMINATE") return `plant ${name("blueprint")} at ${name("slot")}, blend ${lower(name("blend"))}`;
    return { ADVANCE: `start to blend ${name("slot")}`, FOSSILIZE: `make ${name("slot")} permanent`, PRUNE: `prune ${name("slot")}` }[op] ?? "wait";
  };
  const decided = rows(answer.decisions);
  const told = decided
    .map((row) => ({ round: row.round, op: ops[row.op], what: named(row), why: [...new Set(changes.filter((change) => change.round === row.round).map((change) => change.reason).filter(Boolean))] }))
    .filter((row) => row.op !== "WAIT" || row.why.length);
  if (!told.length) return html`<${Section} title="Decisions"><${Absent}>Nothing was decided but to wait.<//><//>`;
  return html`<${Section} title="Decisions" reading="Epochs in which it only waited are left out.">
    <div class="wide"><table><thead><tr><th>after epoch</th><th>what</th><th>what the gates saw</th></tr></thead>
    <tbody>${told.map((row) => html`<tr><td class="figure"><a href=${to.decision(run, row.round, 0, 0)}>${row.round}</a></td><td>${row.what}</td><td class="faint">${row.why.join("; ")}</td></tr>`)}</tbody></table></div>
  <//>`;
}
