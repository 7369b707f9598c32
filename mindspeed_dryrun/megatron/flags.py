"""The flags of Megatron, MindSpeed and MindSpeed-LLM: one row each, and the only table of them.

What the embedded trainer does with a flag:

- `modelled`: it changes memory, and the trainer allocates accordingly (`modelled.py` holds these, as typed fields);
- `ignored`: it cannot change the memory of a training step; taken and listed;
- `refused`: it changes memory and is not modelled; the run stops and names the flag.

A flag that is not in the table is unknown, and stops the run too: nobody can say what it would have allocated.
`python -m mindspeed_dryrun.megatron.flags` prints the table as Markdown (docs/embedded_trainer_flags.md).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_dryrun.errors import UsageError, did_you_mean
from mindspeed_dryrun.language import message
from mindspeed_dryrun.megatron.arguments import pairs
from mindspeed_dryrun.megatron.modelled import GROUPS, TrainerFlags


class Handling(enum.Enum):
    """What the embedded trainer does with a flag."""

    MODELLED = "modelled"
    IGNORED = "ignored"
    REFUSED = "refused"


TAGS = {
    "required": "a job without it is not a Megatron job",
    "strategy": "decided by a parallel strategy: search takes it out of the script's arguments and puts its own in",
    "input": "names or needs files of the user's that a dry run does not read",
    "tokenizer": "names files of the tokenizer, of which a dry run needs the vocabulary's size only",
    "output": "makes the trainer write files, or act beside its training",
    "length": "counted in samples or iterations beyond a short run, or ends it early",
    "filling": "fills the pipeline in another way than 1F1B, so that a short run needs every microbatch",
    "fewer_states": "weights, gradients or optimizer states take less than plain mixed precision needs",
    "fewer_activations": "less than all of a layer's activations is kept for its backward pass",
}
# What these flags are about cannot change how long an iteration takes.
_TIMELESS = {"numbers", "data", "checkpoint", "logging", "names", "inference"}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag. `takes` is 0 (a switch), 1, or -1 (any number of values)."""

    name: str
    takes: int
    about: str  # model, layers, layout, batch, recompute, optimizer, experts, data, checkpoint, logging, …
    effect: str  # on memory, in words
    handling: Handling
    tags: frozenset[str] = frozenset()  # of TAGS
    convert: Callable[[str], Any] = str
    default: Any = None
    allowed: tuple[Any, ...] = ()  # modelled with these values only; empty means any
    harmless: tuple[str, ...] = ()  # values of a refused flag that ask for nothing (`--tp-x 1`)

    @property
    def key(self) -> str:
        """As an attribute of parsed arguments: `num_layers`."""
        return self.name[2:].replace("-", "_")

    @property
    def changes_memory(self) -> bool:
        """Whether a training step may hold more or less with it."""
        return self.handling is not Handling.IGNORED

    @property
    def changes_time(self) -> bool:
        """Whether an iteration may take longer or shorter with it."""
        return self.about not in _TIMELESS


def _modelled() -> list[Flag]:
    """The typed fields of `modelled.py`."""
    converters: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": bool}
    rows = []
    for group in GROUPS:
        for item in dataclasses.fields(group):
            kind = str(item.type).removesuffix(" | None")
            rows.append(
                Flag(
                    name="--" + item.name.replace("_", "-"),
                    takes=0 if kind == "bool" else item.metadata.get("takes", 1),
                    about=group.about,
                    effect=str(group.__doc__),
                    handling=Handling.MODELLED,
                    tags=frozenset(item.metadata.get("tags", ())),
                    convert=converters[kind],
                    default=item.default,
                    allowed=item.metadata.get("allowed", ()),
                )
            )
    return rows


def _group(handling: Handling, about: str, effect: str, names: str) -> list[Flag]:
    """`name` is a switch, `name=` takes one value, `name=*` any number, `name=1|none` one, harmless if 1 or none;
    `name@tag,tag` has tags."""
    rows = []
    for word in names.split():
        spelled, _, tags = word.partition("@")
        name, equals, values = spelled.partition("=")
        rows.append(
            Flag(
                name=f"--{name}",
                takes=0 if not equals else -1 if values == "*" else 1,
                about=about,
                effect=effect,
                handling=handling,
                tags=frozenset(tags.split(",")) - {""},
                harmless=tuple(values.split("|")) if values not in ("", "*") else (),
            )
        )
    return rows


