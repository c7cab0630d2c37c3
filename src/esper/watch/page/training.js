// A training run: learning curve, the environments as they are now, the learner's health, time.

import { html } from "./vendor/preact-htm.js";
import { Lines } from "./charts.js";
import { Environments } from "./environments.js";
import { useView } from "./live.js";
import { Absent, COLOURS, Section, SERIES, Settings, Tile } from "./parts.js";
import { duration, interval, lines, number, rows, signed, whole } from "./words.js";

const BASELINES = [COLOURS.purple, COLOURS.orange, COLOURS.green, COLOURS.sky];
const PHASES = {
  step: ["train hosts", COLOURS.blue], decide: ["decide", COLOURS.sky], tell: ["telemetry", COLOURS.purple],
  learn: ["learn", COLOURS.orange], judge: ["evaluate", COLOURS.green],
};

export function Training({ run, route }) {
  const { answer, error } = useView("training", { run });
  if (error) return html`<${Absent}>${error}<//>`;
  if (!answer) return html`<p class="reading" role="status">Reading …</p>`;
  return html`
    <${Figures} found=${answer}/>
    <${Section} title="Environments" id="environments"
      reading="Every environment is a host in training; its slots are bars, coloured by stage. Choose one to see its decisions.">
      <${Environments} run=${run} round=${route.round}/>
    <//>
    <${Curve} found=${answer}/>
    <${Health} found=${answer}/>
    <${Contexts} found=${answer}/>
    <${Told} found=${answer}/>
    <${Settings} config=${answer.config} versions=${answer.versions}/>`;
}

function evaluated(found) {
  const all = rows(found.evaluations);
  const name = all.find((row) => row.round > 0)?.controller;
  const learned = all.filter((row) => row.controller === name);
  const baselines = all.filter((row) => row.controller !== name);
  return { learned, baselines };
}

function Figures({ found }) {
  const { learned, baselines } = evaluated(found);
  const best = learned.reduce((top, row) => (top && top.score >= row.score ? top : row), null);
  const seconds = lines(found.seconds);
  const spent = ["play", "learn", "judge"]
    .flatMap((phase) => seconds.lines[phase]?.y ?? [])
    .reduce((sum, value) => sum + (value ?? 0) * found.wide, 0);
  const played = rows(found.returns).length * found.wide;
  const rounds = `${whole(Math.min(played, found.config.rounds ?? played))}${found.config.rounds ? ` of ${whole(found.config.rounds)}` : ""}`;
  return html`<dl class="figures">
    <${Tile} what="best evaluation" value=${best ? signed(best.score) : "—"}
      more=${best ? `round ${best.round} ${interval(best)}` : "none yet"}/>
    ${baselines.map((row) => html`<${Tile} what=${row.controller} value=${signed(row.score)} more=${interval(row)}/>`)}
    <${Tile} what="rounds" value=${rounds} more="${whole(found.config.envs)} episodes each"/>
    <${Tile} what="training time" value=${duration(spent)} more="with evaluations"/>
  </dl>`;
}

function Curve({ found }) {
  const { learned, baselines } = evaluated(found);
  const returns = lines(found.returns);
  const x = [...new Set([...returns.x, ...learned.map((row) => row.round)])].sort((a, b) => a - b);
  const at = (points, pick) => {
    const known = new Map(points.map((row) => [row.round, pick(row)]));
    return x.map((round) => known.get(round) ?? null);
  };
  const means = rows(found.returns);
  if (!x.length) return html`<${Section} title="Learning curve"><${Absent}>No round is over yet.<//><//>`;
  const drawn = [
    { label: "mean return of training episodes", colour: COLOURS.grey, width: 1.2, y: at(means, (row) => row.mean) },
    {
      label: "score by evaluation", colour: COLOURS.blue, width: 2.4, points: true,
      y: at(learned, (row) => row.score), low: at(learned, (row) => row.low), high: at(learned, (row) => row.high),
    },
    ...baselines.map((row, n) => ({
      label: row.controller, colour: BASELINES[n % BASELINES.length], dash: [6, 4], points: false,
      y: x.map(() => row.score), low: x.map(() => row.low), high: x.map(() => row.high),
    })),
  ];
  return html`<${Section} title="Learning curve" reading="Net gain over never growing, in units of what can be gained: never growing is 0, about what the best single seed gains is 1. Bands are 95 % intervals.">
    <${Lines} title="Score over rounds" x=${x} lines=${drawn} xLabel="round" yLabel="net gain / scale" height=${300}
      across=${[{ y: 0, label: "never growing", colour: COLOURS.grey }]}/>
  <//>`;
}

const PANELS = [
  { title: "Entropy by head", name: (head) => `heads.${head}.entropy`, low: "entropy_collapse", anomalies: ["entropy_collapse"], y: "share of the highest" },
  { title: "KL by head", name: (head) => `heads.${head}.kl`, whole: "kl", anomalies: [] },
  { title: "Clipped steps by head", name: (head) => `heads.${head}.clip_fraction`, anomalies: ["ratio_explosion", "ratio_collapse"], y: "share" },
  { title: "Gradient norms", name: (head) => `gradient_norms.heads.${head}`, value: "gradient_norms.value", low: "gradient_vanishing", high: "gradient_explosion", anomalies: ["gradient_vanishing", "gradient_explosion"], log: true },
  { title: "Largest ratio by head", name: (head) => `heads.${head}.ratio_max`, high: "ratio_explosion", anomalies: ["ratio_explosion"], log: true },
  { title: "Smallest ratio by head", name: (head) => `heads.${head}.ratio_min`, low: "ratio_collapse", anomalies: ["ratio_collapse"], log: true },
];

