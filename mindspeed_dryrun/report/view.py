"""What every view says in the same words: the verdict, the rows of ranks folded by class, safe text."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from mindspeed_dryrun.language import t
from mindspeed_dryrun.record.model import JobSummary, RankReport, Report, Status, TimeSummary, Verdict

# More rows than this do not fit a screen: ranks that differ in nothing a table shows share a row,
# and if that is not enough, ranks of one stage do.
MOST_ROWS = 40
_LOAD_BAR = 30  # characters


@dataclass(frozen=True)
class Headline:
    """`word` is FITS, FITS BARELY, DOES NOT FIT, FAILED or UNKNOWN; `tone` good, bad or warn; `sentence` says it in full."""

    word: str
    tone: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """Ranks that share a line. Figures are the largest among them; `folded` when they differ."""

    rank: int
    ranks: tuple[int, ...]
    stage: int | None
    status: Status
    error: str | None
    used_peak_mb: int | None
    actual_peak_mb: int | None
    why: str | None
    folded: bool = False
    worst: bool = False


def clean(text: str) -> str:
    """One line without control characters: log text must not steer a terminal or break a table."""
    safe = "".join(" " if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") else char for char in text)
    return " ".join(safe.split())


def shorten(text: str, width: int) -> str:
    """At most `width` characters, with an ellipsis where something was cut."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def percent(part: float, whole: float) -> str:
    """'93.3%'; an en dash where there is no whole."""
    return f"{100 * part / whole:.1f}%" if whole else "–"


def ranges(ranks: Iterable[int]) -> str:
    """(0, 1, 2, 5) → '0-2,5'; a steady stride reads '0-62:2'."""
    numbers = sorted(set(ranks))
    parts: list[str] = []
    while numbers:
        first, length, stride = numbers[0], 1, 1
        if len(numbers) > 1:
            stride = numbers[1] - numbers[0]
            while length < len(numbers) and numbers[length] == first + length * stride:
                length += 1
        if stride > 1 and length < 3:
            length, stride = 1, 1
        last = numbers[length - 1]
        parts.append(str(first) if length == 1 else f"{first}-{last}" + (f":{stride}" if stride > 1 else ""))
        numbers = numbers[length:]
    return ",".join(parts)


def parallel_words(job: JobSummary) -> str:
    """'TP2 PP2 DP1', with CP, EP and VPP where they are used."""
    layout = job.parallel
    words = [f"TP{layout.tp}", f"PP{layout.pp}", f"DP{layout.dp}"]
    words += [f"{name}{value}" for name, value in (("CP", layout.cp), ("EP", layout.ep), ("ETP", layout.etp)) if value > 1]
    if layout.vpp:
        words.append(f"VPP{layout.vpp}")
    return " ".join(words)


def job_words(report: Report) -> str:
    """The job in one line."""
    if report.job is None:
        return t("a folder of {logs}", logs=plural(len(report.ranks), "worker log"))
    job = report.job
    ranks = plural(job.world_size, "rank")
    trainer = t("embedded trainer") if job.trainer == "embedded" else t("{trainer} trainer", trainer=clean(job.trainer))
    return f"{clean(job.script)} · {ranks} · {parallel_words(job)} · {trainer}"


def engine_words(report: Report) -> str:
    """What counted, in one line; empty where the logs do not say."""
    engine = report.engine
    words = []
    if engine.version:
        name = {"mindspore": "MindSpore"}.get(engine.name or "mindspore", engine.name)
        words.append(f"{name} {clean(engine.version)}")
    if engine.cann:
        words.append(t("CANN stand-in") if engine.cann == "stand-in" else f"CANN {clean(engine.cann)}")
    if engine.level is not None:
        words.append(t("simulation level {level}", level=engine.level))
    return " · ".join(words)


def time_words(time: TimeSummary | None) -> str:
    """The predicted time of an iteration in one line; empty where none was asked for."""
    if time is None:
        return ""
    rate = "" if time.tflops_per_card is None else f" · {time.tflops_per_card:.0f} TFLOP/s/card"
    name, comma, trust = clean(time.hardware or t("hardware not named")).partition(", ")
    hardware = f"{name}{comma}{t(trust)}"
    return t(
        f"Predicted time: {time.iteration_s:.2f} s an iteration ({time.low_s:.2f} to {time.high_s:.2f}) · "
        f"{time.tokens_per_s_per_card:.0f} tokens/s/card{rate} ({hardware})"
    )


def plural(count: int, noun: str) -> str:
    """1 rank, 4 ranks."""
    return t(f"{count} {noun}" if count == 1 else f"{count} {noun}s")


_NOUN_SENTENCES = (
    "{} rank",
    "{} ranks",
    "{} worker log",
    "{} worker logs",
    "{} damaged row",
    "{} damaged rows",
)
_SOURCE_SENTENCES = ("published", "derived", "measured")
_STATUS_SENTENCES = ("ok", "oom", "failed", "timeout")


