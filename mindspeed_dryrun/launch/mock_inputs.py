"""Checkpoint, data set and tokenizer: none is needed for a dry run, and none is touched.

`dry_args` is what the trainer gets instead: mock data, no load, no save, the same padded vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from mindspeed_dryrun.launch import fsdp2
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.launch.vocabularies import public_vocabulary
from mindspeed_dryrun.megatron import sizes
from mindspeed_dryrun.megatron.arguments import join, override_args, pairs, without
from mindspeed_dryrun.megatron.flags import FLAGS, with_tag

# What the user may be told about: what it is, and the flags that name it.
_NAMED_INPUTS = (
    ("checkpoint", ("--load",)),
    ("data set", ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")),
    ("tokenizer", with_tag("tokenizer")),
)
_INPUT_SENTENCES = {
    "checkpoint": "the checkpoint '{}'",
    "data set": "the data set '{}'",
    "tokenizer": "the tokenizer '{}'",
}
# Without a tokenizer and without a size in the arguments, this many tokens are assumed, and it is said.
ASSUMED_VOCABULARY = 32000


def dry_args(job: Job, args: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The trainer's arguments without anything that reads or writes the user's files, and what to say about it."""
    if not job.is_megatron:
        return absolute_paths(args, job.cwd), list(fsdp2.notes(job)) if job.is_fsdp2 else []
    vocabulary, notes = padded_vocabulary(job)
    notes = [*notes, *checkpoint_notes(job), *_missing(job)]  # what decides figures comes first
    gone = with_tag("input", "tokenizer", "output")
    result = override_args(without(args, gone), ["--mock-data", "--num-workers", "0", "--padded-vocab-size", str(vocabulary)])
    return absolute_paths(result, job.cwd), notes


_FILES = frozenset(("input", "tokenizer", "output"))
_NAMES_A_FILE = re.compile(r"path|file|dir|config|cfg")


def absolute_paths(args: Sequence[str], cwd: str) -> tuple[str, ...]:
    """Values that name a file or folder of the user's, made absolute: a rank runs in a folder of its own."""
    folder = Path(cwd)

    def absolute(name: str, word: str) -> str:
        if "/" not in word and name in FLAGS and not (FLAGS[name].tags & _FILES or _NAMES_A_FILE.search(name)):
            return word  # `--ckpt-format torch` is not the folder of that name
        if word.startswith(("-", "/")) or not word or "\0" in word or len(word) > 1000:
            return word
        try:
            there = ("/" in word or not re.fullmatch(r"[\w.,+-]*\d[\w.,+-]*", word)) and (folder / word).exists()
        except OSError:
            return word
        return str(folder / word) if there and word not in (".", "..") else word

    return join((name, [absolute(name, word) for word in words]) for name, words in pairs(args))


_SIZED_BY_FLAG = (None, "NullTokenizer", "NullMultimodalTokenizer")  # others have a vocabulary of their own


def padded_vocabulary(job: Job) -> tuple[int, list[str]]:
    """The padded size of the vocabulary as the trainer would have it, and what to say if it had to be assumed."""
    arguments, tp = job.arguments, job.parallel.tp
    known = sizes.read_padded_vocabulary(arguments, tp)
    # `_vocab_size_with_padding(tokenizer.vocab_size`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/training/tokenizer/tokenizer.py#L57
    if known and (arguments.has("--padded-vocab-size") or arguments.text("--tokenizer-type") in _SIZED_BY_FLAG):
        return known, []
    divisible_by = arguments.positive("--make-vocab-size-divisible-by", 128)
    size = _tokens(job)
    public = public_vocabulary(arguments)
    if size:
        note = f"the vocabulary ({size} tokens) is read from the tokenizer's files"
    elif known:
        size = arguments.positive("--vocab-size", 1)
        note = (
            f"the vocabulary is taken from --vocab-size {size}; the trainer takes it from the tokenizer, which is not here "
            "(say -- --padded-vocab-size N if it is another)"
        )
    elif public:
        model, size = public
        note = (
            f"the tokenizer is not here: {size} tokens are ASSUMED, as the public {model} has "
            "(say -- --padded-vocab-size N if it is another)"
        )
    else:
        size = divisible_by * tp if divisible_by * tp >= 8192 else ASSUMED_VOCABULARY
        note = (
            f"the size of the vocabulary is in the tokenizer only, which is not here: {size} tokens are ASSUMED "
            "(say -- --padded-vocab-size N if it is another)"
        )
    return sizes.padded_vocabulary(size, divisible_by, tp), [note]


def _tokens(job: Job) -> int | None:
    for flag in ("--tokenizer-name-or-path", "--tokenizer-model"):
        for word in job.arguments.values.get(flag, ())[:1]:
            path = Path(job.cwd, word)
            folder = path if path.is_dir() else path.parent
            try:
                data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
                model = data["model"]["vocab"]
                words = set(model) if isinstance(model, dict) else {piece[0] for piece in model}
                return len(words | {item["content"] for item in data.get("added_tokens", ())})
            except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
                continue
    return None


def _missing(job: Job) -> list[str]:
    notes, missing, values = [], [], job.arguments.values
    for what, names in _NAMED_INPUTS:
        named = [" ".join(values[name]) for name in names if values.get(name)]
        absent = [word for word in named if not _there(job, word)]
        if absent:
            missing.append(_INPUT_SENTENCES[what].format(absent[0]))
    if missing:
        notes.append(f"not here, and not needed for a dry run: {', '.join(missing)}")
    return notes


def _there(job: Job, word: str) -> bool:
    path = Path(job.cwd, word)
    try:
        return path.exists() or bool(list(path.parent.glob(path.name + "*")))  # data sets are named by prefix
    except (OSError, ValueError):
        return False


def checkpoint_notes(job: Job) -> list[str]:
    """A checkpoint that is there but was converted for another TP or PP: a real run would fail to load it."""
    words = job.arguments.values.get("--load", ())
    if len(words) != 1:
        return []
    found = checkpoint_layout(Path(job.cwd, words[0]))
    if found is None or found == (job.parallel.tp, job.parallel.pp):
        return []
    return [
        f"the checkpoint {words[0]} was converted for TP {found[0]} PP {found[1]}, and this job is TP {job.parallel.tp} "
        f"PP {job.parallel.pp}: a real run could not load it; convert it again"
    ]


def checkpoint_layout(folder: Path) -> tuple[int, int] | None:
    """(TP, PP) of a Megatron checkpoint, by its folders `mp_rank_TT` or `mp_rank_TT_PPP`; None if it is none."""
    try:
        ranks = _rank_folders(folder)
        if not ranks:
            inside = sorted(item for item in folder.iterdir() if item.is_dir() and re.match(r"iter_\d+|release", item.name))
            ranks = _rank_folders(inside[-1]) if inside else []
    except OSError:
        return None
    if not ranks:
        return None
    # `mp_rank_TT_EEE` (experts, no pipeline) has two numbers as well; nobody can tell, so the second counts as the stage
    tp = max(numbers[0] for numbers in ranks) + 1
    pp = max(numbers[1] if len(numbers) > 1 else 0 for numbers in ranks) + 1
    return tp, pp


def _rank_folders(folder: Path) -> list[tuple[int, ...]]:
    found = []
    for item in folder.iterdir():
        match = re.fullmatch(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?", item.name)
        if match and item.is_dir():
            found.append(tuple(int(group) for group in match.groups() if group is not None))
    return found
