// The environments of a round as a grid of small hosts, as they are now.

import { html, useState } from "./vendor/preact-htm.js";
import { useView } from "./live.js";
import { Absent, OCCUPIED, Slot, Sparkline, StageLegend } from "./parts.js";
import { go, to } from "./routes.js";
import { last, lower, percent, rows, signed, whole } from "./words.js";

const PAGE = 64;
const UNKEPT = "Nothing was kept of these; environments beyond the first 256 have no rows of their own.";

// Every environment with its curve and slots, from the last step of each and the last change of each slot.
function gathered(answer) {
  const found = new Map();
  for (const row of rows(answer.steps)) {
    const slots = answer.layout.slots.map((name) => ({ name, stage: "DORMANT", alpha: row[`alpha_${name}`] ?? null }));
    found.set(row.env, { env: row.env, curve: JSON.parse(row.curve), reward: row.total, step: row.last, slots });
  }
  for (const row of rows(answer.changes)) {
    const slot = found.get(row.env)?.slots.find((each) => each.name === row.slot);
    if (slot) Object.assign(slot, { stage: row.after, blueprint: row.blueprint });
  }
  for (const row of rows(answer.ended)) {
    if (found.has(row.env)) found.get(row.env).ended = row;
  }
  return [...found.values()];
}

export function Environments({ run, round }) {
  const [first, setFirst] = useState(0);
  const asked = round === undefined ? { run, first } : { run, first, round };
  const { answer, error } = useView("environments", asked);
  if (error) return html`<${Absent}>${error}<//>`;
  if (!answer) return html`<div class="grid" aria-busy="true"></div>`;
  const found = gathered(answer);
  const count = answer.about.envs ?? found.length;
  const horizon = answer.about.horizon;
  const steps = Math.max(0, ...found.map((own) => own.step + 1));
  const curves = found.flatMap((own) => own.curve).filter((value) => value !== null);
  const [least, most] = [Math.min(...curves), Math.max(...curves)];
  const growing = found.filter((own) => own.slots.some((slot) => OCCUPIED.has(slot.stage))).length;
  const move = (by) => go(to.round(run, Math.max(1, answer.round + by)));
  return html`
    <div class="bar">
      <p class="now" aria-live="polite">Round ${answer.round}, epoch ${steps}${horizon ? ` of ${horizon}` : ""}:
        ${" "}${growing} of ${found.length} shown hosts hold a seed</p>
      <span class="buttons">
        <button type="button" onClick=${() => move(-1)} aria-label="the round before">‹</button>
        <button type="button" onClick=${() => move(1)} aria-label="the next round">›</button>
        <button type="button" disabled=${round === undefined} onClick=${() => go(to.run(run))}>live</button>
      </span>
      ${count > PAGE && html`<span class="buttons">
        <button type="button" disabled=${!first} onClick=${() => setFirst(Math.max(0, first - PAGE))}>earlier</button>
        <span class="faint">${first} to ${Math.min(count, first + PAGE) - 1} of ${whole(count)}</span>
        <button type="button" disabled=${first + PAGE >= count} onClick=${() => setFirst(first + PAGE)}>later</button>
      </span>`}
      <${StageLegend}/>
    </div>
    ${found.length === 0 && html`<${Absent}>${answer.round ? UNKEPT : "No episode has begun yet."}<//>`}
    <div class="grid">${found.map(
      (own) => html`<${Environment} key=${own.env} own=${own} run=${run} round=${answer.round}
        least=${least} most=${most}/>`,
    )}</div>`;
}

function Environment({ own, run, round, least, most }) {
  const living = own.slots
    .filter((slot) => OCCUPIED.has(slot.stage))
    .map((slot) => `${slot.name} ${slot.blueprint} ${lower(slot.stage)}`);
  const score = last(own.curve);
  const said = `environment ${own.env}: accuracy ${percent(score)}, ${living.join(", ") || "nothing planted"}`;
  const ended = own.ended;
  return html`<a class="env ${ended?.rolled_back ? "failed" : ""}" href=${to.episode(run, round, own.env)} aria-label=${said}>
    <span class="top"><b>${own.env}</b><span class="score">${percent(score, 0)}</span></span>
    <${Sparkline} values=${own.curve} label="" least=${least} most=${most} high=${22}/>
    ${own.slots.map((slot) => html`<${Slot} name=${slot.name} slot=${slot}/>`)}
    <small>${ended ? `${ended.context} ${signed(ended.net_gain, 1)}` : html`reward ${signed(own.reward)}`}</small>
  </a>`;
}
