// A training run: learning curve, the environments as they are now, the learner's health, time.

import { html } from "./vendor/preact-htm.js";
import { Lines } from "./charts.js";
import { Environments } from "./environments.js";
import { useView } from "./live.js";
import { Absent, COLOURS, Gauge, Reading, Section, SERIES, Settings, Table, Tile } from "./parts.js";
import { duration, interval, lines, number, rows, signed, whole } from "./words.js";

const BASELINES = [COLOURS.purple, COLOURS.orange, COLOURS.green, COLOURS.sky];
const ZERO = { y: 0, colour: COLOURS.grey };
const STOP = 1.5; // times the target of the KL, where an update ends
const PHASES = {
  step: ["train hosts", COLOURS.blue],
  decide: ["decide", COLOURS.sky],
  report: ["telemetry", COLOURS.purple],
  learn: ["learn", COLOURS.orange],
  evaluate: ["evaluate", COLOURS.green],
};
const SAID = {
  environments: `Every environment is a host in training; its slots are bars, coloured by stage. Choose one to see
    its decisions.`,
  curve: `Net gain over never growing, in units of what can be gained: never growing is 0, about what the best single
    seed gains is 1. Bands are 95 % intervals.`,
  health: `Per head; dashed lines are the thresholds of anomalies, where they are within sight, and dotted ones the
    rounds in which one was raised.`,
  contexts: `What growing gained in the last quarter of the rounds, in points over the same case never grown, less
    the rent.`,
};

export function Training({ run, route }) {
  const { answer, error } = useView("training", { run });
  if (error) return html`<${Absent}>${error}<//>`;
  if (!answer) return html`<${Reading}/>`;
  return html`
    <${Figures} found=${answer}/>
    <${Section} title="Environments" id="environments" reading=${SAID.environments}>
      <${Environments} run=${run} round=${route.round}/>
    <//>
    <${Curve} found=${answer}/>
    <${Health} found=${answer}/>
    <${Contexts} found=${answer}/>
    <${Told} found=${answer}/>
    <${Settings} config=${answer.config} versions=${answer.versions}/>`;
}

// Evaluations of the controller in training, and of those that were evaluated before the first round.
function evaluated(found) {
  const all = rows(found.evaluations);
  const name = all.find((row) => row.round > 0)?.controller;
  const learned = all.filter((row) => row.controller === name);
  return { learned, baselines: all.filter((row) => row.controller !== name) };
}

function Figures({ found }) {
  const { learned, baselines } = evaluated(found);
  const best = learned.reduce((top, row) => (top && top.score >= row.score ? top : row), null);
  const seconds = lines(found.seconds);
  const spent = ["play", "learn", "evaluate"]
    .flatMap((phase) => seconds.lines[phase]?.y ?? [])
    .reduce((sum, value) => sum + (value ?? 0) * found.wide, 0);
  const planned = found.config.rounds;
  const played = Math.min(rows(found.returns).length * found.wide, planned ?? Infinity);
  return html`<dl class="figures">
    <${Tile} what="best evaluation" value=${best ? signed(best.score) : "—"}
      more=${best ? `round ${best.round} ${interval(best)}` : "none yet"}/>
    ${baselines.map(
      (row) => html`<${Tile} what=${row.controller} value=${signed(row.score)} more=${interval(row)}/>`,
    )}
    <${Tile} what="rounds" value="${whole(played)}${planned ? ` of ${whole(planned)}` : ""}"
      more="${whole(found.config.envs)} episodes each"/>
    <${Tile} what="training time" value=${duration(spent)} more="with evaluations"/>
  </dl>`;
}

function Curve({ found }) {
  const { learned, baselines } = evaluated(found);
  const means = rows(found.returns);
  const x = [...new Set([...means, ...learned].map((row) => row.round))].sort((a, b) => a - b);
  if (!x.length) return html`<${Section} title="Learning curve"><${Absent}>No round is over yet.<//><//>`;
  const at = (points, name) => {
    const known = new Map(points.map((row) => [row.round, row[name]]));
    return x.map((round) => known.get(round) ?? null);
  };
  const drawn = [
    { label: "mean return of training episodes", colour: COLOURS.grey, width: 1.2, y: at(means, "mean") },
    {
      label: "score by evaluation",
      colour: COLOURS.blue,
      width: 2.4,
      points: true,
      y: at(learned, "score"),
      low: at(learned, "low"),
      high: at(learned, "high"),
    },
    ...baselines.map((row, n) => ({
      label: row.controller,
      colour: BASELINES[n % BASELINES.length],
      dash: [6, 4],
      points: false,
      y: x.map(() => row.score),
      low: x.map(() => row.low),
      high: x.map(() => row.high),
    })),
  ];
  return html`<${Section} title="Learning curve" reading=${SAID.curve}>
    <${Lines} title="Score over rounds" x=${x} lines=${drawn} xLabel="round" yLabel="net gain / scale" height=${300}
      across=${[{ ...ZERO, label: "never growing" }]}/>
  <//>`;
}

