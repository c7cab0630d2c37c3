"""The study of transfer: it runs in parts, and its report says what the raw results say."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from esper.garden.contexts import Source
from esper.garden.evaluation import FORMAT
from esper.garden.greenhouse import GROUPS
from esper.leyline import LifecycleOp
from esper.leyline.errors import DataError
from esper.tamiyo import TokenActorCritic
from esper.tamiyo.controllers.learned import load_saved, save_controller
from studies import greenhouse_gains, transfer
from studies.boxed import box
from studies.judging import read_judged
from studies.report.transfer import write_docs, write_report
from studies.report.transfer_results import Results, figures_of, opened, pack
from studies.transfer_plan import RESERVE, SIZES, Study
from studies.tuned_rules import (
    RULES,
    Heats,
    TunedRule,
    finalists,
    keep_tuned,
    kind_of,
    rivals,
    tuned,
)
from tests.studies.made_up import result

WORLDS, CASES, RENT = 3, 4, 3.0
SPECS = {kind: f"{kind}@*/*" if kind != "audition" else "audition:seeds=1" for kind in RULES}
TUNED_RULES = {kind: TunedRule(spec, 1.0, 64, ((spec, 1.0, 64),)) for kind, spec in SPECS.items()}
RIVALS = rivals(TUNED_RULES)
TASKS, SEEDS = ("one", "two"), (20, 21, 22)
Points = dict[str, dict[str, list[list[float]]]]  # by group and controller, [worlds][cases]


def run(*words: object) -> None:
    options = transfer.parsed([str(word) for word in words])
    options.work(options)


def test_rivals_are_heard_as_much_as_learners_are_too() -> None:
    told = "audition:rounds=20,spend=2.0"
    assert [*SPECS.values(), "audition", f"{told},seeds=1", told] == RIVALS


# --- made-up results ----------------------------------------------------------------------------


def played(
    file: Path, points: dict[str, Sequence[float]], made: Mapping[str, str] | None = None
) -> None:
    """A world's file with these net points at its rent, of which some is exposure; `made` are the
    controllers' fingerprints."""
    lines = [json.dumps({"format": FORMAT, "rent": RENT})]
    for name, own in points.items():
        for case, net in enumerate(own):
            found = result(name, file.stem, case, net + 0.5 * RENT, exposure=0.5)
            known = found if made is None else replace(found, made=made[name])
            lines.append(json.dumps(asdict(known)))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Points]:
    """A whole study with points that are drawn; of the garden too."""
    runs, chance = tmp_path / "runs", random.Random(5)
    learners = [f"both-{seed}" for seed in range(4)] + ["fit-4"]
    trained = [f"{kind}-{seed}" for seed in range(5) for kind in ("fit", "both", "one_shot")]
    lacking = ["hasty-0", "no_shadows-0", "no_shadows-1", "plots_24-0", "ppo-0"]
    who = [*RIVALS, *trained, *lacking]
    points: Points = {}
    for place, group in enumerate((*GROUPS, "garden")):
        ours = [*who, "specialist"] if group == "garden" else who
        points[group] = {
            name: [[chance.gauss(name.startswith(("both", "fit")) + place / 4 - 1, 1.0)
                    for _ in range(CASES)] for _ in range(WORLDS)]
            for name in ours
        }  # fmt: skip
        for world in range(WORLDS):
            one = {name: own[world] for name, own in points[group].items()}
            played(runs / "judged" / f"{group}-{world:03d}.jsonl", one)
    (runs / "own").mkdir()
    named = {str(100 + n): name for n, name in enumerate([*RIVALS, *learners])}
    (runs / "own" / "controllers.json").write_text(json.dumps(named))
    points["own"] = {name: [[] for _ in TASKS] for name in named.values()}
    for place, task in enumerate(TASKS):
        (runs / "own" / task).mkdir()
        for seed in SEEDS:
            never = chance.gauss(50, 5)
            files = {f"never-{seed}-0": never, f"tune-{seed}-0": 0.0}
            for number, name in named.items():
                gain = chance.gauss(0.5, 1.0)
                points["own"][name][place].append(gain)
                files[f"variant-{seed}-{number}"] = never + gain
            for name, test in files.items():
                # In a host alone 4 FLOPs; controllers need as many as their number says besides.
                more = int(name.rpartition("-")[2])
                run = {"test": test, "flops": [1, 3], "shadow_flops": [more],
                       "tryouts": [{"flops": 1}] if more else [], "each": "scores"}  # fmt: skip
                (runs / "own" / task / f"{name}.json").write_text(json.dumps(run))
    chosen = {name: {name: [1.0, 0.02]} for name in learners}
    plan = {"trainings": 5, "gains": 1000, "gains_seconds": 60, "ppo": 200, "groups": GROUPS}
    plan["shapes"] = {group: [WORLDS, CASES] for group in (*GROUPS, "garden", "validation")}
    plan["shapes"] |= {"own": [len(TASKS), len(SEEDS)]}
    costs = [{"step": "fit", "device": "cuda", "began": 100.0, "ended": 120.0},
             {"step": "rules", "device": "cuda", "began": 110.0, "ended": 130.0},
             {"step": "judge", "device": "cuda", "began": 400.0, "ended": 760.0},
             {"step": "own", "device": "cpu", "began": 130.0, "ended": 220.0}]  # fmt: skip
    took = [{"group": group, "world": world, "seconds": 1.0 + place}
            for place, group in enumerate(("kinds", "drift")) for world in range(2)]  # fmt: skip
    (runs / "judged" / "took.jsonl").write_text("".join(json.dumps(t) + "\n" for t in took))
    (runs / "chosen.json").write_text(json.dumps(chosen))
    (runs / "plan.json").write_text(json.dumps(plan))
    (runs / "costs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in costs))
    keep_tuned(runs / "rules.json", TUNED_RULES)
    return runs, points


def mean_of(cells: Sequence[Sequence[float]]) -> float:
    return fmean(fmean(own) for own in cells)


def test_figures_are_what_a_slow_count_says(made: tuple[Path, Points]) -> None:
    runs, points = made
    found = figures_of(Results.read(runs))
    learners = [f"both-{seed}" for seed in range(4)] + ["fit-4"]
    harmed = list[bool]()
    for group in (*GROUPS, "own"):
        best = max(mean_of(points[group][spec]) for spec in RIVALS)
        ours = fmean(mean_of(points[group][name]) for name in learners)
        assert found[f"c2_heldout_{group}_rule_points"] == pytest.approx(best)
        assert found[f"c2_heldout_{group}_points"] == pytest.approx(ours)
        assert found[f"c2_heldout_{group}_vs_strongest_rule"] == pytest.approx(ours - best)
        harmed += [net < -0.5 for name in learners for own in points[group][name] for net in own]
    assert found["c2_heldout_harmful_rate"] == pytest.approx(fmean(harmed))
    garden = points["garden"]
    lead = fmean(mean_of(garden[name]) for name in learners) - mean_of(garden["specialist"])
    assert found["c2_garden_vs_specialist"] == pytest.approx(lead)
    for group in GROUPS:
        own = points[group]
        apart = {
            "no_shadows": fmean(mean_of(own[f"no_shadows-{s}"]) - mean_of(own[f"fit-{s}"])
                                for s in range(2)),
            "plots_24": mean_of(own["plots_24-0"]) - mean_of(own["hasty-0"]),
            "no_waiting": mean_of(own["hasty-0"]) - mean_of(own["fit-0"]),
            "ppo_alone": mean_of(own["ppo-0"]) - mean_of(own["both-0"]),
            "fit_alone": fmean(mean_of(own[f"fit-{s}"]) - mean_of(own[f"both-{s}"])
                               for s in range(5)),
            "one_shot": fmean(mean_of(own[f"one_shot-{s}"]) - mean_of(own[learners[s]])
                              for s in range(5)),
        }  # fmt: skip
        for name, value in apart.items():
            assert found[f"c2_ablation_{name}_{group}"] == pytest.approx(value), name
    whole = {name: fmean(mean_of(points[group][name]) for group in GROUPS)
             for name in (*RIVALS, *learners)}  # fmt: skip
    single = max(RIVALS, key=lambda name: whole[name])
    ours = fmean(whole[name] for name in learners)
    assert found["c2_heldout_drawn_vs_best_single_rule"] == pytest.approx(ours - whole[single])
    assert found["c2_heldout_drawn_points"] == pytest.approx(ours)
    assert found["c2_heldout_drawn_rule_points"] == pytest.approx(whole[single])
    hurt = [net < -0.5 for group in GROUPS for own in points[group][single] for net in own]
    assert found["c2_heldout_drawn_rule_harmful_rate"] == pytest.approx(fmean(hurt))
    everywhere = fmean(mean_of(points[group]["ppo-0"]) - mean_of(points[group]["both-0"])
                       for group in GROUPS)  # fmt: skip
    assert found["c2_ablation_ppo_alone_drawn"] == pytest.approx(everywhere)
    numbers = {name: 100 + n for n, name in enumerate([*RIVALS, *learners])}
    factors = fmean((5 + numbers[name]) / 4 for name in learners)
    assert found["c2_heldout_own_flops_factor"] == pytest.approx(factors)
    audition = (5 + numbers["audition"]) / 4
    assert found["c2_heldout_own_flops_factor_audition"] == pytest.approx(audition)
    assert "c2_ablation_no_properties_drift" not in found
    assert found["c2_transfer_gpu_minutes"] == pytest.approx(7.5)  # side by side, none of the CPU
    assert found["c2_transfer_episodes_gap"] == 64


def test_intervals_are_those_of_trainings_and_episodes_drawn_anew(
    made: tuple[Path, Points],
) -> None:
    runs, points = made
    results = Results.read(runs)
    lead = results.lead("kinds")
    rule = np.array(points["kinds"][results.strongest("kinds")])
    ours = np.array([points["kinds"][name] for name in results.learners])
    chance, drawn = np.random.default_rng(3), []
    for _ in range(3000):
        trainings = chance.integers(len(ours), size=len(ours) - 1)
        apart = []
        for world in range(WORLDS):
            cases = chance.integers(CASES, size=CASES - 1)
            apart.append(ours[trainings][:, world, cases].mean() - rule[world, cases].mean())
        drawn.append(np.mean(apart))
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert lead.low == pytest.approx(low, abs=0.12)
    assert lead.high == pytest.approx(high, abs=0.12)
    assert lead == Results.read(runs).lead("kinds")  # to the bit, whenever it is made


def test_other_worlds_like_these_are_less_sure_than_these(made: tuple[Path, Points]) -> None:
    results = Results.read(made[0])
    ours, rule = results.over_all(results.learners), results.over_all([results.best_single])[0]
    chance, drawn = np.random.default_rng(4), []
    trainings, worlds, cases = ours.shape
    for _ in range(3000):
        chosen = chance.integers(trainings, size=trainings - 1)
        some = [chance.integers(cases, size=cases - 1) for _ in range(worlds)]
        drawn.append(np.mean([
            ours[chosen][:, world, some[world]].mean() - rule[world, some[world]].mean()
            for world in chance.integers(worlds, size=worlds - 1)
        ]))  # fmt: skip
    found, here = (lead(results.best_single)
                   for lead in (results.lead_elsewhere, results.lead_over_all))  # fmt: skip
    assert [found.low, found.high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.06)
    assert found.value == pytest.approx(here.value)
    assert found.high - found.low > here.high - here.low


def test_the_page_tells_what_was_judged_in_each_group_at_what_cost(
    made: tuple[Path, Points], tmp_path: Path
) -> None:
    write_report(made[0], None, tmp_path)
    page = (tmp_path / "transfer.md").read_text()
    # Six minutes of judging: two worlds of one second each, and two of two.
    assert "| of all judging, `kinds` | GPU | 2.0 |" in page
    assert "| of all judging, `drift` | GPU | 4.0 |" in page
    assert "| PPO without a fit, against both | 1 |" in page
    assert "| one seed an episode, against any number | 5 |" in page
    took = made[0] / "judged" / "took.jsonl"
    text = took.read_text()
    took.write_text(text + '{"group": "dri')  # cut off
    assert Results.read(made[0]).took == {
        "kinds": pytest.approx(1 / 3),
        "drift": pytest.approx(2 / 3),
    }
    took.write_text(text.replace("1.0", "0.0").replace("2.0", "0.0"))  # all were there before
    assert Results.read(made[0]).took == {}


def test_a_packed_study_gives_the_same_figures(made: tuple[Path, Points], tmp_path: Path) -> None:
    runs, _ = made
    pack(runs, tmp_path / "packed.tar.xz")
    one = write_report(runs, tmp_path / "figures.json", None)
    assert write_report(tmp_path / "packed.tar.xz", None, None) == one
    assert json.loads((tmp_path / "figures.json").read_text()) == one
    with opened(tmp_path / "packed.tar.xz") as folder:
        assert "each" not in json.loads((folder / "own" / "two" / "never-21-0.json").read_text())


def test_groups_that_somebody_has_not_played_are_left_out_and_named(
    made: tuple[Path, Points], tmp_path: Path
) -> None:
    runs, points = made
    last = {name: own[2] for name, own in points["sizes"].items() if name != SPECS["race"]}
    played(runs / "judged" / "sizes-002.jsonl", last)
    (runs / "judged" / "lesions-001.jsonl").unlink()  # nobody played it
    (runs / "own" / "two" / "never-21-0.json").unlink()
    results = Results.read(runs)
    assert results.missing == ["sizes", "lesions", "own"]
    assert "c2_heldout_sizes_points" not in figures_of(results)
    write_report(runs, None, tmp_path)
    page = (tmp_path / "transfer.md").read_text()
    assert "Not judged to the end: `sizes`, `lesions`, `own`" in page


def test_two_controllers_of_one_name_are_not_mixed(made: tuple[Path, Points]) -> None:
    file = made[0] / "judged" / "drift-001.jsonl"
    file.write_text(file.read_text().replace('"made": "both-1"', '"made": "another"'))
    with pytest.raises(DataError, match="both-1"):
        Results.read(made[0])


def test_what_is_published_leaves_other_figures_alone(
    made: tuple[Path, Points], tmp_path: Path
) -> None:
    docs, kept = tmp_path / "docs", tmp_path / "kept"
    docs.mkdir()
    kept.mkdir()
    (docs / "evidence.json").write_text('{"c1_seeds": 6, "c2_heldout_harmful_rate": 9}')
    write_docs(made[0], docs, kept)
    found = json.loads((docs / "evidence.json").read_text())
    assert found["c1_seeds"] == 6
    assert found == {"c1_seeds": 6} | figures_of(Results.read(made[0]))
    assert json.loads((kept / "rules.json").read_text())["race"]["spec"] == SPECS["race"]
    page = (docs / "transfer.md").read_text()
    for group in (*GROUPS, "own"):
        assert f"| `{group}` |" in page
    assert page.count("**reached**") + page.count("**not reached**") == 4
    assert (docs / "transfer.png").read_bytes().startswith(b"\x89PNG")
    plan = json.loads((made[0] / "plan.json").read_text()) | {"groups": ["validation"]}
    (made[0] / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(DataError, match="registered groups"):
        write_docs(made[0], docs, kept)


# --- measured gains -------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [(), ("gains-seed2-0.npz.xz",), ("moments-seed30.npz.xz",)])
def test_fit_without_measured_gains_is_refused(tmp_path: Path, files: Sequence[str]) -> None:
    gains = tmp_path / "gains"
    gains.mkdir()
    for name in files:
        (gains / name).touch()
    with pytest.raises(DataError, match=r"--gains FOLDER.*docs/greenhouse\.md"):
        run("run", "--out", tmp_path / "study", "--steps", "fit", "--gains", gains)


def test_fit_reads_the_gains_of_the_named_folder(tmp_path: Path) -> None:
    for name in ("gains-seed2-0.npz.xz", "gains-seed7-0.npz.xz", "moments-seed30.npz.xz"):
        (tmp_path / name).touch()
    study = Study(tmp_path / "study", SIZES["gpu"], gains=tmp_path)
    hasty, waiting, *_ = (tasks[0] for tasks in study.tasks("fit"))
    study.require_gains([hasty, waiting])
    assert str(tmp_path / "gains-seed2-0.npz.xz") in hasty.words
    assert str(tmp_path / "gains-seed7-0.npz.xz") in hasty.words
    assert str(tmp_path / "moments-seed30.npz.xz") in waiting.words
    fewer = study.lacking["plots_24-0"]
    few_plots = study._fit("plots_24-0", fewer)
    assert str(tmp_path / "gains-seed7-0.npz.xz") not in few_plots.words


# --- rules ----------------------------------------------------------------------------------------


def test_every_rule_has_as_many_candidates_as_the_others() -> None:
    heats = SIZES["gpu"].heats
    assert {len(heats.specs(kind)) for kind in RULES} == {36}
    assert all(kind_of(spec) == kind for kind in RULES for spec in heats.specs(kind))
    assert len({heats.episodes(kind) for kind in RULES}) == 1


def test_of_the_finalists_the_best_over_both_heats_is_taken(tmp_path: Path) -> None:
    heats = Heats(worlds=(2, 1), cases=2, finalists=2, candidates=3)
    first, second, third = heats.specs("gap")
    worth = {first: (1.0, 9.0), second: (3.0, 1.0), third: (2.0, 4.0)}  # in each heat
    for world in range(3):
        ours = {spec: [worth[spec][world == 2]] * 2 for spec in (first, second, third)
                if world < 2 or spec != first}  # fmt: skip
        for kind in RULES:
            if kind != "gap":
                ours |= {spec: [0.0, 0.0] for spec in heats.specs(kind)[: 3 if world < 2 else 2]}
        played(tmp_path / f"training-{world:03d}.jsonl", ours)
    assert [spec for spec in finalists(tmp_path, heats) if "gap" in spec] == [second, third]
    best = tuned(tmp_path, heats)["gap"]
    assert best.spec == third
    assert best.mean == pytest.approx((2 * 2.0 + 4.0) / 3)
    assert best.episodes == heats.episodes("gap") == 16
    assert [(spec, count) for spec, _, count in best.log] == [(first, 4), (second, 6), (third, 6)]


# --- the whole study ------------------------------------------------------------------------------


def test_a_tiny_study_runs_to_its_end_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", 1)
    for name in ("VALIDATION_SAMPLES", "TEST_SAMPLES"):
        monkeypatch.setattr(f"esper.garden.contexts.{name}", 50)
    monkeypatch.setattr("esper.garden.episodes._loaded", Source.load)  # others keep their samples
    monkeypatch.setattr(greenhouse_gains, "PLOTS_OF_PART", 1)
    out = tmp_path / "study"
    run("run", "--size", "tiny", "--out", out)
    assert "Not finished" not in capsys.readouterr().out
    figures = json.loads((out / "figures.json").read_text())
    wanted = ("c2_heldout_validation_vs_strongest_rule", "c2_garden_vs_specialist_lo",
              "c2_ablation_no_shadows_validation", "c2_ablation_plots_1_validation")  # fmt: skip
    assert set(wanted) < set(figures)
    assert (out / "transfer.md").is_file()
    costs = [json.loads(line)["step"] for line in (out / "costs.jsonl").read_text().splitlines()]
    before = {path: path.stat().st_mtime_ns for path in out.glob("judged/*.jsonl")}
    run("run", "--size", "tiny", "--out", out)
    assert {path: path.stat().st_mtime_ns for path in out.glob("judged/*.jsonl")} == before
    assert len((out / "costs.jsonl").read_text().splitlines()) == len(costs)
    tried = {net.controller for net in read_judged(out / "validated", "validation")}
    assert tried == {"fit-0", "both-0", "wary-0"}
    names = {net.controller for net in read_judged(out / "judged", "validation")}
    lacking = {"hasty-0", "no_shadows-0", "no_properties-0", "one_shot-0", "plots_1-0"}
    assert {"fit-0", "both-0", *lacking} < names


def test_a_training_is_reported_with_the_candidate_that_gains_most_without_much_harm(
    tmp_path: Path,
) -> None:
    gains = {"fit-0": 4.0, "both-0": 3.0, "wary-0": 3.5, "fit-1": 4.0, "both-1": 5.0,
             "wary-1": 3.5, "fit-2": 4.0, "both-2": 5.0, "wary-2": 3.5}  # fmt: skip
    harmed = dict(zip(gains, (9, 9, 8, 0, 8, 0, 10, 20, 16), strict=True))  # of 200: 4 % are 8
    ours = {name: [gain] * (200 - harmed[name]) + [-1.0] * harmed[name]
            for name, gain in gains.items()}  # fmt: skip
    study = Study(tmp_path, replace(SIZES["tiny"], trainings=3, both=3))
    for number, name in enumerate(study.candidates):
        torch.manual_seed(number)
        save_controller(TokenActorCritic(), study.folder(name), None, {})
    made = {name: load_saved(study.folder(name)).controller(name).fingerprint
            for name in study.candidates}  # fmt: skip
    played(tmp_path / "validated" / "validation-000.jsonl", ours, made)
    of_before = {name: [99.0] * 200 for name in gains}  # by controllers that are not there any more
    played(tmp_path / "validated" / "validation-001.jsonl", of_before)
    study._choose()
    assert study.learners == ["wary-0", "both-1", "fit-2"]


def test_who_is_wary_plants_what_the_fit_would_but_less_readily(tmp_path: Path) -> None:
    study = Study(tmp_path, SIZES["tiny"])
    save_controller(TokenActorCritic(), study.folder("fit-0"), None, {})
    study._keep_wary()
    fit, wary = (load_saved(study.folder(name)).network for name in ("fit-0", "wary-0"))
    seen = torch.rand(3, fit.state_dim, generator=torch.Generator().manual_seed(0))
    theirs, ours = (network(seen).logits for network in (fit, wary))
    less = torch.zeros(len(LifecycleOp))
    less[LifecycleOp.GERMINATE] = RESERVE
    torch.testing.assert_close(theirs["op"] - ours["op"], less.expand(3, -1))
    for head in ("slot", "blueprint", "blend"):
        assert torch.equal(theirs[head], ours[head])
    before = study.folder("wary-0").stat().st_mtime_ns
    study._keep_wary()
    assert study.folder("wary-0").stat().st_mtime_ns == before


def test_time_that_is_up_ends_a_study_before_its_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("run", "--size", "tiny", "--out", tmp_path, "--seconds", "1e-9")
    assert "Not finished: collect" in capsys.readouterr().out
    assert not (tmp_path / "gains").exists()


def test_held_out_groups_need_a_word_of_their_own(tmp_path: Path) -> None:
    learned = {"fit-0": {"fit-0": [1.0, 0.02]}}
    (tmp_path / "chosen.json").write_text(json.dumps(learned))
    keep_tuned(tmp_path / "rules.json", TUNED_RULES)
    for step in ("judge", "own"):
        with pytest.raises(SystemExit, match="held out"):
            run("run", "--size", "gpu", "--out", tmp_path, "--steps", step)
    study = Study(tmp_path, SIZES["gpu"], final=True)
    for step in ("judge", "own"):
        assert "--final" in next(study.tasks(step))[0].words


def test_the_training_in_the_box_is_the_one_that_did_best_where_nothing_is_held_out(
    made: tuple[Path, Points], tmp_path: Path
) -> None:
    runs, _ = made
    chosen = json.loads((runs / "chosen.json").read_text())
    chosen["both-2"] = {"both-2": [1.5, 0.04], "fit-2": [9.0, 0.2]}  # the other was not chosen
    (runs / "chosen.json").write_text(json.dumps(chosen))
    for seed in range(4):
        torch.manual_seed(seed)
        save_controller(TokenActorCritic(), runs / f"both-{seed}" / "last", None, {"seed": seed})
    target = tmp_path / "tamiyo"
    assert box(runs, target) == "both-2"
    kept = load_saved(target)
    assert (
        kept.controller().fingerprint == load_saved(runs / "both-2/last").controller().fingerprint
    )
    assert kept.card["validation"] == {"net_points": 1.5, "harmful_rate": 0.04}
    figures = figures_of(Results.read(runs))
    for name in ("c2_heldout_drift_vs_strongest_rule_lo", "c2_heldout_harmful_rate"):
        assert kept.card["evidence"][name] == figures[name]
    assert not any("episodes" in name for name in kept.card["evidence"])
