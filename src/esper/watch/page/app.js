// The page: where it stands, and which part is shown at which address.

import { html, render, useEffect, useErrorBoundary } from "./vendor/preact-htm.js";
import { start, useView, useWords } from "./live.js";
import { described, Overview } from "./overview.js";
import { Absent, Ago, Badge, Progress, Reading } from "./parts.js";
import { go, to, useRoute } from "./routes.js";
import { Compare } from "./compare.js";
import { Episode } from "./episode.js";
import { Evaluation } from "./evaluation.js";
import { Growth } from "./growth.js";
import { Training } from "./training.js";

const GONE = `The server is gone, or was started anew: open the address that it printed. What is shown is as it
  was.`;

function App() {
  const route = useRoute();
  useEffect(() => {
    document.title = route.run ? `${route.run} · Esper` : "Esper";
    document.getElementById("main")?.focus({ preventScroll: true });
  }, [route.page, route.run]);
  useEffect(() => {
    const press = (event) => {
      if (event.target.closest("input, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "o") go(to.overview());
      if (event.key === "/") {
        document.querySelector("input[type=search]")?.focus();
        event.preventDefault();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  return html`
    <header class="page">
      <a class="home" href=${to.overview()} title="all runs (o)">Esper</a>
      ${route.page === "run" && html`<span class="where">${route.run}</span>`}
      <${Line}/>
    </header>
    <main id="main" tabindex="-1">${shown(route)}</main>`;
}

function Line() {
  const live = useWords();
  const state = live.connected ? "live" : live.refused ? "closed" : "reconnecting";
  return html`<span class="link ${live.connected ? "on" : "off"}" role="status">
    ${live.refused && html`<small>${GONE}</small> `}${state}</span>`;
}

function shown(route) {
  if (route.page === "overview") return html`<${Overview}/>`;
  if (route.page === "compare") return html`<${Compare} key=${route.runs.join("/")} runs=${route.runs}/>`;
  return html`<${Run} key=${route.run} route=${route}/>`;
}

const PARTS = { training: Training, growth: Growth, evaluation: Evaluation };

function Run({ route }) {
  const [failure] = useErrorBoundary();
  const { answer, error } = useView("summary", { run: route.run });
  if (failure) return html`<${Absent}>This cannot be shown: ${failure.message}<//>`;
  if (error) return html`<${Absent}>${error}<//>`;
  if (!answer) return html`<${Reading}/>`;
  const run = described(answer);
  const Part = PARTS[run.kind];
  const head = html`<div class="bar head">
    <h1><a href=${to.run(run.run)}>${run.run}</a></h1><${Badge} ...${run}/>
    ${run.unit && html`<${Progress} ...${run}/>`}
    <span class="faint">${run.why || html`last word <${Ago} run=${run.run} time=${run.time}/>`}</span></div>`;
  if (run.state === "unreadable" || !Part) {
    return html`${head}<${Absent}>${run.why || "There is nothing to show yet."}<//>`;
  }
  if (route.env !== undefined && run.kind === "training") return html`${head}<${Episode} route=${route}/>`;
  return html`${head}<${Part} run=${run.run} route=${route}/>`;
}

start();
render(html`<${App}/>`, document.getElementById("app"));