// What is drawn of every head, beside what, and between which thresholds an anomaly begins.
const PANELS = [
  {
    title: "Entropy by head",
    name: (head) => `heads.${head}.entropy`,
    limits: ["entropy_collapse"],
    unit: "share of the highest",
  },
  { title: "KL by head", name: (head) => `heads.${head}.kl`, beside: ["all heads", "kl"], limits: [] },
  {
    title: "Clipped steps by head",
    name: (head) => `heads.${head}.clip_fraction`,
    limits: [],
    anomalies: ["ratio_explosion", "ratio_collapse"],
    unit: "share",
  },
  {
    title: "Gradient norms",
    name: (head) => `gradient_norms.heads.${head}`,
    beside: ["value", "gradient_norms.value"],
    limits: ["gradient_vanishing", "gradient_explosion"],
    log: true,
  },
  { title: "Largest ratio by head", name: (head) => `heads.${head}.ratio_max`, limits: ["max_ratio_threshold"], log: true },
  { title: "Smallest ratio by head", name: (head) => `heads.${head}.ratio_min`, limits: ["min_ratio_threshold"], log: true },
];

function Health({ found }) {
  const health = lines(found.health);
  const title = "Health of the learning";
  if (!health.x.length) return html`<${Section} title=${title}><${Absent}>No update yet.<//><//>`;
  const explained = line(found, health, "explained variance", "explained_variance", COLOURS.vermilion);
  return html`<${Section} title=${title} reading=${SAID.health}>
    <div class="charts">
      ${PANELS.map((of) => html`<${Panel} key=${of.title} of=${of} found=${found} health=${health}/>`)}
      ${explained && html`<${Lines} title="Variance of returns that values explain" x=${health.x} lines=${[explained]}
        across=${[ZERO]} down=${raised(found, ["value_collapse"])}/>`}
      <${Phases} found=${found}/>
    </div>
  <//>`;
}

// A metric as a line; where a point stands for several rounds, with its lowest and highest value.
function line(found, health, label, name, colour) {
  const own = health.lines[name];
  if (!own) return null;
  return found.wide > 1 ? { label, colour, ...own } : { label, colour, y: own.y };
}

const raised = (found, names) =>
  rows(found.anomalies)
    .filter((row) => row.raised && names.includes(row.name))
    .map((row) => ({ x: row.round }));

const positive = ({ label, colour, y }) => ({ label, colour, y: y.map((value) => (value > 0 ? value : null)) });

function Panel({ of, found, health }) {
  const names = Object.keys(health.lines).filter((name) => name.startsWith("heads."));
  const heads = [...new Set(names.map((name) => name.split(".")[1]))];
  const drawn = heads.map((head, n) => line(found, health, head, of.name(head), SERIES[n % SERIES.length]));
  if (of.beside) drawn.push(line(found, health, ...of.beside, COLOURS.vermilion));
  const known = drawn.filter(Boolean);
  const limits = of.limits.map((name) => {
    const y = found.thresholds[name];
    return { y, label: `${name.replaceAll("_", " ")} ${number(y)}` };
  });
  const target = found.config.ppo?.target_kl;
  if (of.title.startsWith("KL") && target) {
    limits.push({ y: STOP * target, label: `the update stops at ${number(STOP * target)}` });
  }
  return html`<${Lines} title=${of.title} x=${health.x} lines=${of.log ? known.map(positive) : known}
    yLabel=${of.unit ?? ""} log=${of.log} across=${limits} down=${raised(found, of.anomalies ?? of.limits)}/>`;
}

function Phases({ found }) {
  const seconds = lines(found.seconds);
  const drawn = Object.entries(PHASES)
    .filter(([phase]) => seconds.lines[phase])
    .map(([phase, [label, colour]]) => ({ label, colour, y: seconds.lines[phase].y }));
  if (!drawn.length) return null;
  return html`<${Lines} title="Where the time goes" x=${seconds.x} lines=${drawn} yLabel="seconds a round"/>`;
}

function Contexts({ found }) {
  const contexts = rows(found.contexts);
  if (!contexts.length) return null;
  const most = Math.max(...contexts.map((row) => Math.abs(row.gain ?? 0)), 1e-9);
  const cells = contexts.map((row) => [
    row.context,
    signed(row.gain),
    html`<${Gauge} value=${row.gain} most=${most}/>`,
    whole(row.added),
    number(row.interventions),
    row.episodes,
    row.rolled_back || "none",
  ]);
  const head = ["context", "net gain", "", "parameters", "decisions", "episodes", "rolled back"];
  return html`<${Section} title="Contexts" reading=${SAID.contexts}>
    <${Table} head=${head} rows=${cells} figures=${[1, 3, 4, 5, 6]}/>
  <//>`;
}

export function Told({ found }) {
  const anomalies = rows(found.anomalies);
  const notes = rows(found.notes);
  const dropped = rows(found.dropped);
  if (!anomalies.length && !notes.length && !dropped.length) return null;
  return html`<${Section} title="Anomalies and notes">
    <ul class="told">
      ${anomalies.map(
        (row) => html`<li class=${row.raised ? "raised" : "over"}><b>round ${row.round}</b> ${row.message}
          <span class="faint"> ${row.advice}</span></li>`,
      )}
      ${notes.map((row) => html`<li><b>round ${row.round}</b> ${row.text}</li>`)}
      ${dropped.map((row) => html`<li>${row.sink} lost ${whole(row.count)} events of ${row.what}.</li>`)}
    </ul>
  <//>`;
}