# `add_megatron_arguments`: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.12.1/megatron/training/arguments.py#L34
# `process_args`: https://gitcode.com/Ascend/MindSpeed-LLM/blob/v2.2.0/mindspeed_llm/training/arguments.py#L55
_TABLE: tuple[Flag, ...] = (
    *_modelled(),
    *_group(Handling.IGNORED, "numbers", "learning rate, seed and other numbers that are not sizes", """
        lr= min-lr= lr-decay-style= lr-decay-iters=@length lr-decay-samples=@length lr-warmup-fraction=
        lr-warmup-iters=@length lr-warmup-samples=@length lr-warmup-init= lr-wsd-decay-style=
        lr-wsd-decay-iters=@length lr-wsd-decay-samples=@length decoupled-lr= decoupled-min-lr= adam-beta1=
        adam-beta2= adam-eps= start-weight-decay= end-weight-decay= weight-decay-incr-style= sgd-momentum=
        head-lr-mult= seed= moe-router-bias-update-rate= init-method-std= init-method-xavier-uniform norm-epsilon=
        min-loss-scale= loss-scale-window= hysteresis= override-opt_param-scheduler use-checkpoint-opt_param-scheduler
        no-initialization use-cpu-initialization data-parallel-random-init no-persist-layer-norm ema-decay=
        pre-tockens= next-tockens= sparse-mode= original-max-position-embeddings= low-freq-factor= high-freq-factor=
        rope-scaling-factor= rotary-scaling-factor= rotary-seq-len-interpolation-factor= beta-fast= beta-slow=
        rope-scaling-mscale= rope-scaling-mscale-all-dim= rope-scaling-original-max-position-embeddings=
        dynamic-factor= ddp-average-in-collective no-gradient-reduce-div-fusion yarn-scaling-factor=
        rope-scaling-beta-fast= rope-scaling-beta-slow= long-factor= short-factor= long-mscale= short-mscale= mscale=
        mscale-all-dim="""),
    *_group(Handling.IGNORED, "data", "data set and tokenizer: replaced by mock data of the same shape", """
        data-path=*@input train-data-path=*@input valid-data-path=*@input test-data-path=*@input data-args-path=@input
        per-split-data-args-path=@input data-cache-path=@output split= mock-data dataloader-type= num-workers=
        num-dataset-builder-threads= no-mmap-bin-files eod-mask-loss no-shuffle full-shuffle-instruction-dataset
        no-create-attention-mask-in-dataloader tokenizer-type= tokenizer-name-or-path=@tokenizer
        tokenizer-model=@tokenizer tokenizer-kwargs=* tokenizer-not-use-fast vocab-file=@tokenizer
        merge-file=@tokenizer vocab-extra-ids= tiktoken-pattern= tiktoken-num-special-tokens=
        tiktoken-special-tokens=* tokenizer-padding-side= dataset-additional-keys=*
        hf-chat-template no-chat-template instruction-template= enable-thinking= cut-max-seqlen add-eos-token=*
        encoder-seq-length= decoder-seq-length= sample-rate= mask-prob= short-seq-prob= retriever-seq-length=
        no-data-sharding s3-cache-path= iterations-to-skip=*@length enable-share-memory return-document-ids
        train-samples=@length rampup-batch-size=*@length decrease-batch-size-if-needed"""),
    *_group(Handling.IGNORED, "checkpoint", "checkpoints: a dry run loads and saves nothing", """
        load=@input lora-load=@input ref-model=@input refer-model-iter= lora-ckpt-filter save-lora-to-hf
        save=@output save-interval= no-load-optim
        no-load-rng no-save-optim no-save-rng finetune pretrained-checkpoint=@input ckpt-step=@input ckpt-format=
        dist-ckpt-format= dist-ckpt-strictness= use-dist-ckpt async-save@output use-persistent-ckpt-worker
        auto-detect-ckpt-format@input ckpt-fully-parallel-save ckpt-fully-parallel-load no-ckpt-fully-parallel-save
        ckpt-assume-constant-structure ckpt-convert-format= ckpt-convert-save= exit-on-missing-checkpoint@input
        use-checkpoint-args@input use-mp-args-from-checkpoint-args@input load-checkpoint-loosely
        no-use-tokenizer-model-from-checkpoint-args no-shared-storage persistent-save-interval=
        non-persistent-save-interval=@output non-persistent-ckpt-type= non-persistent-global-ckpt-dir=@output
        non-persistent-local-ckpt-dir=@output non-persistent-local-ckpt-algo= enable-hf2mg-convert@input
        enable-mg2hf-convert@output model-type-hf= mg-save-dir=@output hf-save-dir=@output hf-cfg-dir=@input
        save-layer-by-layer"""),
    *_group(Handling.IGNORED, "logging", "logging, evaluation, profiling and process control", """
        log-interval= log-throughput moe-per-layer-logging log-params-norm log-progress@output
        log-timers-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard
        log-validation-ppl-to-tensorboard no-log-loss-scale-to-tensorboard log-straggler tensorboard-dir=@output
        tensorboard-log-interval= tensorboard-queue-size= wandb-project=@output wandb-exp-name=@output
        wandb-save-dir=@output use-wandb logging-level= timing-log-level= timing-log-option=
        no-barrier-with-level-1-timing no-one-logger one-logger-project= one-logger-run-name= one-logger-async
        app-tag-run-name= app-tag-run-version= config-logger-dir= eval-interval= eval-iters= skip-train@length
        test-mode exit-interval=@length exit-duration-in-mins=@length train-epochs=@length exit-signal-handler@output
        profile@output profile-step-start= profile-step-end= profile-ranks=* profile-level= profile-with-cpu
        profile-with-stack profile-with-memory profile-record-shapes profile-save-path= profile-export-type=
        profile-data-simplification use-pytorch-profiler@output record-memory-history@output memory-snapshot-path=
        manual-gc manual-gc-interval= no-manual-gc-eval check-for-spiky-loss check-for-large-grads
        check-weight-hash-across-dp-replicas-interval= rerun-mode= error-injection-rate= error-injection-type=
        result-rejected-tracker-filename= enable-high-availability@output enable-hbmfault-repair enable-worker-reboot
        train-sync-interval= disable-straggler-on-startup straggler-ctrlr-port= straggler-minmax-count=
        adlr-autoresume adlr-autoresume-interval= run-workload-inspector-server enable-ft-package calc-ft-timeouts"""),
    *_group(Handling.IGNORED, "communication", "how the processes talk; HCCL's own buffers are outside the pool", """
        distributed-backend= distributed-timeout-minutes= local-rank= lazy-mpu-init= nccl-communicator-config-path=
        disable-gloo-group disable-gloo-process-groups hccl-group-buffer= hccl-group-buffer-adaptive
        hccl-ep-group-buffer-adaptive-factor= hccl-slice-size= pipeline-model-parallel-comm-backend=
        no-scatter-gather-tensors-in-pipeline no-align-grad-reduce no-align-param-gather
        no-async-tensor-model-parallel-allreduce cp-comm-type=* use-ring-exchange-p2p async-log-allreduce
        optimize-send-recv-comm@filling tp-comm-bootstrap-backend="""),
    *_group(Handling.IGNORED, "names", "names of what is done here anyway", """
        use-mcore-models use-fused-swiglu no-rope-fusion ai-framework= jit-compile use-deter-comp
        npu-deterministic deterministic-mode attention-backend= kv-head-repeat-before-uly-alltoall optimization-level=
        te-rng-tracker inference-rng-tracker no-use-rts disable-bf16-reduced-precision-matmul prompt-type=
        prompt-type-path= bert-no-binary-head op-cal-tflops input-jitter"""),
    *_group(Handling.REFUSED, "experts", "a way to run experts that is not modelled: run it with the script's own trainer", """
        moe-input-jitter-eps= moe-extended-tp moe-allgather-overlap-comm
        moe-fb-overlap
        moe-adaptive-recompute-activation@fewer_activations moe-adaptive-recompute-activation-scale=
        moe-layer-recompute@fewer_activations moe-model-type= moe-bmm-mc2 moe-dynamic-padding moe-enable-deepep
        moe-no-drop moe-revert-type-after-topk moe-shared-expert-overlap moe-train-capacity-factor=
        moe-unperm2-mem-optim moe-unperm2-mem-optim-swap moe-use-legacy-grouped-gemm moe-use-sinkhorn
        moe-use-upcycling moe-zerc n-group= topk-group= routed-scaling-factor= shared-expert-gate-output-dimension=
        router-gating-in-fp32 expert-interval= balanced-moe-experts
        balanced-moe-hot-expert-num= trans-hot-expert-group-num= use-pipe-experts pipe-experts-multi-data=
        pipe-experts-multi-stream ampipe-degree= ampipe-tp-sp-comm-overlap enable-token-rearrange-opt fix-router
        noisy-gate-policy= topk-softmax-in-fp32 enable-a2avc=0"""),
    *_group(Handling.REFUSED, "attention", "multi-latent attention that is not modelled: use the script's trainer", """
        multi-head-latent-attention qk-nope-head-dim= qk-rope-head-dim= mla-fa-divide-qk mla-swap-core-attn-out
        mla-up-proj-tp-overlap mla-zero-memory recompute-mla-up-proj"""),
    *_group(Handling.REFUSED, "fine-tuning", "LoRA of a kind that is not modelled: run it with the script's own trainer", """
        lora-modules-to-save=* lu-lora-final-layer-index= lu-lora-lr= lu-lora-lr-ratio="""),
    *_group(Handling.REFUSED, "fine-tuning", "4-bit weights of QLoRA need bitsandbytes, which MindSpore does not have, and "
            "MindSpeed-LLM's own trainer stops with --overlap-param-gather (AssertionError)", """
        qlora qlora-nf4 qlora-save-dequantize"""),
    *_group(Handling.REFUSED, "fine-tuning", "post-training that is not modelled: run it with the script's own trainer", """
        simpo-loss-type= simpo-beta= simpo-label-smoothing= reward-model=
        gamma-beta-ratio= orm max-prompt-length= rollout-batch-size= n-samples-per-prompt= ppo-mini-batch-size=
        ppo-epochs= kl-coef= clip-ratio= entropy-coeff= critic-mini-batch-size= critic-update-epochs=
        num-gpus-for-train= num-gpus-for-infer="""),
    *_group(Handling.REFUSED, "fine-tuning", "MindSpeed-LLM's posttrain_gpt.py does not know it either, and stops", """
        reward-tokens=* placeholder-token="""),
    *_group(Handling.REFUSED, "model", "other model kinds: run them with the script's own trainer", """
        use-legacy-models mtp-after-norm
        is-hybrid-model hybrid-attention-ratio= hybrid-mlp-ratio= hybrid-override-pattern= mamba-chunk-size=
        mamba-d-conv= mamba-d-ssm= mamba-expand= mamba-head-dim= mamba-num-groups= mamba-state-dim=
        full-attention-interval= linear-key-head-dim= linear-num-key-heads= linear-num-value-heads=
        linear-value-head-dim= share-kvstates cla-share-factor=1 no-enable-linear-qkv use-moba-attn moba-chunk-size=
        moba-topk= moba-calc-method= heterogeneous-layers-config-path= heterogeneous-layers-config-encoded-json=
        retro-add-retriever retro-project-dir= encoder-num-layers= decoder-num-layers=
        encoder-tensor-model-parallel-size=0 encoder-pipeline-model-parallel-size=0
        pipeline-model-parallel-split-rank= vision-pretraining mrope-section=* yaml-cfg="""),
    *_group(Handling.REFUSED, "inference", "inference and evaluation: not a training run", """
        max-new-tokens= do-sample temperature= top-k= top-p= greedy task=* task-data-path=* evaluation-batch-size=
        eval-language= max-eval-samples= broadcast chain-of-thought history-turns= max-length= inference-max-requests=
        inference-max-seq-length= inference-dynamic-batching inference-batch-times-seqlen-threshold=
        max-tokens-to-oom= origin-postprocess alternative-prompt"""),
    *_group(Handling.REFUSED, "layers", "changes what the layers allocate and is not modelled", """
        use-fused-mlp input-layernorm-in-fp32 add-output-layer-bias add-dense-bias
        skip-bias-add embed-layernorm apply-layernorm-1p apply-residual-connection-post-layernorm squared-relu
        openai-gelu onnx-safe= attn-logit-softcapping= attention-mask-on-cpu
        use-fusion-attn-v2 use-kv-cache cp-attention-mask-type=causal square-alibi-mask fill-neg-inf
        alibi-fusion-attn-type= alibi-diagonal-opposite use-rope-scaling unaligned-linear compress-dense=
        calculate-per-token-loss no-clone-scatter-output-in-embedding defer-embedding-wgrad-compute
        wgrad-deferral-limit= flash-decode"""),
    *_group(Handling.REFUSED, "schedule", "changes how the model is split or scheduled and is not modelled", """
        schedules-method=@filling enable-seq1f1b@filling,fewer_activations seq1f1b-splits=4
        seq1f1b-balance-method=average tp-2d tp-x=1 tp-y=1 enable-overlap-ag-with-matmul enable-overlap-matmul-with-rs
        enable-backward-overlap-ag-with-matmul use-nd-matmul nd1-dim1-size= nd2-dim1-size= use-ascend-mc2 use-mc2
        coc-mode= coc-parallel-num=1 tp-comm-overlap tp-comm-overlap-cfg= tp-comm-overlap-rs-dgrad
        disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
        disable-tp-comm-split-ag disable-tp-comm-split-rs account-for-embedding-in-pipeline-split@strategy
        account-for-loss-in-pipeline-split@strategy pipeline-num-transformer-layers= use-nanopipe@filling
        use-nanopipe-swap@fewer_activations recompute-in-bubble@fewer_activations
        recompute-in-advance@fewer_activations automated-pipeline automated-pipeline-perf pp-schedule-list=
        optimized-mbs-list= optimized-mbs-mode mbs-idx= optimize-vpp-send-recv-comm
        overlap-p2p-communication-warmup-flush overlap-param-gather-with-optimizer-step
        use-multiparameter-pipeline-model-parallel dist-train dualpipev-dw-detach context-parallel-kv-cache-policy=
        context-parallel-cache-interval=0 use-ulysses-allgather-kv megatron-cp-in-bnsd
        hierarchical-context-parallel-sizes=* adaptive-cp-dynamic-attn-mask adaptive-cp-manually-set-mask-list
        adaptive-cp-only-reschedule adaptive-cp-without-coarse"""),
    *_group(Handling.REFUSED, "memory", "moves or shrinks memory in a way that is not modelled", """
        low-memory@fewer_states cpu-offloading-num-layers=@fewer_activations smart-swap@fewer_activations
        virtual-optimizer=*@fewer_states optimizer-cpu-offload@fewer_states optimizer-offload-fraction=
        use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params
        use-precision-aware-optimizer@fewer_states main-grads-dtype= main-params-dtype=
        exp-avg-dtype= exp-avg-sq-dtype= o2-gradient o2-optimizer use-ema use-torch-fsdp2@fewer_states
        use-custom-fsdp@fewer_states fsdp2-config-path= init-model-with-meta-device data-parallel-sharding-strategy=
        keep-fp8-transpose-cache-when-using-custom-fsdp suggested-communication-unit-size= layerzero layerzero-config=
        enable-zero3 param-and-grad-buffer-pad= ddp-pad-buckets-for-high-nccl-busbw distributed-optimizer-no-replica
        adaptive-memory-optimization@fewer_activations adaptive-recompute-device-swap
        adaptive-recompute-device-size=@fewer_activations adaptive-recompute-profiling-step=
        recompute-modules=*@fewer_activations recompute-module-list= recompute-type=
        fp8-format=@fewer_states,fewer_activations fp8-recipe= fp8-margin= fp8-interval= fp8-amax-history-len=
        fp8-amax-compute-algo= fp8-param-gather no-fp8-wgrad first-last-layers-bf16 num-layers-at-start-in-bf16=
        num-layers-at-end-in-bf16= enable-cuda-graph external-cuda-graph cuda-graph-scope= cuda-graph-warmup-steps=
        auto-settings auto-settings-type= auto-settings-ranks= auto-settings-work-dir= auto-settings-log-level=
        prof-file= checkpoint-activations enable-elastic-training replication replication-factor= replication-jump=
        save-memory-ratio="""),
)  # fmt: skip

