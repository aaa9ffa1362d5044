"""What the stages' records decide: the incumbent after each stage, the next stage's places, the finalists.

A stage varies its own settings on the executions that came out ahead before it. Its fastest candidate replaces the
incumbent only where it gains the retention threshold over it, lest a marginal change ride in with a large one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from speedproof.core.errors import UserError
from speedproof.core.identity import differences, digest
from speedproof.evidence import statistics
from speedproof.evidence.stages import (
    STAGES,
    check,
    combinations,
    name_of,
    simplicity,
    slots,
    stage_named,
    stage_names,
)
from speedproof.settings.execution import Execution
from speedproof.settings.experiment import Tuning
from speedproof.settings.recipe import Recipe

TIE = 0.01
"""Candidates closer than this, or than the windows of one of them spread, are equally fast: 1 % is the noise of a
quiet node."""


@dataclass(frozen=True)
class Candidate:
    """An execution of a stage with its record, None as long as it has not been measured."""

    stage: str
    name: str
    execution: Execution
    base: Execution
    record: dict[str, Any] | None = None

    @property
    def rate(self) -> float:
        """targets/s of the median window; 0 when there is none, since the record is not ok."""
        return self.record["targets_per_s"] if self.record and self.record["status"] == "ok" else 0.0

    @property
    def spread(self) -> float:
        """(max − min) / median of the record's windows."""
        rates = [w["targets_per_s"] for w in (self.record or {}).get("windows") or []]
        return (max(rates) - min(rates)) / self.rate if rates and self.rate else 0.0

    def brief(self) -> dict[str, Any]:
        """Name, rate and what its start costs, as a decision shows them."""
        warmup = (self.record or {}).get("warmup") or {}
        return {
            "name": self.name,
            "targets_per_s": self.rate or None,
            "warmup_s": warmup.get("total_s"),
            "first_update_s": warmup.get("first_update_s"),
        }


@dataclass(frozen=True)
class Plan:
    """The places of one stage: its candidates first; `empty` more hold nothing, for the reason `skipped`."""

    stage: str
    incumbent: Candidate | None
    candidates: list[Candidate]
    why: str
    empty: int = 0
    skipped: str = ""

    def plain(self) -> dict[str, Any]:
        """JSON-ready; the same records always give the same plan."""
        filled: list[dict[str, Any]] = [{"name": c.name, "execution": c.execution.plain()} for c in self.candidates]
        incumbent = self.incumbent
        return {
            "stage": self.stage,
            "slots": filled + [{"skipped": self.skipped}] * self.empty,
            "incumbent": {"name": incumbent.name, "execution": incumbent.execution.plain()} if incumbent else None,
            "why": self.why,
        }


@dataclass(frozen=True)
class Decision:
    """What a stage's challenger did to the incumbent."""

    stage: str
    incumbent: Candidate | None
    challenger: Candidate | None
    retained: bool
    kind: str
    reason: str
    ratio: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """JSON-ready, with the warm-up of both beside the ratio."""
        return {
            "stage": self.stage,
            "incumbent": self.incumbent.brief() if self.incumbent else None,
            "challenger": self.challenger.brief() if self.challenger else None,
            "kind": self.kind,
            "retained": self.retained,
            "reason": self.reason,
        } | {key: self.ratio.get(key) for key in ("ratio", "low", "high", "blocks", "smallest_effect")}