function Health({ found }) {
  const health = lines(found.health);
  if (!health.x.length) return html`<${Section} title="Health of the learning"><${Absent}>No update yet.<//><//>`;
  const heads = [...new Set(Object.keys(health.lines).filter((name) => name.startsWith("heads.")).map((name) => name.split(".")[1]))];
  const raised = rows(found.anomalies).filter((row) => row.raised);
  const target = found.config.ppo?.target_kl;
  const line = (label, name, colour) => {
    const own = health.lines[name];
    if (!own) return null;
    return found.wide > 1 ? { label, colour, ...own } : { label, colour, y: own.y };
  };
  const positive = (one) => one && { ...one, y: one.y.map((value) => (value > 0 ? value : null)), low: null, high: null };
  const panel = (of) => {
    const drawn = heads.map((head, n) => line(head, of.name(head), SERIES[n % SERIES.length]));
    if (of.value) drawn.push(line("value", of.value, COLOURS.vermilion));
    if (of.whole) drawn.push(line("all heads", of.whole, COLOURS.grey));
    const known = drawn.filter(Boolean).map((one) => (of.log ? positive(one) : one));
    const limits = [of.low, of.high].filter(Boolean).map((name) => ({ y: found.thresholds[name], label: `${name.replaceAll("_", " ")} ${number(found.thresholds[name])}` }));
    if (of.whole === "kl" && target) limits.push({ y: 1.5 * target, label: `the update stops at ${number(1.5 * target)}` });
    const down = raised.filter((row) => of.anomalies.includes(row.name)).map((row) => ({ x: row.round }));
    return html`<${Lines} title=${of.title} x=${health.x} lines=${known} xLabel="" yLabel=${of.y ?? ""} log=${of.log} across=${limits} down=${down}/>`;
  };
  const explained = line("explained variance", "explained_variance", COLOURS.vermilion);
  return html`<${Section} title="Health of the learning" reading="Per head; dashed lines are the thresholds of anomalies, where they are within sight, and dotted ones the rounds in which one was raised.">
    <div class="charts">
      ${PANELS.map(panel)}
      ${explained && html`<${Lines} title="Variance of returns that values explain" x=${health.x} lines=${[explained]} across=${[{ y: 0, colour: COLOURS.grey }]}
        down=${raised.filter((row) => row.name === "value_collapse").map((row) => ({ x: row.round }))}/>`}
      <${Phases} found=${found}/>
    </div>
  <//>`;
}

function Phases({ found }) {
  const seconds = lines(found.seconds);
  const drawn = Object.entries(PHASES)
    .filter(([phase]) => seconds.lines[phase])
    .map(([phase, [label, colour]]) => ({ label, colour, y: seconds.lines[phase].y }));
  return drawn.length
    ? html`<${Lines} title="Where the time goes" x=${seconds.x} lines=${drawn} yLabel="seconds a round"/>`
    : null;
}

function Contexts({ found }) {
  const contexts = rows(found.contexts);
  if (!contexts.length) return null;
  const most = Math.max(...contexts.map((row) => Math.abs(row.gain ?? 0)), 1e-9);
  return html`<${Section} title="Contexts" reading="What growing gained in the last quarter of the rounds, in points over the same case never grown, less the rent.">
    <div class="wide"><table><thead><tr><th>context</th><th>net gain</th><th></th><th>parameters</th><th>decisions</th><th>episodes</th><th>rolled back</th></tr></thead>
    <tbody>${contexts.map((row) => html`<tr><td>${row.context}</td><td class="figure">${signed(row.gain)}</td>
      <td><span class="gauge"><i class=${row.gain < 0 ? "bad" : ""} style=${{ width: `${(100 * Math.abs(row.gain ?? 0)) / most}%` }}></i></span></td>
      <td class="figure">${whole(row.added)}</td><td class="figure">${number(row.interventions)}</td>
      <td class="figure">${row.episodes}</td><td class="figure">${row.rolled_back || "none"}</td></tr>`)}</tbody></table></div>
  <//>`;
}

export function Told({ found }) {
  const anomalies = rows(found.anomalies);
  const notes = rows(found.notes);
  const dropped = rows(found.dropped);
  if (!anomalies.length && !notes.length && !dropped.length) return null;
  return html`<${Section} title="Anomalies and notes">
    <ul class="told">
      ${anomalies.map((row) => html`<li class=${row.raised ? "raised" : "over"}><b>round ${row.round}</b> ${row.message} <span class="faint">${row.advice}</span></li>`)}
      ${notes.map((row) => html`<li><b>round ${row.round}</b> ${row.text}</li>`)}
      ${dropped.map((row) => html`<li>${row.sink} lost ${whole(row.count)} events of ${row.what}.</li>`)}
    </ul>
  <//>`;
}
