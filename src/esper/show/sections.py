"""The sections of a report and their pictures; what they say is in `templates/sections.toml`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from matplotlib.figure import Figure

from esper.show.context_charts import gain_by_parameters, policy_by_context
from esper.show.page import Picture, Section, sections_of
from esper.show.run_facts import BEST, WAITING, Facts, Story
from esper.show.theme import Theme
from esper.show.timelines import timeline, title
from esper.show.training_charts import action_shares, health, learning_curve, phase_times

CHARTS: Mapping[str, Callable[[Facts, Theme], Figure]] = {  # by name of their pictures
    "learning-curve": learning_curve,
    "contexts": policy_by_context,
    "parameters": gain_by_parameters,
    "actions": action_shares,
    "health": health,
    "phases": phase_times,
}
TIMELINES = "timelines"  # the section whose pictures are episodes


def contents(facts: Facts) -> list[Section]:
    """All sections, their pictures not drawn yet."""
    sections = sections_of(
        "sections.toml",
        CHARTS,
        facts,
        late=facts.late_words,
        episodes=f"{len(facts.episodes):,}",
        anomalies="they are listed below" if facts.anomalies else "in this run there is none",
    )
    episodes = [_episode(story) for story in facts.stories]
    told = replace(sections[TIMELINES], pictures=episodes, absent=_not_told(facts))
    return [*(sections | {TIMELINES: told}).values()]


def _episode(story: Story) -> Picture:
    row = story.episode
    caption = (
        f"Round {row['round']}, environment {row['env']}, case {row['seed']}; "
        f"{row['interventions'] or 0} decisions other than waiting."
    )
    if story.failure is not None:
        step, reason = story.failure
        caption += f" Rolled back in epoch {step + 1}: {reason}."
    return Picture(f"timeline-{story.kind}", title(story), partial(timeline, story), caption)


def _not_told(facts: Facts) -> list[str]:
    """Which kinds of episodes there are not, and why."""
    told = {story.kind for story in facts.stories}
    if not facts.episodes:
        return ["No episode has ended yet."]
    if not told:
        return ["The decisions of these episodes were not recorded."]
    if WAITING not in told:
        return [f"In {facts.late_words} no episode waited to its end: all planted something."]
    return [] if BEST in told else [f"In {facts.late_words} nothing was planted."]
