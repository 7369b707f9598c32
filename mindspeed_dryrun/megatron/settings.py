"""The script's flags with what follows from them: layout, layers of a stage, vocabulary, microbatches. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_dryrun.errors import UsageError
from mindspeed_dryrun.megatron import flags


@dataclass(frozen=True, eq=False)
class Settings:
    """One rank's job. Flag values are read as attributes (`settings.num_layers`); the fields are what is derived."""

    values: Mapping[str, Any]
    rank: int
    world_size: int
    data_parallel_size: int
    virtual_stages: int | None
    padded_vocab: int
    ffn_size: int
    kv_size: int
    query_groups: int
    microbatches: int
    stage_layers: tuple[int, ...] | None
    """Layers of each stage where `--num-layer-list` says so."""
    noop_layers: frozenset[int]
    """Zero-based numbers of the layers that pass their input on."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def rope(self) -> bool:
        return bool(self.use_rotary_position_embeddings or self.position_embedding_type == "rope")

    @property
    def post_norms(self) -> bool:
        """Gemma2's layers, with norms after attention and after the MLP."""
        return bool(self.spec and self.spec.endswith("gemma2_spec"))


def read(args: Sequence[str], rank: int, world_size: int) -> Settings:
    """Settings of one rank, or a UsageError that names the flag Megatron would stumble over."""
    values = flags.parse(args)
    for key in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"):
        if values[key] is None:
            raise UsageError(f"--{key.replace('_', '-')} is missing.")
    _finish(values)
    tp, pp, cp = (values[f"{kind}_size"] for kind in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel"))
    if world_size % (tp * pp * cp):
        raise UsageError(f"{world_size} ranks cannot be split into TP {tp} × PP {pp} × CP {cp}.")
    data_parallel = world_size // (tp * pp * cp)
    per_step = values["micro_batch_size"] * data_parallel
    global_batch = values["global_batch_size"] or per_step
    if global_batch % per_step:
        raise UsageError(
            f"--global-batch-size {global_batch} is not a multiple of --micro-batch-size × data parallel size "
            f"({values['micro_batch_size']} × {data_parallel})."
        )
    stage_layers = _stage_layers(values, pp)
    return Settings(
        values=values,
        rank=rank,
        world_size=world_size,
        data_parallel_size=data_parallel,
        virtual_stages=_virtual_stages(values, pp, stage_layers),
        padded_vocab=_padded_vocab(values, tp),
        ffn_size=values["ffn_hidden_size"] or _default_ffn(values),
        kv_size=values["kv_channels"] or values["hidden_size"] // values["num_attention_heads"],
        query_groups=values["num_query_groups"] if values["group_query_attention"] else values["num_attention_heads"],
        microbatches=global_batch // per_step,
        stage_layers=stage_layers,
        noop_layers=_noop_layers(values),
    )


def _finish(values: dict[str, Any]) -> None:
    """What Megatron and MindSpeed-LLM set from other flags."""
    if values["fp16"] and values["bf16"]:
        raise UsageError("--fp16 and --bf16 exclude each other.")
    if values["recompute_activations"]:
        values["recompute_granularity"] = "selective"
    if values["tensor_model_parallel_size"] == 1:
        values["sequence_parallel"] = False
    if values["no_position_embedding"]:
        values["position_embedding_type"] = "none"
    if values["bf16"] and not values["grad_reduce_in_bf16"]:
        values["accumulate_allreduce_grads_in_fp32"] = True
    if values["context_parallel_size"] > 1:
        values["use_flash_attn"] = True
    if not values["use_flash_attn"]:
        raise UsageError("--use-flash-attn is missing: attention without it is not modelled, and not run by MindSpeed-LLM.")
    if values["reset_position_ids"] and values["context_parallel_size"] > 1:
        raise UsageError("--reset-position-ids with context parallelism is not modelled: run it with the script's own trainer.")
    if values["overlap_param_gather"] and not (values["use_distributed_optimizer"] and values["overlap_grad_reduce"]):
        raise UsageError("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce.")
    if values["reuse_fp32_param"] and not (values["bf16"] and values["use_distributed_optimizer"]):
        raise UsageError("--reuse-fp32-param needs --bf16 and --use-distributed-optimizer.")
    if values["use_ascend_coc"] and not (values["coc_fused_kernel"] and values["sequence_parallel"]):
        raise UsageError("--use-ascend-coc is modelled with --coc-fused-kernel, --sequence-parallel and tensor parallelism only.")
    if values["recompute_granularity"] == "full" and values["recompute_method"] is None:
        raise UsageError("--recompute-granularity full needs --recompute-method.")


def _default_ffn(values: dict[str, Any]) -> int:
    if values["swiglu"]:
        return int((4 * values["hidden_size"] * 2 / 3) / 64) * 64
    return int(4 * values["hidden_size"])


def _padded_vocab(values: dict[str, Any], tp: int) -> int:
    if values["padded_vocab_size"]:
        return int(values["padded_vocab_size"])
    if values["vocab_size"] is None:
        raise UsageError(
            "The script leaves the size of the vocabulary to its tokenizer: give --vocab-size or --padded-vocab-size."
        )
    multiple = values["make_vocab_size_divisible_by"] * tp
    return int(-(-values["vocab_size"] // multiple) * multiple)


def _numbers(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{flag} wants whole numbers with commas between them, not '{text}'.") from None


def _noop_layers(values: dict[str, Any]) -> frozenset[int]:
    return frozenset(_numbers(values["noop_layers"], "--noop-layers")) if values["noop_layers"] else frozenset()


def _stage_layers(values: dict[str, Any], pp: int) -> tuple[int, ...] | None:
    if not values["num_layer_list"] or values["noop_layers"]:
        return None
    layers = _numbers(values["num_layer_list"], "--num-layer-list")
    if len(layers) != pp or sum(layers) != values["num_layers"]:
        raise UsageError(f"--num-layer-list {values['num_layer_list']} must name {values['num_layers']} layers in {pp} stages.")
    return tuple(layers)


def _virtual_stages(values: dict[str, Any], pp: int, stage_layers: tuple[int, ...] | None) -> int | None:
    per_chunk, stages = values["num_layers_per_virtual_pipeline_stage"], values["num_virtual_stages_per_pipeline_rank"]
    if stage_layers is not None:
        if per_chunk or stages:
            raise UsageError("--num-layer-list and virtual pipeline stages exclude each other.")
        return None
    if values["num_layers"] % pp:
        raise UsageError(f"--num-layers {values['num_layers']} is not a multiple of --pipeline-model-parallel-size {pp}.")
    per_stage = values["num_layers"] // pp
    if per_chunk:
        if per_stage % per_chunk:
            raise UsageError(f"{per_stage} layers of a stage are not a multiple of {per_chunk} layers of a virtual stage.")
        stages = per_stage // per_chunk
    if stages and stages > 1 and pp == 1:
        raise UsageError("Virtual pipeline stages need --pipeline-model-parallel-size above 1.")
    return stages if stages and stages > 1 else None
