"""Ratios, intervals and verdicts of blocks, against the published ablation and against simulation."""

import math
import subprocess
import sys

import numpy as np
import pytest

from speedproof.core.errors import UserError
from speedproof.evidence.statistics import (
    Ratio,
    blocks_that_decide,
    explain,
    judge,
    log_ratio,
    mean_interval,
    mean_rates,
    no_regression,
    ratio_interval,
    verdict,
)

ROPE = (1.268, 1.628, 1.621, 1.270)  # uncached, cached, cached, uncached, million targets/s, as published


def blocks_of(logs):
    """Blocks whose log ratios are exactly `logs`."""
    return [(1.0, math.exp(d), math.exp(d), 1.0) for d in logs]


def simulated(rng, trials, blocks, noise, ratio=1.0):
    """Trials × blocks of four noisy processes each, as (a1, b1, b2, a2)."""
    logs = rng.normal(0.0, noise, (trials, blocks, 4)) + math.log(ratio) * np.array([0, 1, 1, 0])
    return [[tuple(block) for block in trial] for trial in np.exp(logs).tolist()]


def test_the_published_rope_ablation_is_a_point_estimate():
    found = ratio_interval([ROPE])
    assert found.ratio == pytest.approx(1.2801, abs=5e-5)
    assert (found.low, found.high, found.smallest_effect) == (None, None, None)
    assert "point estimate" in str(found)
    assert verdict(found, 1.05) == "inconclusive"


def test_interval_is_students_t():
    logs = [0.10, 0.12, 0.17]
    found = ratio_interval(blocks_of(logs))
    mean, s = sum(logs) / 3, np.std(logs, ddof=1)
    assert found.ratio == pytest.approx(math.exp(mean))
    assert found.deviation == pytest.approx(s)
    # t.975 and t.80 with two degrees of freedom, from printed tables
    assert found.low == pytest.approx(math.exp(mean - 4.302653 * s / math.sqrt(3)), rel=1e-6)
    assert found.high == pytest.approx(math.exp(mean + 4.302653 * s / math.sqrt(3)), rel=1e-6)
    assert found.smallest_effect == pytest.approx(math.expm1((4.302653 + 1.060660) * s / math.sqrt(3)), rel=1e-6)


@pytest.mark.parametrize(("count", "half"), [(3, 0.0248), (4, 0.0159), (6, 0.0105)])
def test_half_width_at_one_percent_process_noise(count, half):
    # Values with a standard deviation of exactly 1 %: d has the noise of one process.
    values = np.linspace(-1, 1, count)
    values *= 0.01 / np.std(values, ddof=1)
    found = mean_interval(values.tolist())
    assert found.high - found.mean == pytest.approx(half, abs=5e-5)


def test_linear_drift_cancels_exactly():
    drift = math.log(1.005)
    order = {"ABBA": "abba", "BAAB": "baab"}
    for slots in order.values():
        rates = {"a": [], "b": []}
        for time, role in enumerate(slots):
            rates[role].append(math.exp(drift * time))
        (a1, a2), (b1, b2) = rates["a"], rates["b"]
        assert log_ratio((a1, b1, b2, a2)) == pytest.approx(0.0, abs=1e-15)


def test_interval_covers_95_percent_of_the_time():
    rng = np.random.default_rng(1)
    for blocks in (3, 6):
        found = [ratio_interval(trial) for trial in simulated(rng, 3000, blocks, 0.02, ratio=1.3)]
        covered = np.mean([r.low <= 1.3 <= r.high for r in found])
        assert covered == pytest.approx(0.95, abs=0.013)


def test_a_gain_at_the_threshold_is_retained_one_time_in_forty():
    rng = np.random.default_rng(2)
    verdicts = [verdict(ratio_interval(t), 1.05) for t in simulated(rng, 4000, 3, 0.02, ratio=1.05)]
    assert np.mean([v == "retain" for v in verdicts]) == pytest.approx(0.025, abs=0.0075)
    assert np.mean([v == "reject" for v in verdicts]) == pytest.approx(0.025, abs=0.0075)


def test_smallest_effect_is_seen_four_times_in_five():
    # The formula t.975 + t.80 is an approximation to the noncentral t that is good from a few blocks on.
    rng = np.random.default_rng(3)
    noise, blocks = 0.01, 8
    effect = math.expm1((2.364624 + 0.896030) * noise / math.sqrt(blocks))
    seen = [ratio_interval(t).low > 1.0 for t in simulated(rng, 4000, blocks, noise, ratio=1 + effect)]
    assert np.mean(seen) == pytest.approx(0.80, abs=0.03)


