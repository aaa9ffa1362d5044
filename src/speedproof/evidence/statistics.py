"""What blocks of fresh processes prove about two executions: ratio, interval, smallest visible effect, verdict.

The unit of replication is the process, and four of them make a block (A B B A, or B A A B), in which a linear drift
of the machine cancels. The number of blocks is fixed before the first one runs: adding some until the answer
pleases retains what should not be retained three times as often as the interval promises.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from speedproof.core.errors import UserError

Block = tuple[float, ...]
"""Rates (targets/s) of one block as (a1, b1, b2, a2): the two runs of A outside, the two of B inside, whichever of
A B B A and B A A B (then: b1, a1, a2, b2 in time) they ran in."""

Verdict = Literal["retain", "reject", "inconclusive"]

CONFIDENCE = 0.95
POWER = 0.80
LEAST_BLOCKS = 3
"""Fewer blocks decide nothing, however far apart the rates are."""
MOST_BLOCKS = 1000


@dataclass(frozen=True)
class Interval:
    """A mean with its Student-t interval; low, high and smallest are None for a single value."""

    mean: float
    low: float | None
    high: float | None
    smallest: float | None
    deviation: float | None
    count: int


@dataclass(frozen=True)
class Ratio:
    """Rate of B over rate of A from blocks. `low` and `high` bound its 95 % interval; both are None for one block.

    `smallest_effect` is the relative gain that so many blocks of this noise see four times in five, exp(x) − 1 with
    x = (t.975 + t.80)·s/√n; `deviation` is s, the standard deviation of the blocks' log ratios.
    """

    ratio: float
    low: float | None
    high: float | None
    blocks: int
    smallest_effect: float | None
    deviation: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None or self.smallest_effect is None:
            return f"{self.ratio:.3f} (point estimate of one block)"
        effect = f"{100 * self.smallest_effect:.1f} %"
        return f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}], {self.blocks} blocks, could see {effect}"

    def plain(self) -> dict[str, Any]:
        """JSON-ready, with `label` for a reader."""
        return asdict(self) | {"label": str(self)}


@functools.cache
def _t(probability: float, freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


def _factors(count: int) -> tuple[float, float]:
    """Half-width and smallest visible effect of a mean of `count` values, in units of their standard deviation."""
    edge = _t(0.5 + CONFIDENCE / 2, count - 1)
    return edge / math.sqrt(count), (edge + _t(POWER, count - 1)) / math.sqrt(count)


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean of independent values with its 95 % Student-t interval (n − 1 degrees of freedom).

    A percentile bootstrap over so few values covers too little: 0.77 at three, 0.87 at six.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Interval(mean, None, None, None, None, count)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (count - 1))
    half, smallest = (factor * deviation for factor in _factors(count))
    return Interval(mean, mean - half, mean + half, smallest, deviation, count)


def log_ratio(block: Block) -> float:
    """d = mean(ln rate_B) − mean(ln rate_A) of one block."""
    a1, b1, b2, a2 = block
    return (math.log(b1) + math.log(b2) - math.log(a1) - math.log(a2)) / 2


def ratio_interval(blocks: Sequence[Block]) -> Ratio:
    """Rate of B over rate of A, exp(mean d), with its interval. Raises UserError naming a block with a wrong rate."""
    if not blocks:
        raise UserError("blocks: found none that counts; run the comparison again")
    for number, block in enumerate(blocks, 1):
        if len(block) != 4 or not all(math.isfinite(rate) and rate > 0 for rate in block):
            raise UserError(f"block {number}: found rates {list(block)}; four positive ones (targets/s) are needed")
    logs = mean_interval([log_ratio(block) for block in blocks])
    if logs.low is None or logs.high is None or logs.smallest is None:
        return Ratio(math.exp(logs.mean), None, None, 1, None, None)
    low, high, effect = math.exp(logs.low), math.exp(logs.high), math.expm1(logs.smallest)
    return Ratio(math.exp(logs.mean), low, high, logs.count, effect, logs.deviation)


def verdict(ratio: Ratio, threshold: float) -> Verdict:
    """retain: the whole interval reaches `threshold`, the smallest ratio that counts as a gain.

    reject: all of it lies below. Else, and always below three blocks: inconclusive.
    """
    if ratio.blocks < LEAST_BLOCKS or ratio.low is None or ratio.high is None:
        return "inconclusive"
    if ratio.low >= threshold:
        return "retain"
    return "reject" if ratio.high < threshold else "inconclusive"


def no_regression(comparison: dict[str, Any], bound: float) -> str:
    """Whether B is no slower than A: "no regression" at or above `bound`, 0.98 say, "regression" or "inconclusive"."""
    return {"retain": "no regression", "reject": "regression"}.get(judge(comparison, bound)["verdict"], "inconclusive")


def blocks_that_decide(ratio: Ratio, threshold: float) -> int | None:
    """Blocks that would decide with 80 % power, should ratio and noise be as they were estimated.

    None when one block left the noise unknown, or when the ratio lies so near the threshold that over 1000 are needed.
    """
    if ratio.deviation is None:
        return None
    distance = abs(math.log(ratio.ratio / threshold))
    for count in range(LEAST_BLOCKS, MOST_BLOCKS + 1):
        if _factors(count)[1] * ratio.deviation <= distance:
            return count
    return None


def explain(ratio: Ratio, threshold: float) -> str:
    """The verdict on `threshold` as one sentence with its ratio, interval and smallest visible effect."""
    found = verdict(ratio, threshold)
    if found == "retain":
        return f"retain: {ratio} reaches {threshold:g}"
    if found == "reject":
        return f"reject: {ratio} lies below {threshold:g}"
    needed = blocks_that_decide(ratio, threshold)
    if ratio.blocks < LEAST_BLOCKS:
        more = f"fewer than {LEAST_BLOCKS} blocks decide nothing"
    else:
        more = f"{needed} blocks would decide" if needed else f"over {MOST_BLOCKS} blocks would be needed"
    return f"inconclusive: {ratio} against {threshold:g}; {more}"


def judge(comparison: dict[str, Any], threshold: float) -> dict[str, Any]:
    """Ratio of a comparison's valid blocks, the verdict on `threshold` and the reason for it, JSON-ready.

    The number of blocks was fixed before the first, so one that fell short of it is inconclusive: a challenger that
    fails now and then must not be retained on the blocks that it survived.
    """
    blocks = [tuple(block) for block in comparison["blocks"]]
    if not blocks:
        none = dict.fromkeys(("ratio", "low", "high", "smallest_effect", "deviation", "label", "blocks_that_decide"))
        return none | {"blocks": 0, "verdict": "inconclusive", "reason": comparison["reason"] or "no block is valid"}
    ratio = ratio_interval(blocks)
    found = ratio.plain() | {"blocks_that_decide": blocks_that_decide(ratio, threshold)}
    if comparison["status"] != "ok":
        return found | {"verdict": "inconclusive", "reason": f"inconclusive: {comparison['reason']}; {ratio}"}
    return found | {"verdict": verdict(ratio, threshold), "reason": explain(ratio, threshold)}


def mean_rates(comparison: dict[str, Any]) -> tuple[float | None, float | None]:
    """Geometric mean rate of A and of B in targets/s, whose quotient is the ratio; None without a valid block."""
    logs = [(math.log(a1 * a2) / 2, math.log(b1 * b2) / 2) for a1, b1, b2, a2 in comparison["blocks"]]
    if not logs:
        return None, None
    a, b = (math.exp(math.fsum(side) / len(logs)) for side in zip(*logs, strict=True))
    return a, b
