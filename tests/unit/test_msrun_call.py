"""The reader of msrun calls: msrun's own rules, and kinder ones where a copied tutorial went wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.launch.msrun_call import OPTIONS, drop_comments, read_msrun_call


def read(text: str):
    return read_msrun_call(text.split(" "), "/here")


def test_options_program_and_arguments() -> None:
    call = read("--worker_num 16 --local_worker_num=8 --join=True pretrain_gpt.py --seq-length 4096 --bf16")
    assert call.options == {"worker_num": "16", "local_worker_num": "8", "join": "True"}
    assert (call.program, call.program_args) == ("pretrain_gpt.py", ("--seq-length", "4096", "--bf16"))
    assert (call.world_size, call.local_world_size, call.cwd) == (16, 8, "/here")


def test_binding_to_numa_nodes_is_an_option_of_msrun_2_9_and_changes_nothing_here() -> None:
    call = read_msrun_call(["--worker_num", "4", "--bind_numa", "True", "train.py", "--num-layers", "2"], "/")
    assert call.options["bind_numa"] == "True" and call.program == "train.py"


def test_msrun_defaults_to_eight_workers() -> None:
    assert read("pretrain_gpt.py").world_size == 8


def test_rank_means_the_rank_of_this_node() -> None:
    call = read("--worker_num 4 --rank 1 pretrain_gpt.py")
    assert call.options["node_rank"] == "1" and "rank_table_file" not in call.options
    assert "--rank_table_file" in call.notes[0]


def test_abbreviations_as_argparse_takes_them() -> None:
    assert read("--cluster 300 --local 2 p.py").options == {"cluster_time_out": "300", "local_worker_num": "2"}
    with pytest.raises(UsageError, match="--worker_num or --worker_log_name"):
        read("--worker 8 p.py")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--worker_num --node_rank 0 pretrain_gpt.py", "--worker_num has no value"),
        ("--worker_num eight pretrain_gpt.py", "expects a whole number and got 'eight'"),
        ("--worker_num 0 pretrain_gpt.py", "at least one worker"),
        ("--nproc_per_node 8 pretrain_gpt.py", "msrun has no option --nproc_per_node"),
        ("--worker-num 8 pretrain_gpt.py", "did you mean --worker_num"),
        ("--worker_num 8", "names no program"),
        ("--worker_num 8 python", "without a program"),
    ],
)
def test_each_mistake_has_its_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        read(text)


def test_values_that_a_dry_run_does_not_need_may_be_empty() -> None:
    call = read("--local_worker_num 8 --worker_num 16 --node_rank --master_addr --master_port 6000 posttrain_gpt.py")
    assert call.world_size == 16 and "node_rank" not in call.options
    assert any("--node_rank has no value" in note for note in call.notes)


def test_placeholders_of_several_words() -> None:
    call = read("--master_addr your master IP --worker_num 8 --master_port your port, please pretrain_gpt.py --bf16")
    assert call.program == "pretrain_gpt.py" and call.world_size == 8
    assert "'master IP port, please'" in call.dropped[0]


def test_comments_inside_quoted_arguments() -> None:
    args = "--recompute-granularity full \\ #开启完全重计算 --recompute-method uniform \\ # one layer each --bf16 \\"
    call = read("--worker_num 4 \\ #four pretrain_gpt.py " + args)
    assert call.program_args == ("--recompute-granularity", "full", "--recompute-method", "uniform", "--bf16")
    assert call.world_size == 4
    assert any("#开启完全重计算" in words and "full" in words for words in call.dropped)


def test_python_before_the_program() -> None:
    assert read("--worker_num 2 python -u train.py --x 1").program == "train.py"


words = st.text(st.characters(blacklist_characters="\0"), max_size=12)
plain = st.from_regex(r"[a-z0-9_./]{1,12}", fullmatch=True).filter(lambda word: not word.endswith(".py"))


@settings(deadline=None)
@given(st.lists(words, max_size=30))
def test_any_words_give_a_call_or_a_sentence(argv: list[str]) -> None:
    try:
        call = read_msrun_call(argv, "/")
    except UsageError as error:
        assert str(error).endswith((".", "?)"))
    else:
        assert call.program and call.argv == tuple(argv) and call.world_size >= 1


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(OPTIONS), st.integers(1, 4096).map(str)),
    st.booleans(),
    st.lists(st.tuples(st.from_regex(r"--[a-z-]{2,10}", fullmatch=True), st.lists(plain, max_size=2)), max_size=8),
)
def test_what_was_written_is_read(options: dict[str, str], equals: bool, flags: list[tuple[str, list[str]]]) -> None:
    argv = [word for name, value in options.items() for word in ([f"--{name}={value}"] if equals else [f"--{name}", value])]
    args = [word for flag, values in flags for word in (flag, *values)]
    call = read_msrun_call([*argv, "pretrain_gpt.py", *args], "/")
    assert call.options == options and call.program_args == tuple(args) and not call.dropped


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.from_regex(r"--[a-z]{2,10}", fullmatch=True), plain), max_size=8),
    st.lists(st.text(st.characters(whitelist_categories=("L", "N")), min_size=1, max_size=6), max_size=3),
)
def test_comment_debris_never_changes_the_arguments(flags: list[tuple[str, str]], comment: list[str]) -> None:
    clean = [word for pair in flags for word in pair]
    dirty = [word for pair in flags for word in (*pair, "\\", "#", *comment)]
    assert drop_comments(dirty)[0] == clean