def worst(report: Report) -> RankReport | None:
    """The worst rank's own line."""
    return next((rank for rank in report.ranks if rank.rank == report.worst_rank), None)


def headline(report: Report) -> Headline:
    """Will it fit, on which rank, by how much. A failed rank comes first: its figure means nothing."""
    broken = [rank for rank in report.ranks if rank.status.broken]
    if broken:
        names = ranges(number for rank in broken for number in rank.represents or (rank.rank,))
        slow, shown = all(rank.status is Status.TIMEOUT for rank in broken), shorten(names, 30)
        if names.isdigit():
            one = "Rank {ranks} timed out: without them there is no verdict."
            sentence = t(one, ranks=shown) if slow else t("Rank {ranks} failed: without them there is no verdict.", ranks=shown)
        else:
            more = "Ranks {ranks} timed out: without them there is no verdict."
            sentence = t(more, ranks=shown) if slow else t("Ranks {ranks} failed: without them there is no verdict.", ranks=shown)
        return Headline(t("FAILED"), "bad", sentence)
    starved = [number for rank in report.ranks if rank.status is Status.OOM and rank.error for number in rank.represents]
    if starved:
        return Headline(t("DOES NOT FIT"), "bad", t("Rank {ranks} really ran out of memory.", ranks=shorten(ranges(starved), 30)))
    rank = worst(report)
    if rank is None or report.actual_peak_mb is None:
        return Headline(t("UNKNOWN"), "warn", t("No rank printed its peak memory."))
    peak = report.actual_peak_mb
    if rank.stage is None:
        return _judged(report, t("Worst rank {rank} needs {peak}M with fragments", rank=rank.rank, peak=peak))
    need = t("Worst rank {rank} (stage {stage}) needs {peak}M with fragments", rank=rank.rank, stage=rank.stage, peak=peak)
    return _judged(report, need)


def _judged(report: Report, need: str) -> Headline:
    """The headline of a job whose peak is known."""
    if report.budget_mb is None or report.margin_mb is None:
        return Headline(t("UNKNOWN"), "warn", t("{need}; no budget is known to compare it with.", need=need))
    budget, margin = budget_words(report), report.margin_mb
    if report.verdict is Verdict.DOES_NOT_FIT:
        return Headline(t("DOES NOT FIT"), "bad", t("{need}: {over}M above {budget}.", need=need, over=-margin, budget=budget))
    if report.verdict is Verdict.UNKNOWN:
        sentence = t(
            "{need}, {margin}M below {budget}, but not every rank class was run.", need=need, margin=margin, budget=budget
        )
        return Headline(t("UNKNOWN"), "warn", sentence)
    seen = report.needed_mb
    asked = ""
    if report.asked_mb is not None and margin < report.asked_mb:
        asked = t(" It is less than the margin of {asked}M that was asked for.", asked=report.asked_mb)
    if report.verdict is Verdict.BARELY and margin >= (seen or 0):
        sentence = t(
            "{need} in a short run: {margin}M below {budget}, but a longer one needs more. {waiting}M wait for Python's garbage "
            "collector at its end, and every iteration adds to them until that runs.",
            need=need, margin=margin, budget=budget, waiting=report.uncollected_mb,
        )  # fmt: skip
        return Headline(t("FITS BARELY"), "warn", sentence + asked)
    if report.verdict is Verdict.BARELY:
        sentence = t(
            "{need}: {margin}M below {budget}, less than the {seen}M that real runs were seen to need above a dry run.",
            need=need, margin=margin, budget=budget, seen=seen,
        )  # fmt: skip
        return Headline(t("FITS BARELY"), "warn", sentence + asked)
    sentence = t("{need}: {margin}M below {budget}.", need=need, margin=margin, budget=budget)
    if seen:
        sentence = t(
            "{need}: {margin}M below {budget}, more than the {seen}M that real runs were seen to need above a dry run.",
            need=need, margin=margin, budget=budget, seen=seen,
        )  # fmt: skip
    return Headline(t("FITS"), "warn" if asked else "good", sentence + asked)


def load_lines(report: Report) -> list[str]:
    """A small chart: the peak by the load of the experts, and where the job stops fitting."""
    if not report.loads:
        return []
    most = max(peak.used_peak_mb for peak in report.loads) or 1
    lines = [t("Highest peak by the load of the experts (1 is even):")]
    for peak in report.loads:
        bar = "█" * max(1, round(_LOAD_BAR * peak.used_peak_mb / most))
        lines.append(f"  {peak.load:<5g} {mb(peak.used_peak_mb):>8}  {bar:<{_LOAD_BAR}}  rank {peak.rank} {t(str(peak.status))}")
    fitting = max((peak.load for peak in report.loads if peak.status is Status.OK), default=1.0)
    above = min((peak.load for peak in report.loads if peak.status is Status.OOM), default=None)
    if above is None:
        return [*lines, t(f"The job fits up to {fitting:g} times an even load, the most that was counted.")]
    return [*lines, t(f"The job stops fitting between {fitting:g} and {above:g} times an even load.")]


