// A network of a user's own that grows: its places, the audition, curves, budget, decisions.

import { html } from "./vendor/preact-htm.js";
import { Lines } from "./charts.js";
import { Decision } from "./episode.js";
import { useView } from "./live.js";
import {
  Absent, COLOURS, HeatMap, OCCUPIED, Reading, Section, SERIES, Settings, StageLegend, STAGES, Table, Tile,
} from "./parts.js";
import { go, to } from "./routes.js";
import { points, Timeline } from "./timeline.js";
import { Told } from "./training.js";
import { lines, lower, number, percent, rows, signed, whole } from "./words.js";

const CLEAR = 4; // standard errors at which a gain has its full colour
const SAID = {
  course: "A decision ends an epoch and acts on the next. Choose one to see what was open, and why not the rest.",
  places: "Its modules from input to output, and what lives behind them.",
  audition: `By how much each seed that learns beside the network would lower its validation loss; strong colours are
    certain, outlined ones were heard last.`,
  unheard: "Nothing has learned beside the network yet; only the controller “audition” listens to candidates.",
};

export function Growth({ run, route }) {
  const { answer, error } = useView("growth", { run });
  if (error) return html`<${Absent}>${error}<//>`;
  if (!answer) return html`<${Reading}/>`;
  const facts = gathered(answer);
  if (route.env !== undefined) {
    return html`<p><a href=${to.run(run)}>‹ the whole run</a></p>
      <${Decision} route=${{ ...route, env: 0 }} step=${0} steps=${[{ step: 0 }]}
        title="Decision after epoch ${route.round}"/>`;
  }
  const { model, ...config } = answer.config;
  return html`
    <${Figures} facts=${facts}/>
    <${Budget} facts=${facts}/>
    <${Curves} facts=${facts}/>
    <${Course} facts=${facts} run=${run} route=${route}/>
    <div class="pair"><${Places} facts=${facts}/><${Audition} facts=${facts}/></div>
    <${Decisions} facts=${facts} run=${run}/>
    <${Told} found=${answer}/>
    <${Settings} config=${config} versions=${answer.versions}/>`;
}

// Everything by name: slots with what they hold now, contributions, and what was decided.
function gathered(answer) {
  const empty = (name) => [name, { name, stage: "DORMANT", tried: [] }];
  const slots = Object.fromEntries(answer.layout.slots.map(empty));
  const changes = rows(answer.changes).filter((change) => slots[change.slot]);
  for (const change of changes) {
    const slot = slots[change.slot];
    Object.assign(slot, { stage: change.after, blueprint: change.blueprint });
    if (change.after === "GERMINATED") slot.tried.push(change.blueprint);
  }
  for (const row of rows(answer.contributions)) if (slots[row.slot]) slots[row.slot].worth = row.contribution;
  const epochs = rows(answer.epochs);
  return {
    answer,
    slots,
    changes,
    epochs,
    now: epochs.at(-1) ?? {},
    model: answer.config.model ?? { parts: [], params: 0, room: null },
    outcome: rows(answer.outcome)[0],
    ops: answer.layout.actions[0] ?? [],
  };
}

function Figures({ facts }) {
  const { now, epochs, model, outcome, answer, slots } = facts;
  const living = Object.values(slots).filter((slot) => OCCUPIED.has(slot.stage));
  const kept = living.filter((slot) => slot.stage === "FOSSILIZED").length;
  const added = now.added ?? 0;
  return html`<dl class="figures">
    <${Tile} what=${answer.config.metric ?? "score"} value=${percent(now.score, 2)}
      more="before training ${percent(epochs[0]?.score, 2)}"/>
    ${outcome?.test_score != null &&
    html`<${Tile} what="on test data" value=${percent(outcome.test_score, 2)} more="which nothing looked at"/>`}
    <${Tile} what="validation loss" value=${number(now.val_loss)} more="training loss ${number(now.train_loss)}"/>
    <${Tile} what="parameters" value="${whole(model.params)} + ${whole(added)}"
      more="${signed((100 * added) / (model.params || 1), 1)} %"/>
    <${Tile} what="seeds" value="${kept} kept" more="${living.length - kept} on probation"/>
  </dl>`;
}

function Budget({ facts }) {
  const { model, now } = facts;
  const added = now.added ?? 0;
  const room = model.room ?? null;
  const total = model.params + Math.max(room ?? added, added);
  const share = (size) => ({ width: `${(100 * size) / (total || 1)}%` });
  const rest = room === null ? "no limit" : `${whole(Math.max(0, room - added))} left`;
  const said = `${whole(model.params)} of the model, ${whole(added)} in seeds, ${rest}`;
  return html`<div class="budget" role="img" aria-label="budget: ${said}">
    <span><i class="own" style=${share(model.params)}></i><i class="seeds" style=${share(added)}></i></span>
    <small>parameters: ${said}</small></div>`;
}

