#!/bin/bash
# Qwen3-30B-A3B pretraining on 16 cards: 128 experts over EP 4, four pipeline stages, every layer recomputed.
#
#   mindspeed-dryrun launch examples/pretrain_qwen3_30b_a3b_4k_ms.sh --set EP=2

export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=1
PP=4
EP=4
SEQ_LEN=4096
MBS=1
GBS=256

DISTRIBUTED_ARGS="--worker_num 16 --local_worker_num 8 --node_rank 0 --master_addr localhost --master_port 6000 --join True"

MOE_ARGS="
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm --norm-topk-prob
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001
    --moe-token-dispatcher-type alltoall_seq --moe-permutation-async-comm
    --moe-layer-freq -1 --first-k-dense-replace -1 --gemm-gradient-accumulation-fusion
    --expert-model-parallel-size $EP
"

GPT_ARGS="
    --use-mcore-models --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 4 --qk-layernorm
    --padded-vocab-size 151936 --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights
    --disable-bias-linear --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 1000000 --max-position-embeddings $SEQ_LEN --seq-length $SEQ_LEN
    --attention-dropout 0.0 --hidden-dropout 0.0
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --micro-batch-size $MBS --global-batch-size $GBS --train-iters 2000
    --lr 1.25e-6 --min-lr 1.25e-7 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 1e-1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.01 --seed 42
    --bf16 --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb
    --use-rotary-position-embeddings --no-masked-softmax-fusion --attention-softmax-in-fp32
    --no-gradient-accumulation-fusion
    --data-path ./dataset/enwiki_text_document --split 100,0,0
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path ./qwen3_30b_a3b_hf
    --load ./model_weights/qwen3_30b_a3b_mcore --save ./output-model/qwen3_30b_a3b
    --log-interval 1 --save-interval 2000 --eval-interval 2000 --eval-iters 0 --no-load-optim --no-load-rng
    --distributed-backend nccl --ai-framework mindspore
"

mkdir -p logs
msrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS $MOE_ARGS 2>&1 | tee logs/pretrain_qwen3_30b_a3b.log
