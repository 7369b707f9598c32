#!/bin/bash
# The strategy lab: Qwen2.5-7B on 8 cards with 4096 tokens. The variants beside this script set TP, PP and EXTRA_ARGS.
#
#   mindspeed-dryrun launch examples/lab/tp4pp2.sh

export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=${TP:-2}
PP=${PP:-4}
SEQ_LEN=${SEQ_LEN:-4096}
NUM_LAYERS=${NUM_LAYERS:-28}
MBS=1
GBS=64

msrun --worker_num 8 --local_worker_num 8 --node_rank 0 --master_addr localhost --master_port 6000 --log_dir msrun_log \
    --join True pretrain_gpt.py \
    --use-mcore-models --num-layers $NUM_LAYERS --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 \
    --group-query-attention --num-query-groups 4 --padded-vocab-size 152064 --make-vocab-size-divisible-by 1 \
    --untie-embeddings-and-output-weights --add-qkv-bias --disable-bias-linear --swiglu --normalization RMSNorm \
    --norm-epsilon 1e-6 --position-embedding-type rope --rotary-base 1000000 --max-position-embeddings 32768 \
    --seq-length $SEQ_LEN --attention-dropout 0.0 --hidden-dropout 0.0 \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel \
    --micro-batch-size $MBS --global-batch-size $GBS --train-iters 10 --lr 1.25e-6 --min-lr 1.25e-7 \
    --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 1e-1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 \
    --init-method-std 0.01 --initial-loss-scale 4096 --bf16 --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu \
    --use-fused-rotary-pos-emb --use-rotary-position-embeddings --no-masked-softmax-fusion --attention-softmax-in-fp32 \
    --no-gradient-accumulation-fusion --data-path ./dataset/alpaca_text_document --split 100,0,0 \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path ./model_from_hf/qwen2.5_7b_hf \
    --load "./convert-model/tp${TP}pp${PP}" --save "./output-model/tp${TP}pp${PP}" \
    --log-interval 1 --save-interval 10 --eval-interval 10 --eval-iters 0 --no-load-optim --no-load-rng \
    --distributed-backend nccl --ai-framework mindspore $EXTRA_ARGS | tee "logs/tp${TP}pp${PP}.log"