// What each seed contributes over epochs, as lines with the colour that it has everywhere.
function contributions({ answer, slots }) {
  const columns = answer.contributions.columns.map((name) => (name === "contribution" ? "mean" : name));
  const found = lines({ columns, rows: answer.contributions.rows }, "slot");
  const seeds = Object.entries(found.lines).map(([slot, line], n) => ({
    label: `${slots[slot]?.blueprint ?? "?"} at ${slot}`,
    colour: SERIES[(n + 2) % SERIES.length],
    y: line.y,
  }));
  return { x: found.x, seeds };
}

function Curves({ facts }) {
  const { epochs, answer } = facts;
  if (epochs.length < 2) return html`<${Section} title="Curves"><${Absent}>No epoch is over yet.<//><//>`;
  const x = epochs.map((row) => row.round);
  const column = (name) => epochs.map((row) => row[name]);
  const worth = contributions(facts);
  const place = new Map(worth.x.map((round, n) => [round, n]));
  const without = worth.seeds.map((seed) => ({
    ...seed,
    label: `without ${seed.label}`,
    dash: [2, 3],
    width: 1.4,
    y: epochs.map(({ round, score }) => {
      const value = seed.y[place.get(round)] ?? null;
      return value === null ? null : score - value;
    }),
  }));
  const scores = [
    { label: "as it is", colour: COLOURS.blue, width: 2.4, y: column("score") },
    { label: "permanent seeds only", colour: COLOURS.green, dash: [6, 3], y: column("committed") },
    ...without,
  ];
  const losses = [
    { label: "validation", colour: COLOURS.blue, y: column("val_loss") },
    { label: "training", colour: COLOURS.grey, y: column("train_loss") },
  ];
  return html`<${Section} title="With and without what grew">
    <div class="charts large">
      <${Lines} title="Score on validation data" x=${x} xLabel="epoch" yLabel="%" height=${250} lines=${scores}/>
      <${Lines} title="Loss" x=${x} xLabel="epoch" height=${250} lines=${losses}/>
      ${worth.seeds.length > 0 && html`<${Lines} title="What each seed contributes"
        reading="points that the score falls by without it" x=${worth.x} xLabel="epoch" lines=${worth.seeds}
        across=${[{ y: 0, colour: COLOURS.grey }]}/>`}
      <${Phases} seconds=${lines(answer.seconds)}/>
    </div>
  <//>`;
}

function Phases({ seconds }) {
  if (!seconds.x.length) return null;
  const drawn = Object.entries(seconds.lines).map(([phase, line], n) => ({
    label: phase,
    colour: SERIES[n % SERIES.length],
    y: line.y,
  }));
  return html`<${Lines} title="Where the time goes" x=${seconds.x} xLabel="epoch" yLabel="seconds" lines=${drawn}/>`;
}

function Course({ facts, run, route }) {
  const { answer, changes, epochs, ops } = facts;
  // What is decided after an epoch acts on the next one, where it is drawn.
  const alphas = {};
  for (const { round, slot, alpha } of rows(answer.alphas)) (alphas[round] ??= {})[`alpha_${slot}`] = alpha;
  const steps = epochs
    .filter((row) => row.round > 0)
    .map((row) => ({ ...row, ...alphas[row.round - 1], step: row.round - 1 }));
  if (!steps.length) return null;
  const last = steps.at(-1).step;
  const marks = rows(answer.decisions).map((row) => ({ step: row.round, op: ops[row.op] }));
  const used = answer.layout.slots.filter((slot) => changes.some((change) => change.slot === slot));
  const drawn = [
    { label: "as it is", colour: COLOURS.blue, points: points(steps, "score") },
    { label: "permanent seeds only", colour: COLOURS.green, dash: "6 3", points: points(steps, "committed") },
  ];
  return html`<${Section} title="Epoch by epoch" reading=${SAID.course} more=${html`<${StageLegend}/>`}>
    <${Timeline} slots=${used} steps=${steps} lines=${drawn}
      changes=${changes.map((change) => ({ ...change, step: change.round }))}
      marks=${marks.filter((mark) => mark.step <= last)}
      horizon=${Math.max(answer.about.epochs ?? 0, steps.length)} chosen=${Math.min(route.round ?? last, last)}
      choose=${(step) => step > 0 && go(to.decision(run, step, 0, 0))}
      said="score and slots over ${steps.length} epochs"/>
  <//>`;
}

