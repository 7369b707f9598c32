#!/bin/bash
# Qwen3-8B pretraining on 8 cards: four pipeline stages, two data-parallel replicas that share the optimizer's states.
#
#   mindspeed-dryrun launch examples/pretrain_qwen3_8b_ms.sh --set MBS=2

export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=1
PP=4
SEQ_LEN=4096
MBS=1
GBS=64

DISTRIBUTED_ARGS="--worker_num 8 --local_worker_num 8 --node_rank 0 --master_addr localhost --master_port 6000 --join True"

GPT_ARGS="
    --use-mcore-models --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
    --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 8 --qk-layernorm
    --padded-vocab-size 151936 --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights
    --disable-bias-linear --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 1000000 --max-position-embeddings 32768 --seq-length $SEQ_LEN
    --attention-dropout 0.0 --hidden-dropout 0.0
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size $MBS --global-batch-size $GBS --train-iters 2000
    --lr 1.25e-6 --min-lr 1.25e-7 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 1e-1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.01 --seed 42
    --bf16 --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb
    --no-masked-softmax-fusion --attention-softmax-in-fp32 --no-gradient-accumulation-fusion
    --data-path ./dataset/enwiki_text_document --split 100,0,0
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path ./qwen3_8b_hf
    --load ./model_weights/qwen3_8b_mcore --save ./output-model/qwen3_8b
    --log-interval 1 --save-interval 2000 --eval-interval 2000 --eval-iters 0 --no-load-optim --no-load-rng
    --distributed-backend nccl --ai-framework mindspore
"

mkdir -p logs
msrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS 2>&1 | tee logs/pretrain_qwen3_8b.log
