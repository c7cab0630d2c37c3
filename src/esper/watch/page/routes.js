// Addresses: everything that can be looked at has one.

import { useEffect, useState } from "./vendor/preact-htm.js";

const encoded = (name) => encodeURIComponent(name);

export const to = {
  overview: () => "#/",
  run: (run) => `#/run/${encoded(run)}`,
  round: (run, round) => `#/run/${encoded(run)}/round/${round}`,
  episode: (run, round, env) => `#/run/${encoded(run)}/round/${round}/env/${env}`,
  decision: (run, round, env, step) => `#/run/${encoded(run)}/round/${round}/env/${env}/step/${step}`,
  compare: (runs) => `#/compare/${runs.map(encoded).join("/")}`,
};

const decoded = (text) => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};

export function parse(hash) {
  const [kind, ...rest] = hash.replace(/^#\/?/, "").split("/");
  if (kind === "compare") return { page: "compare", runs: rest.filter(Boolean).map(decoded) };
  if (kind !== "run" || !rest[0]) return { page: "overview" };
  const found = { page: "run", run: decoded(rest[0]) };
  for (let n = 1; n + 1 < rest.length; n += 2) {
    if (["round", "env", "step"].includes(rest[n]) && /^\d{1,9}$/.test(rest[n + 1])) {
      found[rest[n]] = Number(rest[n + 1]);
    }
  }
  return found;
}

export function useRoute() {
  const [route, setRoute] = useState(parse(location.hash));
  useEffect(() => {
    const changed = () => setRoute(parse(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

export const go = (address) => {
  location.hash = address.slice(1);
};