class Tuner:
    """Goes through the stages in order with what has been measured so far; the same input gives the same answer.

    `records` are those of all earlier slots in any order. `retention` is the smallest ratio that replaces the
    incumbent, by single records or, where `stage_blocks` is not 0, by the `comparisons` of the stages' challengers.
    Raises UserError where records are missing or not comparable.
    """

    def __init__(
        self,
        default: Execution,
        tuning: Tuning,
        recipe: Recipe,
        records: Iterable[dict[str, Any]],
        *,
        retention: float,
        stage_blocks: int = 0,
        comparisons: Iterable[dict[str, Any]] = (),
    ):
        check(tuning, recipe)
        self.default, self.tuning = default, tuning
        self.retention, self.stage_blocks = retention, stage_blocks
        measured = [record for record in records if record["status"] != "skipped"]
        _check_alike(measured, recipe)
        self.records = {digest(record["execution"]): record for record in reversed(measured)}
        self.comparisons = list(comparisons)
        self.incumbent: Candidate | None = None
        self.candidates: list[Candidate] = []
        self.decisions: list[Decision] = []

    def run(self, until: str | None = None) -> "Tuner":
        """Decide every stage before `until`; all of them when it is None."""
        for name in stage_names(self.tuning, self.default):
            if name == until:
                break
            self._decide(self.plan(name))
        return self

    def ranking(self) -> list[Candidate]:
        """All that ran, the numerically fastest first."""
        return self._fastest(self.candidates)

    def _fastest(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        return sorted((c for c in candidates if c.rate), key=lambda c: (-c.rate, simplicity(c.execution, self.default)))

    def plan(self, name: str) -> Plan:
        """What stage `name` measures, once the stages before it have been decided."""
        stage = stage_named(name)
        settings = combinations(stage, self.tuning, self.default)
        if stage.bases == 0:
            grid = [self._candidate(name, self.default, s) for s in settings]
            return Plan(name, None, grid, "every combination, all else as in the default execution")
        others = [c for c in self.ranking() if self.incumbent and c.execution != self.incumbent.execution]
        chosen = [c for c in (self.incumbent, *others) if c][: stage.bases]
        why = f"on {'; on '.join(c.name for c in chosen)}" if chosen else "on nothing"
        skipped = f"only {len(chosen)} of the executions before this stage ran"
        if stage.needs:
            setting, value = stage.needs
            idle = [c for c in chosen if getattr(c.execution, setting) != value]
            if idle:
                chosen = [c for c in chosen if c not in idle]
                skipped = f"without effect on {idle[0].name}, where {setting} is not {str(value).lower()}"
        every = [self._candidate(name, c.execution, s) for c in chosen for s in settings]
        found = [c for c in every if not c.execution.contradiction()]
        for candidate in every:
            if contradiction := candidate.execution.contradiction():
                skipped = f"{candidate.name} contradicts itself: {contradiction}"
        empty = slots(name, self.tuning, self.default) - len(found)
        return Plan(name, self.incumbent, found, why, empty, skipped)

    def _candidate(self, stage: str, base: Execution, settings: dict[str, Any]) -> Candidate:
        execution = base.model_copy(update=settings)
        record = self.records.get(digest(execution.plain()))
        return Candidate(stage, name_of(execution, self.default), execution, base, record)

    def _decide(self, plan: Plan) -> None:
        challenger = self.challenger(plan)
        self.candidates += plan.candidates
        decision = self._decision(plan, challenger)
        if decision.retained:
            self.incumbent = decision.challenger
        self.decisions.append(decision)

    def challenger(self, plan: Plan) -> Candidate | None:
        """The simplest of a stage's fastest, None when nothing ran; the grid's default becomes the first incumbent.

        A candidate on another base than the incumbent carries that base's change too. So it must gain the retention
        also over the incumbent with this stage's change alone.
        """
        missing = [c.name for c in plan.candidates if c.record is None]
        if missing:
            raise UserError(f"records: stage {plan.stage!r} has none of {missing[0]!r}; measure its slot first")
        if plan.stage == STAGES[0].name:
            self.incumbent = next((c for c in plan.candidates if c.execution == self.default and c.rate), None)
        ran = self._fastest(plan.candidates)
        ran = [c for c in ran if self._pays_for_its_base(c, ran)]
        return min(
            (c for c in ran if c.rate * (1 + self._noise(ran[0], c)) >= ran[0].rate),
            key=lambda c: simplicity(c.execution, self.default),
            default=None,
        )

    def _noise(self, best: Candidate, other: Candidate) -> float:
        return min(self.retention - 1, max(TIE, best.spread, other.spread))

    def _pays_for_its_base(self, candidate: Candidate, ran: Sequence[Candidate]) -> bool:
        if self.incumbent is None or candidate.base == self.incumbent.execution:
            return True
        change = {key: getattr(candidate.execution, key) for key in stage_named(candidate.stage).varies}
        alone = self.incumbent.execution.model_copy(update=change)
        return all(candidate.rate >= self.retention * c.rate for c in ran if c.execution == alone)

    def _decision(self, plan: Plan, challenger: Candidate | None) -> Decision:
        incumbent, threshold = self.incumbent, self.retention
        if challenger is None:
            found = sorted({c.record["status"] for c in plan.candidates if c.record})
            reason = f"no candidate ran: {', '.join(found) or plan.skipped}"
            return Decision(plan.stage, incumbent, None, False, "none", reason)
        if incumbent is None:
            reason = "the default execution did not run, so there is nothing to compare with"
            return Decision(plan.stage, None, challenger, True, "none", reason)
        if challenger.execution == incumbent.execution:
            reason = "the incumbent is the stage's fastest, or tied with it and simpler"
            return Decision(plan.stage, incumbent, challenger, False, "none", reason, {"ratio": 1.0})
        if self.stage_blocks:
            found = statistics.judge(self._comparison(incumbent, challenger), threshold)
            retained = found["verdict"] == "retain"
            return Decision(plan.stage, incumbent, challenger, retained, "A B B A blocks", found["reason"], found)
        value = challenger.rate / incumbent.rate
        retained = value >= threshold
        reason = f"{value:.3f} {'reaches' if retained else 'lies below'} {threshold:g}, by single records"
        return Decision(plan.stage, incumbent, challenger, retained, "single records", reason, {"ratio": value})

    def _comparison(self, incumbent: Candidate, challenger: Candidate) -> dict[str, Any]:
        pair = (incumbent.execution.plain(), challenger.execution.plain())
        for comparison in self.comparisons:
            if (comparison["a"], comparison["b"]) == pair:
                return comparison
        raise UserError(
            f"comparisons: none holds {incumbent.name!r} against {challenger.name!r}, and protocol.stage_blocks is "
            f"{self.stage_blocks}; compare this stage's challenger first"
        )


def stage_pair(tuner: Tuner, stage: str) -> dict[str, Any]:
    """The two executions that a stage's blocks compare, in the keys of the finalists: `default` is the incumbent.

    Where nothing challenges the incumbent they are equal, and the blocks become a control of the node's noise.
    """
    challenger = tuner.run(until=stage).challenger(tuner.plan(stage))
    incumbent = tuner.incumbent or challenger
    if incumbent is None or challenger is None:
        challenger = incumbent = incumbent or challenger
    if incumbent is None or challenger is None:
        raise UserError(f"tuning: {_nothing_ran(tuner)}")
    return {
        "stage": stage,
        "default": incumbent.execution.plain(),
        "default_name": incumbent.name,
        "recommended": challenger.execution.plain(),
        "recommended_name": challenger.name,
    }


def finalists(tuner: Tuner) -> dict[str, Any]:
    """What the last steps need: the ranking for `selected`, the last incumbent for `recommended`, and how it came.

    Raises UserError when no execution ran at all.
    """
    tuner.run()
    if tuner.incumbent is None:
        raise UserError(f"tuning: {_nothing_ran(tuner)}")
    kept = [d.stage for d in tuner.decisions if d.retained]
    return {
        "default": tuner.default.plain(),
        "default_name": name_of(tuner.default, tuner.default),
        "selected": [
            {"name": c.name, "execution": c.execution.plain(), "targets_per_s": c.rate} for c in tuner.ranking()
        ],
        "recommended": tuner.incumbent.execution.plain(),
        "recommended_name": tuner.incumbent.name,
        "decisions": [d.plain() for d in tuner.decisions],
        "candidates": [{"stage": c.stage, "name": c.name, "execution": c.execution.plain()} for c in tuner.candidates],
        "why": f"retained in stage {', '.join(kept)}" if kept else "no stage gained enough; the default stays",
    }


def _nothing_ran(tuner: Tuner) -> str:
    first = next((c.record for c in tuner.candidates if c.record), None) or {}
    return (
        f"none of {len(tuner.candidates)} executions ran (the first: {first.get('status')}, {first.get('reason')}); "
        "mend the cause and measure again"
    )


def _check_alike(records: Sequence[dict[str, Any]], recipe: Recipe) -> None:
    """Raise UserError naming the key where records differ in recipe, protocol or class of machine."""
    for record in records:
        wanted = recipe.plain()
        if recipe.precision == "auto":  # resolved by the machine that measured
            wanted["precision"] = records[0]["recipe"]["precision"]
        found = differences(wanted, record["recipe"], "recipe")
        found |= differences(records[0]["protocol"], record["protocol"], "protocol")
        found |= differences(_machine(records[0]), _machine(record), "machine")
        if found:
            key, (expected, value) = next(iter(found.items()))
            raise UserError(
                f"records: {record.get('name')!r} was measured with {key} {value!r}, not {expected!r}; "
                "records are compared only on one recipe, by one protocol, on one class of machine; measure it again"
            )


def _machine(record: dict[str, Any]) -> dict[str, Any]:
    return (record.get("environment") or {}).get("class") or {}
