"""The study of growing: fair searches, figures of known results, a run in seconds."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import esper

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the study."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import growing
    import growing_figures
    import growing_jobs
    import growing_page
    import growing_pools
    import growing_replay
    import growing_tasks
    import growing_tuning

    return SimpleNamespace(
        main=growing.main,
        figures=growing_figures,
        jobs=growing_jobs,
        page=growing_page,
        pools=growing_pools,
        replay=growing_replay,
        tasks=growing_tasks,
        tuning=growing_tuning,
    )


# --- trainings -----------------------------------------------------------------------------------


def test_a_quick_study_trains_everything_once_and_says_what_came_out(
    growing: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in (growing.jobs, growing.figures):
        monkeypatch.setattr(module, "OWN_RATES", (1.0,))
    monkeypatch.setattr(growing.jobs, "RATES", (1e-3,))
    study = growing.jobs.Study(tmp_path, quick=True)
    with ThreadPoolExecutor(1) as pool:
        growing.jobs.carry_out_all(study, ["mnist1d_mlp"], pool, 1)
    assert "8 jobs done, 0 of them failed, 0 can be done next" in capsys.readouterr().out
    assert sum(study.count("mnist1d_mlp").values()) == 8
    monkeypatch.setattr(growing.jobs, "carry_out", lambda *_: pytest.fail("trained again"))
    words = ["growing.py", "--quick", "--runs", str(tmp_path), "--report"]
    monkeypatch.setattr(sys, "argv", [*words, "--json", str(tmp_path / "figures.json")])
    growing.main()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert "default_minus_never_mnist1d_mlp" in figures
    kept = study.found(growing.jobs.Job("mnist1d_mlp", "candidate", 0, 1))
    assert kept["grown"] == ["gate at 0"]
    assert len(kept["curve"]) == len(kept["flops"]) == 13
    host = study.found(growing.jobs.Job("mnist1d_mlp", "never", 0))
    assert host["params"] < kept["params"] <= 1.25 * host["params"]
    right = growing.jobs.unpacked_numbers(host["each"], exact=True, count=64)
    assert 100.0 * right.mean() == pytest.approx(host["test"])


def test_a_training_that_diverges_counts_as_knowing_nothing(growing: SimpleNamespace) -> None:
    task = growing.tasks.TASKS["friedman_small"].quick()
    model, data = growing.jobs.newborn(task, 0), task.data(0)
    run, outcome = growing.jobs.train(task, data, model, 0, 1e12, budget=None, controller="never")
    assert run is None
    assert outcome["test"] == outcome["validation"] == 0.0


def test_a_wider_host_is_about_as_large_as_wanted(growing: SimpleNamespace) -> None:
    def size(task: Any, factor: float) -> int:
        return sum(parameter.numel() for parameter in task.build(factor).parameters())

    for task in growing.tasks.TASKS.values():
        wanted = 1.12 * size(task, 1.0)
        found = size(task, growing.jobs.wider(task, wanted))
        assert found == pytest.approx(wanted, rel=0.06), task.name


def test_numbers_of_samples_come_back_as_they_were(growing: SimpleNamespace) -> None:
    right = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    text = growing.jobs.packed_numbers(right, exact=True)
    found = growing.jobs.unpacked_numbers(text, exact=True, count=11)
    assert found.tolist() == right.tolist()
    losses = torch.tensor([0.25, 3.5, 17.0])
    text = growing.jobs.packed_numbers(losses, exact=False)
    found = growing.jobs.unpacked_numbers(text, exact=False, count=3)
    assert found.tolist() == losses.tolist()


# --- tasks ---------------------------------------------------------------------------------------


def test_every_host_has_candidates_within_the_budget(
    growing: SimpleNamespace, tmp_path: Path
) -> None:
    study = growing.jobs.Study(tmp_path)
    for task in growing.tasks.TASKS.values():
        candidates = study.candidates(task.name)
        size = sum(parameter.numel() for parameter in task.build(1.0).parameters())
        assert len(set(candidates)) == len(candidates) >= 8, task.name
        assert all(0 < each.params <= 0.25 * size for each in candidates), task.name


def test_tags_say_what_the_page_says_of_them(growing: SimpleNamespace) -> None:
    few = {"train": 3, "validation": 2, "test": 2}
    tokens, tags = growing.tasks.TASKS["tags_conv"].load(5, few, None)["train"]
    for line, labels in zip(tokens.tolist(), tags.tolist(), strict=True):
        for place, (token, tag) in enumerate(zip(line, labels, strict=True)):
            seen = token in line[:place]
            more = place > 0 and token > line[place - 1]
            assert tag == 2 * seen + more


def test_a_second_pool_of_text_has_other_files(
    growing: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tuple((f"{number}.py", b"x" * 40) for number in range(6))
    whole = growing.pools.Corpus(title="text", files=files, sha256="0")
    monkeypatch.setattr(growing.pools, "read_corpus", lambda: whole)
    monkeypatch.setattr(growing.pools, "POOLED_BYTES", 100)
    growing.pools.text_pool.cache_clear()
    pools = [growing.pools.text_pool(None, number).files for number in (0, 1)]
    growing.pools.text_pool.cache_clear()
    assert [len(pool) for pool in pools] == [2, 2]
    assert not set(pools[0]) & set(pools[1])


def test_generated_samples_fit_their_hosts_and_are_others_for_other_seeds(
    growing: SimpleNamespace,
) -> None:
    few = {"train": 8, "validation": 4, "test": 4}
    generated = [
        task
        for tasks in ("MORE_DEVELOPMENT", "SECOND_TASKS", "THIRD_TASKS")
        for task in getattr(growing.tasks, tasks)
        if getattr(task.load, "func", None) not in (growing.pools.clothes, growing.pools.text)
    ]
    assert len(generated) >= 32
    for task in generated:
        inputs, targets = task.load(1, few, None)["train"]
        assert inputs.shape[1:] == task.example().shape[1:], task.name
        outputs = task.build(1.0)(inputs)
        if task.loss == "mse":
            assert outputs.shape == targets.shape, task.name
        else:
            assert outputs.shape[:-1] == targets.shape, task.name
            assert 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[-1], task.name
        again, other = (task.load(seed, few, None)["train"][0] for seed in (1, 2))
        assert torch.equal(inputs, again), task.name
        assert not torch.equal(inputs, other), task.name


def test_tags_of_brackets_repeats_and_records_follow_their_rules(growing: SimpleNamespace) -> None:
    few = {"train": 3, "validation": 2, "test": 2}
    rules = {
        name: growing.tasks.TASKS[name] for name in ("brackets_conv", "repeats_gpt", "records_gpt")
    }
    lines = {
        name: list(zip(*(part.tolist() for part in task.load(5, few, None)["train"]), strict=True))
        for name, task in rules.items()
    }
    for line, tags in lines["brackets_conv"]:
        depth = 0
        for token, tag in zip(line, tags, strict=True):
            depth = max(0, depth + {0: 1, 1: -1}.get(token, 0))
            assert tag == min(depth, 3)
    for line, tags in lines["repeats_gpt"]:
        for place, (token, tag) in enumerate(zip(line, tags, strict=True)):
            again = place >= 3 and line[place - 3] == token
            assert tag == 2 * again + line[:place].count(token) % 2
    for line, tags in lines["records_gpt"]:
        for place, (token, tag) in enumerate(zip(line, tags, strict=True)):
            alike = place >= 2 and token % 2 == line[place - 2] % 2
            assert tag == 2 * all(token > other for other in line[:place]) + alike


def test_tags_of_guests_and_followers_follow_their_rules(growing: SimpleNamespace) -> None:
    few = {"train": 3, "validation": 2, "test": 2}
    for name in ("guests_apart", "followed_gpt"):
        tokens, tags = growing.tasks.TASKS[name].load(5, few, None)["train"]
        for line, labels in zip(tokens.tolist(), tags.tolist(), strict=True):
            for place, (token, tag) in enumerate(zip(line, labels, strict=True)):
                if name == "guests_apart":
                    more = place > 0 and token > line[place - 1]
                    assert tag == 2 * (token == line[0]) + more
                else:
                    before = [other for other in range(place) if line[other] == token]
                    assert tag == (line[before[-1] + 1] % 4 if before else 0)


def test_targets_of_regressions_are_scaled_by_what_is_trained_on(growing: SimpleNamespace) -> None:
    for name in ("friedman_small", "arm"):
        task = growing.tasks.TASKS[name]
        data = task.data(3)
        targets = data["train"][1]
        assert float(targets.mean()) == pytest.approx(0.0, abs=1e-5)
        assert float(targets.std()) == pytest.approx(1.0, rel=1e-5)
        assert len(data["test"][0]) == task.samples["test"]
        assert not torch.equal(data["test"][1], task.data(4)["test"][1])


def test_what_was_packed_is_what_would_be_read_here(
    growing: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(esper.__file__).parent
    corpus = growing.pools.read_corpus
    monkeypatch.setattr(growing.pools, "read_corpus", lambda: corpus(here))
    images = torch.arange(24, dtype=torch.uint8)
    clothes = {"images": images.view(3, 1, 2, 4), "labels": images[:3]}
    pool = growing.pools.clothes_pool
    monkeypatch.setattr(growing.pools, "clothes_pool", lambda packed, pool: clothes)
    growing.pools.text_pool.cache_clear()
    growing.pools.pack(tmp_path)
    packed = growing.pools.text_pool(tmp_path)
    assert packed == growing.pools.text_pool(None)
    assert packed.size <= growing.pools.POOLED_BYTES
    growing.pools.text_pool.cache_clear()
    for number in (growing.pools.FIRST, growing.pools.SECOND):
        found = pool(tmp_path, number)
        assert all(torch.equal(found[name], tensor) for name, tensor in clothes.items())


def test_data_that_are_not_there_are_answered_with_the_command_that_gets_them(
    growing: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ESPER_DATA", raising=False)
    lost = dataclasses.replace(growing.pools.FASHION_MNIST, packaged=tmp_path)
    monkeypatch.setattr(growing.pools, "FASHION_MNIST", lost)
    growing.pools.clothes_pool.cache_clear()
    words = ["growing.py", "--plan", "--quick", "--tasks", "fashion_small"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match=r"apt-get install .*dataset-fashion-mnist"):
        growing.main()


# --- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("freedom", "limit"), [(1, 12.706), (4, 2.776), (11, 2.201), (60, 2.0)])
def test_students_quantiles_are_those_of_tables(
    growing: SimpleNamespace, freedom: int, limit: float
) -> None:
    assert growing.figures.t_quantile(freedom) == pytest.approx(limit, abs=6e-4)


def test_a_ranking_is_judged_by_what_its_first_ones_gain(growing: SimpleNamespace) -> None:
    gains = np.asarray([1.0, 4.0, 2.0, 3.0])
    good = growing.figures.Ranking.of([10, 40, 20, 30], gains)
    assert (good.spearman, good.top1, good.top3) == pytest.approx((1.0, 1.0, 1.0))
    poor = growing.figures.Ranking.of([40, 10, 20, 30], gains)
    assert (poor.top1, poor.top3) == pytest.approx((0.25, 0.75))
    assert poor.spearman == pytest.approx(-0.8)
    assert math.isnan(growing.figures.Ranking.of([1, 2], np.asarray([-1.0, -2.0])).top1)


def write_study(jobs: ModuleType, tasks: ModuleType, folder: Path, name: str) -> Any:
    """A study of one task as if it were trained: never 50, the best candidate 60 points."""
    study = jobs.Study(folder)
    task = tasks.TASKS[name]

    def write(job: Any, score: float, right: int, **more: Any) -> None:
        each = torch.zeros(task.samples["test"], dtype=torch.float64)
        each[:right] = 1.0
        outcome = {
            "rate": 0.01,
            "params": 100,
            "validation": score,
            "test": score + 0.01 * job.seed,
            "curve": [score - 1.0, score],
            "each": jobs.packed_numbers(each, exact=True),
            "flops": [10.0, 10.0],
            "shadow_flops": [0.0, 0.0],
            "grown": [],
            "seconds": 1.0,
            "machine": "a machine",
        }
        path = folder / job.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(outcome | more))

    heard = [  # the best candidate is not certain, but nearly so; the first is not heard
        {"slot": each.place, "blueprint": each.blueprint, "error": 0.1, "gradient": -number}
        | {"gain": 1.0 if number == 5 else 0.9 if number == 3 else 0.0}
        for number, each in enumerate(study.candidates(name))
        if number
    ]

    def by_kind(job: Any) -> tuple[float, int, dict[str, Any]]:
        if job.kind == "candidate":
            return (60.0 if job.detail == 3 else 40.0), 50, {}
        if job.kind == "default":
            scratch = [{"validation": v, "test": v, "rate": v, "params": 1} for v in (1, 9, 2)]
            more = {"scratch": scratch, "shadow_flops": [10.0, 0.0]}
            return 58.0, 0 if job.seed == 0 else 50, more  # harm on the first seed
        if job.kind == "audit":
            verdicts = {"nothing to gain": 7} | ({"missing here": 1} if job.seed == 0 else {})
            return 50.0, 50, {"shadows": [[], *[heard] * 5, []], "verdicts": verdicts}
        return {"wider": 55.0, "race": 51.0, "tune": 10.0 + job.detail}.get(job.kind, 50.0), 50, {}

    for _ in range(3):  # every time with what waits for the last one
        for job in list(study.jobs(name)):
            score, right, more = by_kind(job)
            write(job, score, right, **more)
    return study


def test_tasks_that_learn_the_same_data_count_as_one_from_the_third_set_on(
    growing: SimpleNamespace,
) -> None:
    def over(*values: tuple[str, float]) -> Any:
        tasks = growing.tasks.TASKS
        return growing.figures.over_tasks([(tasks[name], value) for name, value in values])

    twins = over(("hums_mlp", 1.0), ("hums_mlp_large", 3.0), ("beam", 4.0), ("rails_cnn", 6.0))
    assert twins == growing.figures.t_interval([2.0, 4.0, 6.0])
    assert over(("hums_mlp", 1.0), ("hums_mlp_large", 3.0)).high == math.inf
    for pair in (("melodies_mlp", "melodies_conv"), ("friedman_small", "friedman_large")):
        found = over((pair[0], 1.0), (pair[1], 3.0))  # as the first two sets were published
        assert found == growing.figures.t_interval([1.0, 3.0])
    names = growing.tasks.tasks_for("report 3")
    assert len({growing.tasks.TASKS[name].load for name in names}) == len(names) - 4


def test_a_report_of_nothing_is_refused_and_writes_nothing(
    growing: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = dict.fromkeys((1, 2, 3), tmp_path / "page.md")
    monkeypatch.setattr(sys.modules["growing"], "PAGES", pages)
    figures = str(tmp_path / "figures.json")
    words = ["growing.py", "--runs", str(tmp_path), "--report", "--json", figures]
    for more in ([], ["--write"], ["--write", "--set", "2"]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit, match="is trained to the end, so nothing was written"):
            growing.main()
    assert not list(tmp_path.iterdir())


def test_figures_of_known_results(
    growing: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing.figures, "optuna_here", lambda: None)
    study = write_study(growing.jobs, growing.tasks, tmp_path, "digits_mlp")
    assert study.rate("digits_mlp") == max(growing.tasks.RATES)
    results = growing.figures.read_results(study, "report 1")
    found = growing.figures.figures(results)
    count = len(results[0].candidates)
    wanted = {
        "share_of_best_place": 0.8,
        "audits_missing_right": 1.0,
        "audits_nothing_to_gain": 1,
        "audits_nothing_to_gain_right": 0.0,
        "harm_rate": 0.2,
        "cost_factor": 1.5,
        "default_minus_never_digits_mlp": 8.0,
        "default_minus_never_digits_mlp_lo": 8.0,
        "vs_random_place": 58.0 - (60.0 + 40.0 * (count - 1)) / count,
        "vs_race": 7.0,
        "vs_wider": 3.0,
        "tasks_clearly_better": 1,
        "tasks_clearly_worse": 0,
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert results[0].scores["scratch"].tolist() == [9.0] * 5
    assert "vs_optuna" not in found


def test_rankings_compare_what_was_heard_with_what_was_gained(
    growing: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing.figures, "optuna_here", lambda: None)
    study = write_study(growing.jobs, growing.tasks, tmp_path, "digits_mlp")
    found = growing.figures.read_results(study, "report 1")[0].rankings()
    assert found.keys() == {"parameters", "shadows, 1", "shadows, 3", "shadows, 5", "gradient"}
    assert len(found["gradient"]) == 2  # seeds
    shares = [(each.top1, each.top3) for each in found["shadows, 3"]]
    assert shares == [pytest.approx((-1.0, 1.0))] * 2  # the first loses 10 points, the next wins
    assert found["gradient"][0].top3 == pytest.approx(1.0)


def test_what_shadows_cost_is_in_units_of_the_hosts_epoch(growing: SimpleNamespace) -> None:
    history = [{"flops": 60.0}, {"flops": 60.0, "shadow_cost": 0.5}, {"flops": 80.0}]
    assert growing.jobs.shadow_flops(history) == pytest.approx([0.0, 30.0, 0.0])


def test_the_page_holds_every_task_and_what_came_out(
    growing: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (growing.figures, growing.page):
        monkeypatch.setattr(module, "optuna_here", lambda: None)
    study = write_study(growing.jobs, growing.tasks, tmp_path, "digits_mlp")
    results = growing.figures.read_results(study, "report 1")
    text = growing.page.page(study, results)
    for name, task in growing.tasks.TASKS.items():
        never_grown = ", never grown" if task.group == "report 2" else ""
        assert f"| `{name}` | {task.group}{never_grown} |" in text
    assert "is said by [the third set](growing-third.md)" in text
    assert "| `share_of_best_place` | 0.80" in text
    assert "| `harm_rate` | 0.20 | < 0.1: not reached |" in text
    assert "Optuna is not installed" in text
    assert "With caution" not in text
    assert len(growing.page.draw_gains(results)) > 10_000
    third = growing.page.own_page(3, results)
    assert third.startswith("# The third set of tasks")
    assert "--set 3 --runs DIR --report --json docs/growing-third.json --write" in third


def test_the_page_warns_of_a_task_whose_bare_host_fails(
    growing: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing.figures, "optuna_here", lambda: None)
    study = write_study(growing.jobs, growing.tasks, tmp_path, "digits_mlp")
    for kind, seed, detail in (("never", 0, 0), ("default", 0, 1), ("default", 3, 1)):
        path = tmp_path / growing.jobs.Job("digits_mlp", kind, seed, detail).file
        path.write_text(json.dumps(json.loads(path.read_text()) | {"test": 2.0, "rate": 0.3}))
    growing.jobs._read.cache_clear()
    text = growing.page.cautions(growing.figures.read_results(study, "report 1"))
    assert "fails on 1 of 5 (test scores 2.0, 50.0, 50.0, 50.0, 50.0)" in text
    assert "The default fails on 2 (2.0, 58.0, 58.0, 2.0, 58.0), among them 1 where" in text


# --- tuning --------------------------------------------------------------------------------------


def test_a_rate_at_which_some_hosts_fail_is_chosen_by_the_mean_alone_only_where_registered_so(
    growing: SimpleNamespace, tmp_path: Path
) -> None:
    study = growing.jobs.Study(tmp_path)
    scores = {1e-2: (70.0, 70.0, 71.0), 1e-1: (60.0, 80.0, 80.0)}  # the mean of the second is more
    for name in ("digits_mlp", "plane"):
        for rate, jobs in zip(growing.tasks.RATES, study.tuning(name), strict=True):
            for job, score in zip(jobs, scores.get(rate, (0.0,) * 3), strict=True):
                path = tmp_path / job.file
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps({"validation": score}))
    assert study.rate("digits_mlp") == 1e-1
    assert study.rate("plane") == 1e-2


def test_variants_are_trained_once_and_compared_with_never_and_the_best_place(
    growing: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(growing.jobs, "RATES", (1e-2,))
    file = tmp_path / "variants"
    file.write_text("# some rules\nnever # as a check\nfixed:slot=3,blueprint=mlp,epoch=1\n")
    variants = growing.tuning.read_variants(file)
    study = growing.tuning.Tuning(tmp_path, None, True, variants, True)
    with ThreadPoolExecutor(1) as pool:
        growing.jobs.carry_out_all(study, ["plane"], pool, 1, kinds=growing.tuning.KINDS)
    assert "6 jobs done, 0 of them failed, 0 can be done next" in capsys.readouterr().out
    best = growing.tuning.ceiling(study, "plane")
    same, other = (growing.tuning.tried(study, "plane", each, best) for each in variants)
    assert (same.gain, same.harm, same.cost) == (0.0, 0.0, 1.0)
    assert other.cost > 1.0
    changed = dataclasses.replace(study, variants=(variants[0] + ", after a change",))
    waiting = growing.jobs.waiting(changed, ["plane"], growing.tuning.KINDS, set())
    assert [job.kind for job in waiting] == ["variant"]
    assert changed.controller(waiting[0]) == "never"
    table = growing.tuning.tables(study, ["plane", "forms"])
    assert "0: never # as a check" in table
    assert "forms (no rate yet)" in table


# --- what Optuna would have found ---------------------------------------------------------------


def trainings(growing: SimpleNamespace) -> Any:
    """Of six candidates, the fifth of which is the best."""
    places = [("a", "norm"), ("a", "mlp"), ("b", "norm"), ("b", "mlp"), ("c", "norm"), ("c", "mlp")]
    candidates = [growing.tasks.Candidate(place, blueprint, 1) for place, blueprint in places]
    final = np.asarray([10.0, 20.0, 30.0, 40.0, 90.0, 50.0])
    curves = final[:, None] * np.linspace(0.5, 1.0, 6)
    return growing.replay.Trainings(candidates, curves, np.ones((6, 6)), final)


def test_a_search_with_much_to_spend_finds_the_best_and_with_little_its_first(
    growing: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    optuna = pytest.importorskip("optuna")
    monkeypatch.setattr(growing.replay, "SAMPLERS", 5)
    little, much = growing.replay.searched(optuna, trainings(growing), [6.0, 150.0])
    assert much == pytest.approx(90.0)
    assert 10.0 < little < 70.0


def test_what_a_search_answers_is_what_it_had_finished_in_time(growing: SimpleNamespace) -> None:
    best: Callable[..., float] = growing.replay._best_within
    finished = [(5.0, 30.0, 1.0), (9.0, 40.0, 2.0), (15.0, 90.0, 3.0)]
    assert best(finished, 10.0) == 2.0
    assert best(finished, 15.0) == 3.0
    assert best(finished, 1.0) == 1.0  # the first, whatever it cost


def test_models_read_the_data_of_the_tasks_that_are_registered_as_ones_own(
    growing: SimpleNamespace,
) -> None:
    from own_tasks import OWN_TASKS

    assert len({task.name for task in OWN_TASKS}) == 6
    for task in OWN_TASKS:
        data = task.quick().data(growing.tasks.SEEDS["own"][0])
        inputs, targets = data["train"]
        outputs = task.build(1.0)(inputs)
        assert len(outputs) == len(targets)
        if not targets.is_floating_point():
            assert int(targets.max()) < outputs.shape[-1]
        assert not torch.equal(inputs[:64], data["validation"][0][:64])
