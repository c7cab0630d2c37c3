"""The sections of a report, in order: what each shows, how to read it, and its pictures drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from esper.karn.report import theme as themes
from esper.karn.report.context_charts import gain_by_parameters, policy_by_context
from esper.karn.report.page import Drawn, Part
from esper.karn.report.run_facts import BEST, WAITING, Facts, Story
from esper.karn.report.theme import DARK, LIGHT, AbsentError, Theme
from esper.karn.report.timelines import timeline, title
from esper.karn.report.training_charts import action_shares, health, learning_curve, phase_times


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture that can be drawn in any theme; its name is that of its file."""

    name: str
    words: str  # what it shows, for those who cannot see it
    draw: Callable[[Theme], Figure]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    reading: str  # how to read its pictures
    pictures: Sequence[Picture]
    absent: Sequence[str] = ()  # what is not there, and why


def contents(facts: Facts) -> list[Section]:
    late = f"{facts.late_words} ({len(facts.episodes):,} episodes)"
    sampled = (
        "Training episodes explore: their decisions are drawn from the policy, while an evaluation "
        "takes the most probable ones."
    )
    return [
        Section(
            title="Learning curve",
            reading="The score is the gain in validation accuracy over the same network never "
            "grown, less the rent for its parameters, divided by what the best single seed gains "
            "in such contexts: 0 is never growing, 1 is about as good as one well-placed seed. "
            "The star is the best evaluation.",
            pictures=[
                _picture("learning-curve", "Evaluation score over rounds", facts, learning_curve)
            ],
        ),
        Section(
            title="What it does in each context",
            reading=f"Episodes of {late}; contexts with the greatest gain first, their episodes in "
            "parentheses. The map says in how many per cent of them each seed was planted, by slot "
            "and blueprint; a line does not sum to 100, for an episode can plant several. Beside "
            "it: when the first seed was planted (dot: median, bar: 10 to 90 %) and which it was "
            f"most often; and the mean net gain with its 95 % interval. {sampled}",
            pictures=[
                _picture(
                    "contexts",
                    "Shares of what was planted in each context, first plantings and net gains",
                    facts,
                    policy_by_context,
                )
            ],
        ),
        _timelines(facts),
        Section(
            title="Accuracy against parameters",
            reading=f"Episodes of {late}. Up is better, left is cheaper; the rent for parameters "
            "is already taken off. Seeds that were removed again cost rent and add no parameters.",
            pictures=[
                _picture(
                    "parameters",
                    "Net gain over added parameters of every episode",
                    facts,
                    gain_by_parameters,
                )
            ],
        ),
        Section(
            title="Decisions over training",
            reading="How often each action was chosen, head by head; slot, blueprint and blend "
            "over the decisions that planted a seed.",
            pictures=[_picture("actions", "Shares of actions over rounds", facts, action_shares)],
        ),
        Section(
            title="Health of the learning",
            reading="One point for each update. A red triangle marks the round in which an anomaly "
            "was raised"
            + ("; they are listed below." if facts.anomalies else "; in this run there is none."),
            pictures=[
                _picture("health", "Metrics of updates over rounds", facts, health),
                _picture("phases", "Seconds of each phase over rounds", facts, phase_times),
            ],
        ),
    ]


def _picture(
    name: str, words: str, facts: Facts, draw: Callable[[Facts, Theme], Figure]
) -> Picture:
    return Picture(name=name, words=words, draw=lambda theme: draw(facts, theme))


def _timelines(facts: Facts) -> Section:
    told = {story.kind for story in facts.stories}
    absent = []
    if not facts.episodes:
        absent.append("No episode has ended yet.")
    elif not told:
        absent.append("The decisions of these episodes were not recorded.")
    elif WAITING not in told:
        absent.append(f"In {facts.late_words} no episode waited to its end: all planted something.")
    elif BEST not in told:
        absent.append(f"In {facts.late_words} nothing was planted.")
    return Section(
        title="Growth, epoch by epoch",
        reading=f"Episodes of {facts.late_words}: those that grew with the best, the median "
        "and the worst net gain, and one that planted nothing. Colour is the stage of a seed, its "
        "strength alpha (faint: not heard yet, full: blended in). Marks below a bar are "
        "decisions, taken before the epoch they stand at.",
        pictures=[_story_picture(story) for story in facts.stories],
        absent=absent,
    )


def _story_picture(story: Story) -> Picture:
    row = story.episode
    caption = (
        f"Round {row['round']}, environment {row['env']}, case {row['seed']}; "
        f"{row['interventions'] or 0} decisions other than waiting."
    )
    if story.failure is not None:
        step, reason = story.failure
        caption += f" Rolled back in epoch {step + 1}: {reason}."
    return Picture(
        name=f"timeline-{story.kind}",
        words=title(story),
        draw=lambda theme: timeline(story, theme),
        caption=caption,
    )


def drawn(sections: Sequence[Section]) -> tuple[list[Part], dict[str, bytes]]:
    """Sections with their pictures, and the light ones by name; what cannot be drawn says why."""
    parts: list[Part] = []
    files: dict[str, bytes] = {}
    for section in sections:
        pictures, absent = [], list(section.absent)
        for picture in section.pictures:
            try:
                light, dark = (themes.render(picture.draw, theme) for theme in (LIGHT, DARK))
            except AbsentError as reason:
                absent.append(str(reason))
                continue
            files[picture.name] = light
            pictures.append(
                Drawn(words=picture.words, light=light, dark=dark, caption=picture.caption)
            )
        parts.append(
            Part(title=section.title, reading=section.reading, pictures=pictures, absent=absent)
        )
    return parts, files