def test_verdicts_at_the_edges():
    def ratio(low, high, blocks=3):
        return Ratio(math.sqrt(low * high), low, high, blocks, 0.01, 0.01)

    assert verdict(ratio(1.05, 1.2), 1.05) == "retain"
    assert verdict(ratio(1.0499, 1.2), 1.05) == "inconclusive"
    assert verdict(ratio(1.01, 1.05), 1.05) == "inconclusive"
    assert verdict(ratio(1.01, 1.0499), 1.05) == "reject"
    assert verdict(ratio(1.9, 2.1, blocks=2), 1.05) == "inconclusive"


def comparison(logs, asked=None):
    """A comparison whose valid blocks have these log ratios, of `asked` ones."""
    short = asked is not None and len(logs) < asked
    status, reason = ("incomplete", f"{len(logs)} of {asked} blocks are valid (timeout)") if short else ("ok", None)
    return {"blocks": [list(b) for b in blocks_of(logs)], "status": status, "reason": reason}


def test_no_regression_is_the_same_question_lower_down():
    assert no_regression(comparison([0.0, 0.001, -0.001]), 0.98) == "no regression"
    assert no_regression(comparison([-0.1, -0.101, -0.102]), 0.98) == "regression"
    assert no_regression(comparison([-0.02, 0.0, 0.02]), 0.98) == "inconclusive"


def test_a_comparison_that_fell_short_decides_nothing():
    logs = [0.5, 0.501, 0.502]
    assert judge(comparison(logs), 1.05)["verdict"] == "retain"
    short = judge(comparison(logs, asked=4), 1.05)
    assert short["verdict"] == "inconclusive"
    assert "3 of 4 blocks are valid (timeout)" in short["reason"]
    assert short["ratio"] == pytest.approx(math.exp(0.501))
    none = judge(comparison([], asked=3), 1.05)
    assert (none["verdict"], none["ratio"], none["blocks"]) == ("inconclusive", None, 0)


def test_mean_rates_have_the_ratio_as_their_quotient():
    found = {"blocks": [list(ROPE), [2.0, 3.0, 4.0, 2.5]]}
    a, b = mean_rates(found)
    assert b / a == pytest.approx(ratio_interval(found["blocks"]).ratio)
    assert a == pytest.approx((1.268 * 1.270 * 2.0 * 2.5) ** 0.25)
    assert mean_rates({"blocks": []}) == (None, None)


def test_blocks_that_decide_are_the_fewest():
    found = ratio_interval(blocks_of([0.02, 0.08, 0.14]))
    assert verdict(found, 1.05) == "inconclusive"
    needed = blocks_that_decide(found, 1.05)
    # recomputed with scipy's own distribution
    from scipy.stats import t

    distance = abs(math.log(found.ratio / 1.05))

    def visible(n):
        return (t.ppf(0.975, n - 1) + t.ppf(0.80, n - 1)) * 0.06 / math.sqrt(n)

    assert visible(needed) <= distance < visible(needed - 1)
    assert f"{needed} blocks would decide" in explain(found, 1.05)
    assert blocks_that_decide(ratio_interval(blocks_of([math.log(1.05) + x for x in (-0.1, 0, 0.1)])), 1.05) is None
    assert blocks_that_decide(ratio_interval([ROPE]), 1.05) is None


def test_explanations_carry_ratio_interval_and_effect():
    kept = explain(ratio_interval(blocks_of([0.30, 0.31, 0.32])), 1.05)
    assert kept.startswith("retain: 1.363 [1.330, 1.398], 3 blocks, could see 3.1 %")
    assert explain(ratio_interval(blocks_of([0.0, 0.001, -0.001])), 1.05).startswith("reject")
    assert "fewer than 3" in explain(ratio_interval(blocks_of([0.3, 0.3])), 1.05)


@pytest.mark.parametrize("bad", [(1.0, 0.0, 1.0, 1.0), (1.0, float("nan"), 1.0, 1.0), (1.0, 1.0, 1.0)])
def test_a_wrong_rate_names_its_block(bad):
    with pytest.raises(UserError, match="block 2"):
        ratio_interval([ROPE, bad])


def test_no_block_is_an_error():
    with pytest.raises(UserError, match="blocks"):
        ratio_interval([])


def test_import_stays_light():
    code = (
        "import sys, speedproof.evidence.statistics, speedproof.evidence.stages, speedproof.evidence.matched;"
        "print([m for m in ('torch', 'scipy', 'pandas', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