function Places({ facts }) {
  const { parts } = facts.model;
  const title = "The model and its places";
  if (!parts.length) return html`<${Section} title=${title}><${Absent}>Its parts were not recorded.<//><//>`;
  const most = Math.max(1, ...parts.filter((part) => !part.opened).map((part) => part.params));
  return html`<${Section} title=${title} reading=${SAID.places}>
    <ol class="model">${parts.map(
      (part) => html`<li class=${part.opened ? "opened" : ""} style=${{ marginLeft: `${part.depth}rem` }}>
        <${Module} part=${part} most=${most}/>
        ${part.slots.map((name) => facts.slots[name] && html`<${Place} slot=${facts.slots[name]}/>`)}
      </li>`,
    )}</ol>
  <//>`;
}

function Module({ part, most }) {
  const size = part.params ? `${whole(part.params)} parameters` : "no parameters";
  const width = `${(100 * part.params) / most}%`;
  return html`<span class="module"><b>${part.path || "(whole model)"}</b> <small>${part.kind} · ${size}</small>
    ${!part.opened && html`<span class="gauge"><i class="quiet" style=${{ width }}></i></span>`}</span>`;
}

function Place({ slot }) {
  const full = OCCUPIED.has(slot.stage);
  const worth = slot.worth == null ? "" : `, ${signed(slot.worth)} points`;
  const tried = slot.tried.length ? `tried: ${[...new Set(slot.tried)].join(", ")}` : "empty";
  return html`<span class="place ${full ? "full" : ""}" style=${{ "--stage": STAGES[slot.stage] }}>
    <b>${full ? slot.blueprint : `slot ${slot.name}`}</b>
    <small> ${full ? lower(slot.stage) + worth : tried}</small></span>`;
}

// Gains of all that learns beside the network; colour by how large and how certain they are.
function Audition({ facts }) {
  const heard = rows(facts.answer.auditions);
  if (!heard.length) return html`<${Section} title="Audition"><${Absent}>${SAID.unheard}<//><//>`;
  const places = facts.answer.layout.slots.filter((slot) => heard.some((row) => row.slot === slot));
  const most = Math.max(...heard.map((row) => Math.abs(row.gain ?? 0)), 1e-9);
  const latest = Math.max(...heard.map((row) => row.round));
  const cell = (slot, blueprint) => {
    const row = heard.find((each) => each.slot === slot && each.blueprint === blueprint);
    if (!row || row.gain === null) return null;
    const certain = row.error ? Math.min(1, Math.abs(row.gain / row.error) / CLEAR) : 0;
    const figures = `gain ${signed(row.gain, 4)} ± ${number(row.error)}, after ${number(row.epochs)} epochs of learning`;
    return {
      text: signed(row.gain, 3),
      said: `${blueprint} at ${slot}: ${figures}`,
      strong: certain * Math.min(1, 0.25 + Math.abs(row.gain) / most),
      bad: row.gain < 0,
      mark: row.round === latest,
    };
  };
  return html`<${Section} title="Audition" reading=${SAID.audition}>
    <${HeatMap} rows=${places} columns=${[...new Set(heard.map((row) => row.blueprint))]} cell=${cell}/>
  <//>`;
}

// A decision in words.
function spoken({ answer, ops }, row) {
  const { heads, actions } = answer.layout;
  const name = (head) => actions[heads.indexOf(head)]?.[row[head]];
  const words = {
    GERMINATE: () => `plant ${name("blueprint")} at ${name("slot")}, blend ${lower(name("blend"))}`,
    ADVANCE: () => `start to blend ${name("slot")}`,
    FOSSILIZE: () => `make ${name("slot")} permanent`,
    PRUNE: () => `prune ${name("slot")}`,
  };
  return words[ops[row.op]]?.() ?? "wait";
}

function Decisions({ facts, run }) {
  const reasons = (round) =>
    facts.changes.filter((change) => change.round === round && change.reason).map((change) => change.reason);
  const told = rows(facts.answer.decisions)
    .map((row) => ({ round: row.round, what: spoken(facts, row), why: [...new Set(reasons(row.round))] }))
    .filter((row) => row.what !== "wait" || row.why.length);
  if (!told.length) return html`<${Section} title="Decisions"><${Absent}>Nothing was decided but to wait.<//><//>`;
  const cells = told.map((row) => [
    html`<a href=${to.decision(run, row.round, 0, 0)}>${row.round}</a>`,
    row.what,
    html`<span class="faint">${row.why.join("; ")}</span>`,
  ]);
  return html`<${Section} title="Decisions" reading="Epochs in which it only waited are left out.">
    <${Table} head=${["after epoch", "what", "what the gates saw"]} rows=${cells} figures=${[0]}/>
  <//>`;
}
