"""The language of what a person reads: `t` gives a message in it. Figures, flags and the keys of JSON are the same in all."""

from __future__ import annotations

import locale
import os
import unicodedata

LANGUAGES = ("en", "zh")
_language = "en"

# The English message is its own key; a test finds every `t(...)` whose message has no Chinese here.
CHINESE = {
    "FITS": "放得下",
    "FITS BARELY": "勉强放得下",
    "DOES NOT FIT": "放不下",
    "FAILED": "失败",
    "UNKNOWN": "未定",
    "Rank {ranks} failed: without them there is no verdict.": "rank {ranks} 失败，因此没有结论。",
    "Ranks {ranks} failed: without them there is no verdict.": "rank {ranks} 失败，因此没有结论。",
    "Rank {ranks} timed out: without them there is no verdict.": "rank {ranks} 超时，因此没有结论。",
    "Ranks {ranks} timed out: without them there is no verdict.": "rank {ranks} 超时，因此没有结论。",
    "Rank {ranks} really ran out of memory.": "rank {ranks} 在真实运行中显存不足。",
    "No rank printed its peak memory.": "没有 rank 打印显存峰值。",
    "Worst rank {rank} (stage {stage}) needs {peak}M with fragments": "最紧张的 rank {rank}（阶段 {stage}）含碎片需要 {peak}M",
    "Worst rank {rank} needs {peak}M with fragments": "最紧张的 rank {rank} 含碎片需要 {peak}M",
    "{need}; no budget is known to compare it with.": "{need}；不知道上限，无法比较。",
    "{need}: {over}M above {budget}.": "{need}，比{budget}多 {over}M。",
    "{need}, {margin}M below {budget}, but not every rank class was run.": (
        "{need}，比{budget}少 {margin}M，但并非每类 rank 都运行过。"
    ),
    "{need}: {margin}M below {budget}, less than the {seen}M that real runs were seen to need above a dry run.": (
        "{need}，比{budget}少 {margin}M，不足真实运行比 dry run 多用的 {seen}M。"
    ),
    "{need}: {margin}M below {budget}, more than the {seen}M that real runs were seen to need above a dry run.": (
        "{need}，比{budget}少 {margin}M，多于真实运行比 dry run 多用的 {seen}M。"
    ),
    "{need}: {margin}M below {budget}.": "{need}，比{budget}少 {margin}M。",
    " It is less than the margin of {asked}M that was asked for.": "不足所要求的余量 {asked}M。",
    "the budget of {budget}M": "上限 {budget}M",
    "the {budget}M usable on {device}": " {device} 可用的 {budget}M ",
    "Device: {device}, {total}M in all, {usable}M usable{source}": "设备：{device}，共 {total}M，可用 {usable}M{source}",
    "Outside the pool: {groups} with {buffers}M of buffers": "内存池之外：{groups}，缓冲区 {buffers}M",
    "{words}, and the device leaves {left}M: that is not enough. Lower HCCL_BUFFSIZE.": (
        "{words}，而设备只留 {left}M，不够。请调小 HCCL_BUFFSIZE。"
    ),
    "{words}; the device leaves {left}M": "{words}；设备留有 {left}M",
    "{count} communicator": "{count} 个通信域",
    "{count} communicators": "{count} 个通信域",
    "rank": "rank",
    "stands for": "代表",
    "stage": "阶段",
    "status": "状态",
    "used peak": "已用峰值",
    "with fragments": "含碎片",
    "of budget": "占上限",
    "Not counted: ": "未统计：",
    "Note: ": "说明：",
    "A row holds ranks of one class; its figures are the largest among them.": "一行是同一类的 rank，数字取其中最大的。",
}


def t(message: str, **values: object) -> str:
    """The message in the language of this run, with its values filled in."""
    return (CHINESE.get(message, message) if _language == "zh" else message).format(**values)


def set_language(name: str | None) -> None:
    """`zh` or `en`; without a name the locale's."""
    global _language
    _language = name or from_locale()


def from_locale() -> str:
    """Chinese where the environment says so, else English."""
    said = next((value for key in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := os.environ.get(key))), None)
    return "zh" if (said or locale.getlocale()[0] or "").lower().startswith(("zh", "chinese")) else "en"


def width(text: str) -> int:
    """Columns that a terminal gives the text: a Chinese character takes two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
