"""How long the samples of fine-tuning are that a script does not pad: what the user says, or what the data set's own index says.

MindSpeed-LLM keeps a data set as PREFIX_packed_FIELD_document.bin, and beside it an .idx that begins with the lengths of samples.
"""

from __future__ import annotations

import glob
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_dryrun.language import message
from mindspeed_dryrun.launch.job import Job
from mindspeed_dryrun.rank import installed
from mindspeed_dryrun.record.run_spec import RunSpec

# `class _IndexWriter`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/core/datasets/indexed_dataset.py#L113
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")  # version, kind of the numbers in .bin, samples, documents
_TUNING = ("--is-instruction-dataset", "--is-pairwise-dataset")
_PACKED = ("--neat-pack", "--reset-position-ids", "--reset-attention-mask")


@dataclass(frozen=True)
class SampleLength:
    """Tokens of every sample, 0 for the sequence length, and which way the peak errs then."""

    tokens: int = 0
    note: str | None = None


def sample_length(job: Job, spec: RunSpec, release: str) -> SampleLength:
    """`--sample-length`, or the longest sample of the data set where it is here, or else the sequence length.

    Only of fine-tuning whose samples are neither padded to the sequence length nor packed. `release`: of MindSpeed-LLM, or empty.
    """
    flag = next((flag for flag in installed.unpadding_flags(release) if job.arguments.has(flag)), None)
    if flag is None or not job.arguments.has_any(_TUNING) or job.arguments.has_any(_PACKED):
        return SampleLength(spec.sample_length)
    if spec.sample_length:
        return SampleLength(
            spec.sample_length,
            message(
                f"samples are not padded ({flag}), and each is counted with {spec.sample_length} tokens "
                "(--sample-length): the peak is too LOW for a batch with a longer one"
            ),
        )
    prefixes = _prefixes(job.arguments.values.get("--data-path", ()))
    longest = min(longest_sample([Path(job.cwd, prefix) for prefix in prefixes]), job.seq_length)
    if longest:
        return SampleLength(
            longest,
            message(
                f"samples are not padded ({flag}), and each is counted with {longest} tokens, as the longest in the data set "
                f"'{' '.join(prefixes)}' has: the peak is too HIGH for a batch of shorter ones"
            ),
        )
    return SampleLength(
        note=message(
            f"samples are not padded ({flag}), and each is counted with the full {job.seq_length} tokens: the peak "
            "is too HIGH, perhaps by far, if no sample is that long. --sample-length N counts them with N, the longest's length"
        )
    )


def longest_sample(prefixes: Sequence[Path]) -> int:
    """Tokens of the longest sample in these data sets; 0 where one of them is not here, or is kept in another form."""
    # `get_packed_indexed_dataset`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/tasks/preprocess/mtf_dataset.py#L64
    longest = 0
    for prefix in prefixes:
        indices = f"{glob.escape(prefix.name)}_packed_*input_ids_document.idx"
        try:
            found = [_longest(index) for index in prefix.parent.glob(indices)]
        except OSError:  # no name that a file can have
            return 0
        if not found or not all(found):
            return 0
        longest = max(longest, *found)
    return longest


def _prefixes(words: Sequence[str]) -> list[str]:
    """`--data-path` takes prefixes, or weights and prefixes in turn."""
    return [word for word in words if not word.replace(".", "", 1).isdigit()]


def _longest(index: Path) -> int:
    """By the data set's index; 0 where it is none, or cannot be read."""
    lengths = array("i")
    try:
        with index.open("rb") as stream:
            if stream.read(len(_MAGIC)) != _MAGIC:
                return 0
            _, _, samples, _ = _HEADER.unpack(stream.read(_HEADER.size))
            lengths.frombytes(stream.read(min(samples * lengths.itemsize, index.stat().st_size)))
    except (OSError, ValueError, struct.error):
        return 0
    return max(lengths, default=0) if len(lengths) == samples else 0
