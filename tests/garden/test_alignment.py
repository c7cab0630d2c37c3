"""The reward ranks scripted controllers as the true objective does, and no exploit gains."""

import pytest

from esper.garden import find_suite
from tests.garden.aligning import EXPLOITS, Aligned, align, scripts
from tests.garden.rank_agreement import rank_agreement, spearman

# Glyphs, gain, labels that are noise, nothing to gain, a lesion and a change of task.
CONTEXTS = ("mnist1d-1000", "gain-2.0", "noise-80", "fixed-0.25", "fixed-narrow-1",
            "mnist1d-to-gain")  # fmt: skip
FEW_CONTEXTS = ("mnist1d-1000", "gain-2.0", "fixed-0.25")
EPISODES = 2
BAR = 0.95

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(FEW_CONTEXTS, id="few contexts"),
        pytest.param(CONTEXTS, id="all contexts", marks=pytest.mark.nightly),
    ],
)
def measured(request: pytest.FixtureRequest) -> Aligned:
    suite = find_suite("garden_mlp")
    contexts = [suite.find(name) for name in request.param]
    return align(contexts, scripts(contexts), EPISODES)


@pytest.mark.parametrize("mode", ["shaped", "simplified"])
def test_dense_returns_rank_controllers_as_their_test_scores_do(
    measured: Aligned, mode: str
) -> None:
    returns = measured.returns[mode].mean((1, 2))
    assert spearman(returns, measured.test.mean((1, 2))) >= BAR
    assert rank_agreement(measured.returns[mode], measured.test).spearman >= BAR


def test_the_sparse_return_is_the_net_score_on_the_same_split(measured: Aligned) -> None:
    # A rollback costs a penalty that no score knows of; without it the two are one.
    earned = measured.returns["sparse"] + measured.punished
    agreement = rank_agreement(earned, measured.validation)
    assert agreement.disagreements == ()
    assert agreement.spearman == pytest.approx(1.0)
    assert agreement.counted >= 40, "most pairs are told apart"


def test_no_exploit_returns_more_than_never_growing(measured: Aligned) -> None:
    for mode, returns in measured.returns.items():
        by_name = dict(zip(measured.names, returns.mean((1, 2)).tolist(), strict=True))
        assert by_name["never"] == pytest.approx(0.0, abs=0.02)
        for name in EXPLOITS:
            assert by_name[name] < by_name["never"] - 0.02, f"{name} in mode {mode}"
        assert by_name["good"] > by_name["never"]
        assert by_name["oracle"] == max(by_name.values())
