// Numbers, times and names as people read them.

export const signed = (value, digits = 2) => {
  if (value === null || value === undefined) return "—";
  const text = Math.abs(value).toFixed(digits);
  if (Number(text) === 0) return text;
  return (value > 0 ? "+" : "−") + text;
};

export const number = (value, digits = 3) => {
  if (value === null || value === undefined) return "—";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("-", "−").replace("e−", "e-");
  return Number(value.toPrecision(Math.max(digits, size >= 1000 ? 4 : digits)))
    .toLocaleString("en", { maximumFractionDigits: 6 })
    .replace("-", "−");
};

export const whole = (value) =>
  value === null || value === undefined ? "—" : Math.round(value).toLocaleString("en");

export const percent = (value, digits = 1) =>
  value === null || value === undefined ? "—" : `${value.toFixed(digits)} %`;

export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "—";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} days`;
};

export const ago = (time) => (time ? `${duration(Math.max(0, Date.now() / 1000 - time))} ago` : "—");

export const interval = (row) =>
  row.low === null || row.high === null || row.high <= row.low
    ? ""
    : `[${signed(row.low)}, ${signed(row.high)}]`;

export const lower = (name) => (name || "").toLowerCase().replaceAll("_", " ");

// The rows of an answer as objects by column.
export const rows = (answer) =>
  answer
    ? answer.rows.map((row) => Object.fromEntries(answer.columns.map((name, n) => [name, row[n]])))
    : [];

// Rows of (name, round, mean, low, high) as lines over one axis: {x, lines: {name: {y, low, high}}}.
export function lines(answer, name = "name") {
  const found = rows(answer);
  const x = [...new Set(found.map((row) => row.round))].sort((a, b) => a - b);
  const place = new Map(x.map((round, n) => [round, n]));
  const made = {};
  for (const row of found) {
    const key = row[name] ?? "";
    made[key] ??= { y: Array(x.length).fill(null), low: Array(x.length).fill(null), high: Array(x.length).fill(null) };
    const n = place.get(row.round);
    made[key].y[n] = row.mean;
    made[key].low[n] = row.low ?? row.mean;
    made[key].high[n] = row.high ?? row.mean;
  }
  return { x, lines: made };
}

export const last = (values) => {
  for (let n = values.length - 1; n >= 0; n--) if (values[n] !== null) return values[n];
  return null;
};