FLAGS: dict[str, Flag] = {flag.name: flag for flag in _TABLE}


@functools.cache
def with_tag(*tags: str) -> tuple[str, ...]:
    """Names of the flags that have one of these tags, in the order of the table."""
    return tuple(flag.name for flag in _TABLE if flag.tags & set(tags))


@dataclass(frozen=True)
class FlagReport:
    """What the table says about one argument list. `refused` and `unknown` stop a run; `ignored` is only listed."""

    refused: list[str] = field(default_factory=list)  # sentences that begin with the flag
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """The embedded trainer can run these arguments."""
        return not self.refused and not self.unknown

    def problem(self) -> str:
        """One sentence for the person at the keyboard; empty when the arguments can be run."""
        reasons: dict[str, list[str]] = {}
        for sentence in self.refused:
            name, _, why = sentence.partition(": ")
            reasons.setdefault(why, []).append(name)
        if self.unknown:
            reasons[message("not a flag that the embedded trainer knows")] = [
                f"{name}{did_you_mean(name, FLAGS)}" for name in self.unknown
            ]
        parts = [f"{', '.join(names)}: {why}" for why, names in reasons.items()]
        if not parts:
            return ""
        return message(f"The embedded trainer cannot run this job. {'; '.join(parts)}.")


def check(args: Iterable[str]) -> FlagReport:
    """Looks every flag up. Costs no rank: the command line calls it when the embedded trainer is chosen."""
    report = FlagReport()
    for name, values in pairs(list(args)):
        flag = FLAGS.get(name)
        if flag is None:
            report.unknown.append(name or values[0])
        elif flag.handling is Handling.IGNORED:
            report.ignored.append(name)
        elif flag.handling is Handling.REFUSED:
            if not (values and values[0] in flag.harmless):
                report.refused.append(f"{name}: {flag.effect}")
        elif problem := _value_problem(flag, values):
            report.refused.append(f"{name}: {problem}")
    return report


