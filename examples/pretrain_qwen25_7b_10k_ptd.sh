#!/bin/bash
# The same job as pretrain_qwen25_7b_32k_ms.sh on the PyTorch back end: torchrun and torch_npu.
# Qwen2.5-7B pretraining on 4 cards: two pipeline stages of two tensor-parallel ranks, sequences of 10240 tokens.
#
#   mindspeed-dryrun launch examples/pretrain_qwen25_7b_10k_ptd.sh
#   mindspeed-dryrun launch examples/pretrain_qwen25_7b_10k_ptd.sh --set SEQ_LEN=8192 \
#       -- --recompute-granularity full --recompute-method uniform --recompute-num-layers 1

export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True

# Checkpoint, data and tokenizer: a dry run needs none of them.
CKPT_LOAD_DIR="./model_weights/qwen2.5_mcore/iter_0000001"
CKPT_SAVE_DIR="./output-model/qwen25_7b"
DATA_PATH="./dataset/alpaca_text_document"
TOKENIZER_PATH="./qwen2.5_7b_hf"

# Cluster
NPUS_PER_NODE=4
NNODES=1
NODE_RANK=0
MASTER_ADDR=localhost
MASTER_PORT=6000

# Strategy and batch
TP=2
PP=2
CP=1
SEQ_LEN=10240
MBS=1
GBS=64
TRAIN_ITERS=2000

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE
    --nnodes $NNODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
"

MODEL_ARGS="
    --use-mcore-models
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --padded-vocab-size 152064
    --make-vocab-size-divisible-by 1
    --untie-embeddings-and-output-weights
    --add-qkv-bias
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-base 1000000
    --max-position-embeddings 32768
    --seq-length $SEQ_LEN
    --attention-dropout 0.0
    --hidden-dropout 0.0
"

PARALLEL_ARGS="
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size $PP
    --context-parallel-size $CP
    --sequence-parallel
    --micro-batch-size $MBS
    --global-batch-size $GBS
    --distributed-backend nccl
"

TRAIN_ARGS="
    --train-iters $TRAIN_ITERS
    --lr 1.25e-6
    --min-lr 1.25e-7
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 1e-1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.01
    --initial-loss-scale 4096
    --seed 42
    --bf16
    --use-flash-attn
    --use-fused-rmsnorm
    --use-fused-swiglu
    --use-fused-rotary-pos-emb
    --use-rotary-position-embeddings
    --no-masked-softmax-fusion
    --attention-softmax-in-fp32
    --no-gradient-accumulation-fusion
    --no-load-optim
    --no-load-rng
    --no-save-optim
    --no-save-rng
"

DATA_ARGS="
    --data-path $DATA_PATH
    --split 100,0,0
    --tokenizer-type PretrainedFromHF
    --tokenizer-name-or-path $TOKENIZER_PATH
    --load $CKPT_LOAD_DIR
    --save $CKPT_SAVE_DIR
    --log-interval 1
    --save-interval $TRAIN_ITERS
    --eval-interval $TRAIN_ITERS
    --eval-iters 0
"

mkdir -p logs
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \
    $MODEL_ARGS \
    $PARALLEL_ARGS \
    $TRAIN_ARGS \
    $DATA_ARGS \
    2>&1 | tee logs/pretrain_qwen25_7b.log
