// Curves above, what every slot holds below, on one axis of epochs.

import { html } from "./vendor/preact-htm.js";
import { COLOURS, OCCUPIED, OPS, STAGES } from "./parts.js";
import { lower, percent } from "./words.js";

const LEFT = 86; // for names
const WIDE = 960;
const HIGH = 170; // of the curves
const ROW = 26; // of a slot
const NAME = 12; // letters of a slot's name
const MARKS = { GERMINATE: "▲", ADVANCE: "▶", FOSSILIZE: "◆", PRUNE: "✕" };

// What each slot holds at the end of each step, from changes {step, slot, after, blueprint}.
function cells(slots, steps, changes) {
  const held = {};
  return steps.flatMap((row) => {
    for (const change of changes) if (change.step === row.step) held[change.slot] = change;
    return slots.map((slot) => ({
      slot,
      step: row.step,
      stage: held[slot]?.after ?? "DORMANT",
      blueprint: held[slot]?.blueprint,
      alpha: row[`alpha_${slot}`] ?? 1,
    }));
  });
}

// Each seed from its planting to its end, for its name.
function lives(found, slots) {
  const all = [];
  for (const slot of slots) {
    let life = null;
    for (const cell of found.filter((each) => each.slot === slot)) {
      if (!OCCUPIED.has(cell.stage)) life = null;
      else if (life) life.until = cell.step;
      else all.push((life = { slot, from: cell.step, until: cell.step, blueprint: cell.blueprint }));
    }
  }
  return all;
}

const shortened = (name) => (name.length > NAME ? `…${name.slice(1 - NAME)}` : name);

// `steps`: rows with `step` and perhaps alphas; `marks`: [{step, op}]; `lines`: [{label, colour, dash, points}].
export function Timeline({ slots, steps, changes, marks, lines, horizon, chosen, choose, said }) {
  const held = cells(slots, steps, changes);
  const wide = (WIDE - LEFT) / horizon;
  const x = (step) => LEFT + wide * step;
  const values = lines.flatMap((line) => line.points.map(([, value]) => value));
  const [least, most] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
  const y = (value) => HIGH - 8 - ((HIGH - 20) * (value - least)) / (most - least || 1);
  const top = (slot) => HIGH + 14 + slots.indexOf(slot) * ROW;
  const total = HIGH + 14 + slots.length * ROW + 26;
  const press = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    choose(Math.min(steps.at(-1).step, Math.max(steps[0].step, chosen + by)));
    event.preventDefault();
  };
  return html`
    <div class="wide"><svg class="episode" viewBox="0 0 ${WIDE + 8} ${total}" tabindex="0" onKeyDown=${press}
        role="group" aria-label=${said}>
      <rect class="chosen" x=${x(chosen)} y="0" width=${wide} height=${total - 18}/>
      ${[least, (least + most) / 2, most].map((value) => html`<g class="tick">
        <line x1=${LEFT} x2=${WIDE} y1=${y(value)} y2=${y(value)}/>
        <text x=${LEFT - 8} y=${y(value) + 4} text-anchor="end">${percent(value, 0)}</text></g>`)}
      ${lines.map((line) => html`<polyline fill="none" stroke=${line.colour} stroke-width="2" stroke-linejoin="round"
        stroke-dasharray=${line.dash} points=${line.points.map(([step, value]) => at(x(step + 0.5), y(value))).join(" ")}/>`)}
      ${slots.map((slot) => html`
        <text x=${LEFT - 8} y=${top(slot) + 16} text-anchor="end"><title>${slot}</title>${shortened(slot)}</text>
        <line class="row" x1=${LEFT} x2=${WIDE} y1=${top(slot) + 12} y2=${top(slot) + 12}/>`)}
      ${held.map((cell) => drawn(cell, x(cell.step), wide, top(cell.slot)))}
      ${lives(held, slots).map((life) => html`<text class="seed" text-anchor="middle" y=${top(life.slot) + 16}
        x=${(x(life.from) + x(life.until + 1)) / 2}>${life.blueprint}</text>`)}
      ${marks.map(({ step, op }) => html`<g class="decision" onClick=${() => choose(step)}>
        <rect x=${x(step)} y="0" width=${wide} height=${total - 18} fill="transparent">
          <title>epoch ${step + 1}: ${lower(op)}</title></rect>
        <text x=${x(step + 0.5)} y=${total - 22} text-anchor="middle" style=${{ fill: OPS[op] }}>${MARKS[op] ?? "·"}</text></g>`)}
      ${steps
        .filter(({ step }) => (step + 1) % Math.ceil(horizon / 13) === 0)
        .map(({ step }) => html`<text x=${x(step + 0.5)} y=${total - 4} text-anchor="middle">${step + 1}</text>`)}
    </svg></div>
    <ul class="legend">
      ${lines
        .filter((line) => line.points.length)
        .map((line) => html`<li><i style=${{ background: line.colour }}></i>${line.label}</li>`)}
      ${Object.entries(MARKS).map(([op, mark]) => html`<li><span style=${{ color: OPS[op] }}>${mark}</span> ${lower(op)}</li>`)}
    </ul>`;
}

const at = (x, y) => `${x.toFixed(1)},${y.toFixed(1)}`;

const drawn = (cell, x, wide, y) => {
  if (cell.stage === "DORMANT") return null;
  const full = OCCUPIED.has(cell.stage);
  const alpha = cell.stage === "FOSSILIZED" ? 1 : cell.alpha;
  return html`<rect x=${x} y=${y + (full ? 3 : 9)} width=${wide + 0.5} height=${full ? 18 : 6}
    fill=${STAGES[cell.stage] ?? COLOURS.grey} fill-opacity=${0.28 + 0.72 * alpha}/>`;
};

export const points = (rows, name, shift = 0) =>
  rows.map((row) => [row.step + shift, row[name]]).filter(([, value]) => value !== null && value !== undefined);