def _value_problem(flag: Flag, values: list[str]) -> str:
    if flag.takes == 0:
        return f"a switch, but '{values[0]}' follows it" if values else ""
    if flag.name == "--spec":
        return "" if _known_spec(values) else f"the layer spec '{' '.join(values)}' is not modelled"
    if flag.takes == -1:
        return ""
    if len(values) != 1:
        return f"takes one value, got '{' '.join(values)}'"
    try:
        value = flag.convert(values[0])
    except ValueError:
        return f"'{values[0]}' is not a value for it"
    if flag.allowed and value not in flag.allowed:
        return f"'{values[0]}' is not modelled (only {', '.join(map(str, flag.allowed))})"
    return ""


def _known_spec(values: list[str]) -> bool:
    """Specs whose layers are those built here: the plain one with query and key norms (Qwen3, Qwen2-MoE, Bailing), that
    with post-norms (Gemma2, Grok), and multi-latent attention (DeepSeek)."""
    known = ("qwen3_spec", "qwen2_moe_spec", "bailing_spec", "gemma2_spec", "grok_spec", "deepseek_spec")
    return bool(values) and values[0].rpartition(".")[2] in known


def parse(args: Sequence[str]) -> TrainerFlags:
    """Every modelled flag's value, defaults included; UsageError where `check` is not content."""
    report = check(args)
    if not report.ok:
        raise UsageError(report.problem())
    values: dict[str, Any] = {}
    for name, words in pairs(args):
        flag = FLAGS[name]
        if flag.handling is Handling.MODELLED:
            values[flag.key] = True if flag.takes == 0 else flag.convert(words[0] if flag.takes == 1 else " ".join(words))
    missing = [name for name in with_tag("required") if FLAGS[name].key not in values]
    if missing:
        raise UsageError(f"The trainer's arguments lack {', '.join(missing)}.")
    return TrainerFlags(**values)


def markdown() -> str:
    """The table as Markdown: one row per effect."""
    rows: dict[tuple[str, str], list[str]] = {}
    for flag in _TABLE:
        name = f"`{flag.name}`"
        if flag.allowed:
            name += " (" + ", ".join(map(str, flag.allowed)) + ")"
        rows.setdefault((flag.handling.value, flag.effect), []).append(name)
    lines = [
        "# Flags of the embedded trainer",
        "",
        "Made by `python -m mindspeed_dryrun.megatron.flags`. A flag that changes memory and is not modelled stops the run by "
        "name; so does a flag that is not in the table.",
        "",
        "| handled | what it changes | flags |",
        "|---|---|---|",
    ]
    lines += [f"| {handled} | {effect} | {' '.join(names)} |" for (handled, effect), names in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