def budget_words(report: Report) -> str:
    """The budget and whose it is."""
    device = report.device
    if device is None or report.budget_mb != device.usable_mb:
        return t("the budget of {budget}M", budget=report.budget_mb)
    return t("the {budget}M usable on {device}", budget=report.budget_mb, device=clean(device.title))


def device_words(report: Report) -> str:
    """The card that the verdict is about, and where its figures are from."""
    device = report.device
    if device is None:
        return ""
    source = t(", {source}", source=t(clean(device.source))) if device.source else ""
    return t(
        "Device: {device}, {total}M in all, {usable}M usable{source}",
        device=clean(device.title), total=device.total_mb, usable=device.usable_mb, source=source,
    )  # fmt: skip


def outside_words(report: Report) -> str:
    """What communicators take beside the pool; empty where it is not known."""
    outside = report.outside_pool
    if outside is None:
        return ""
    count = outside.communicators
    groups = t("{count} communicator", count=count) if count == 1 else t("{count} communicators", count=count)
    words = t("Outside the pool: {groups} with {buffers}M of buffers", groups=groups, buffers=outside.hccl_mb)
    if outside.hccl_mb > outside.left_mb:
        short = "{words}, and the device leaves {left}M: that is not enough. Lower HCCL_BUFFSIZE."
        return t(short, words=words, left=outside.left_mb)
    return t("{words}; the device leaves {left}M", words=words, left=outside.left_mb)


def rows(report: Report) -> tuple[RankRow, ...]:
    """One row per rank class, worst first, then failures, then by peak. Every rank is in exactly one row."""
    groups = [[rank] for rank in report.ranks]
    if len(groups) > 16:
        groups = _group(report.ranks, lambda rank: (rank.stage, rank.status, rank.error, rank.used_peak_mb))
    if len(groups) > MOST_ROWS:
        groups = _group(report.ranks, lambda rank: (rank.stage, rank.status))
    found = [_row(group, report.worst_rank) for group in groups]
    return tuple(sorted(found, key=lambda row: (not row.worst, not row.status.broken, -(row.actual_peak_mb or 0), row.rank)))


RANK_HEAD = ("rank", "stands for", "stage", "status", "used peak", "with fragments", "of budget")


def mb(value: float | None) -> str:
    """'55389M', or an en dash where there is no figure."""
    return "–" if value is None else f"{value:.0f}M"


def rank_cells(row: RankRow, budget_mb: int | None, width: int) -> list[str]:
    """A row under RANK_HEAD; the list of ranks takes at most `width` characters."""
    # A rank that stopped early still printed a peak, a small and meaningless one: it is not shown.
    stopped = row.status.broken
    used, actual = (None, None) if stopped else (row.used_peak_mb, row.actual_peak_mb)
    share = "–" if actual is None or not budget_mb else percent(actual, budget_mb)
    stage = "–" if row.stage is None else str(row.stage)
    stands_for = shorten(ranges(row.ranks), width)
    return [str(row.rank), stands_for, stage, t(str(row.status)), mb(used), mb(actual), share]


def errors(found: Sequence[RankRow], most: int = 10) -> list[str]:
    """'rank 3: the first error line', one for each row that has one."""
    lines = [
        f"rank {shorten(ranges(row.ranks), 24)} {t(str(row.status))}: {t(clean(row.error or 'no error line in its log'))}"
        for row in found
        if row.status.broken
    ]
    return lines[:most] + ([t(f"… and {len(lines) - most} more")] if len(lines) > most else [])


def _group(ranks: Iterable[RankReport], key: Callable[[RankReport], Hashable]) -> list[list[RankReport]]:
    groups: dict[Hashable, list[RankReport]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def _row(group: list[RankReport], worst_rank: int | None) -> RankRow:
    top = max(group, key=lambda rank: (rank.rank == worst_rank, rank.actual_peak_mb or 0))
    return RankRow(
        rank=top.rank,
        ranks=tuple(sorted({number for rank in group for number in rank.represents or (rank.rank,)})),
        stage=top.stage,
        status=top.status,
        error=top.error,
        used_peak_mb=max((rank.used_peak_mb for rank in group if rank.used_peak_mb is not None), default=None),
        actual_peak_mb=max((rank.actual_peak_mb for rank in group if rank.actual_peak_mb is not None), default=None),
        why=top.why,
        folded=len({(rank.used_peak_mb, rank.actual_peak_mb) for rank in group}) > 1,
        worst=any(rank.rank == worst_rank for rank in group),
    )
