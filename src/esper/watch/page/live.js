// What the server says is new, and answers that are asked for again when they have changed.

import { useEffect, useState } from "./vendor/preact-htm.js";

const PAUSE = 150; // ms between two answers of one kind
const LATER = 600; // ms until a busy server is asked again
const AGAIN = 2000; // ms until one that did not answer is

export const live = { connected: false, refused: false, names: [], runs: new Map() };
const listeners = new Set();

export function listen(hear) {
  listeners.add(hear);
  return () => listeners.delete(hear);
}

const tell = (news) => listeners.forEach((hear) => hear(news));

export function start() {
  let source = null;
  let tries = 0;
  const open = () => {
    source?.close();
    if (document.hidden) return; // what nobody sees is not asked for; when it is seen again, all of it
    source = new EventSource("words"); // gives the number of the last word back when it reconnects
    source.onopen = () => {
      Object.assign(live, { connected: true, refused: false });
      tries = 0;
      tell(null);
    };
    source.onmessage = (message) => {
      const word = JSON.parse(message.data);
      live.names = word.names;
      for (const run of word.runs) live.runs.set(run.run, run);
      tell(word.runs);
    };
    source.onerror = () => {
      live.connected = false;
      live.refused = source.readyState === EventSource.CLOSED;
      tell([]);
      if (live.refused) setTimeout(open, Math.min(30000, 1000 * 2 ** tries++));
    };
  };
  open();
  document.addEventListener("visibilitychange", open);
}

async function asked(view, given) {
  const words = new URLSearchParams({ view, ...given });
  const response = await fetch(`ask?${words}`);
  if (!response.ok) throw new Error((await response.text()).trim());
  return { answer: await response.json(), late: response.headers.has("Retry-After") };
}

// The newest answer to a question, or null before the first; `given.run` is the run it is about.
export function useView(view, given) {
  const key = JSON.stringify([view, given]);
  const [found, setFound] = useState({ key: "", answer: null, error: null });
  useEffect(() => {
    let over = false;
    let busy = false;
    let again = false;
    let timer = 0;
    let kinds = null; // of events that change the answer; unknown: all

    async function ask() {
      clearTimeout(timer);
      if (busy) {
        again = true;
        return;
      }
      busy = true;
      again = false;
      let wait = 0;
      try {
        const { answer, late } = await asked(view, given);
        if (over) return;
        kinds = new Set(Array.isArray(answer) ? answer.flatMap((each) => each.kinds ?? []) : answer.kinds);
        setFound({ key, answer, error: null });
        wait = late ? LATER : again ? PAUSE : 0;
      } catch (error) {
        if (over) return;
        setFound((before) => ({ answer: before.key === key ? before.answer : null, key, error: error.message }));
        wait = AGAIN;
      } finally {
        busy = false;
      }
      if (wait || again) timer = setTimeout(ask, wait || PAUSE);
    }

    const concerns = (word) =>
      (!given.run || word.run === given.run) && (!kinds || word.kinds.some((kind) => kinds.has(kind)));
    ask();
    const off = listen((news) => {
      if (news === null || news.some(concerns)) ask();
    });
    return () => {
      over = true;
      off();
      clearTimeout(timer);
    };
  }, [key]);
  if (found.key !== key) return { answer: null, error: null };
  return { answer: found.answer, error: found.answer ? null : found.error }; // what is known stays
}

// Draw again whenever a word comes.
export function useWords() {
  const [, setCount] = useState(0);
  useEffect(() => listen(() => setCount((count) => count + 1)), []);
  return live;
}

// Draw again now and then, for what says how long ago something was.
export function useClock(every = 5000) {
  const [, setCount] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => setCount((count) => count + 1), every);
    return () => clearInterval(timer);
  }, []);
}
