#!/bin/bash
# A model of 20B parameters with the widths of GPT-NeoX: GELU, LayerNorm, biases, partly rotary positions.
#   GPUS=4 GPU_GB=80 DATA=my_text_document TOKENIZER=folder SAVE=checkpoints/run examples/gpt_20b.sh [more flags]
# GPUS: of one node, 1, 2, 4 or 8; GPU_GB: 40, 80 or 141. Without DATA it trains on mock data. Under SLURM:
#   sbatch --gpus-per-node=4 --export=ALL,GPU_GB=80 examples/slurm/torchrun.sbatch examples/gpt_20b.sh
# Tests shrink the sizes; a plan below holds for the sizes as they are.
set -euo pipefail
REPOSITORY=$(cd "$(dirname "$0")/.." && pwd)
NAME=gpt-20b
GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-1}}
GPU_GB=${GPU_GB:-80}
SEQ_LENGTH=${SEQ_LENGTH:-2048}
VOCAB_SIZE=${VOCAB_SIZE:-50432}

MODEL=(
    --num-layers "${NUM_LAYERS:-44}" --hidden-size "${HIDDEN_SIZE:-6144}" --ffn-hidden-size "${FFN_HIDDEN_SIZE:-24576}"
    --num-attention-heads "${NUM_HEADS:-64}"
    --position-embedding-type rope --rotary-percent 0.25 --untie-embeddings-and-output-weights
)

# A plan of one's own: give TENSOR, RECOMPUTE (full or none), GRADIENTS (bf16 or fp32) and BUDGET_GIB (GiB or none).
if [ -z "${BUDGET_GIB:-}" ]; then
# begin plans (written by examples/plan_cells.py)
case "$GPUS x $GPU_GB GB" in
"1 x 40 GB")
    IMPOSSIBLE="bf16 weights 38.3 and gradients 38.3 GiB exceed the usable 37.0 GiB before any optimizer state"
    ;;
"2 x 40 GB")
    IMPOSSIBLE="bf16 weights 19.1 and gradients 19.1 GiB of each GPU at tensor parallel 2 exceed the usable 37.0 GiB before any optimizer state"
    ;;
"4 x 40 GB")
    # GPU: 34.2 of 37.0 usable GiB = weights 9.6, gradients 9.6 (bf16), activations
    # 4.7, logits or a layer's largest tensors 0.3, optimizer state 7.1, slots and upcast 2.9.
    # bf16 gradients: fp32 ones would take 19.2 GiB.
    # Host: 170.8 GiB of the node, pinned: 15 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 100 % (bound by d2h).
    TENSOR=4 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=11
    ;;
"8 x 40 GB")
    # GPU: 34.8 of 37.0 usable GiB = weights 9.6, gradients 9.6 (bf16), activations
    # 4.7, logits or a layer's largest tensors 0.3, optimizer state 9.2, slots and upcast 1.5.
    # bf16 gradients: fp32 ones would take 19.2 GiB.
    # Host: 123.8 GiB of the node, pinned: 38 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 100 % (bound by dram).
    TENSOR=4 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=11
    ;;
"1 x 80 GB")
    IMPOSSIBLE="bf16 weights 38.3 and gradients 38.3 GiB exceed the usable 75.0 GiB before any optimizer state"
    ;;
"2 x 80 GB")
    # GPU: 72.8 of 75.0 usable GiB = weights 19.1, gradients 19.1 (bf16), activations
    # 9.4, logits or a layer's largest tensors 0.5, optimizer state 21.1, slots and upcast 3.5.
    # bf16 gradients: fp32 ones would take 38.3 GiB.
    # Host: 171.0 GiB of the node, pinned: 23 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 75 % (bound by cpu).
    TENSOR=2 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=25
    ;;
"4 x 80 GB")
    # GPU: 72.5 of 75.0 usable GiB = weights 19.1, gradients 19.1 (bf16), activations
    # 9.4, logits or a layer's largest tensors 0.5, optimizer state 21.5, slots and upcast 2.9.
    # bf16 gradients: fp32 ones would take 38.3 GiB.
    # Host: 121.6 GiB of the node, pinned: 45 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 76 % (bound by cpu).
    TENSOR=2 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=25
    ;;
"8 x 80 GB")
    # GPU: 72.1 of 75.0 usable GiB = weights 19.1, gradients 19.1 (bf16), activations
    # 9.4, logits or a layer's largest tensors 0.5, optimizer state 23.9, slots and upcast 0.0.
    # bf16 gradients: fp32 ones would take 38.3 GiB.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=2 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=none
    ;;
"1 x 141 GB")
    # GPU: 130.5 of 132.0 usable GiB = weights 38.3, gradients 38.3 (bf16), activations
    # 18.6, logits or a layer's largest tensors 0.8, optimizer state 31.6, slots and upcast 2.8.
    # bf16 gradients: fp32 ones would take 76.6 GiB.
    # Host: 194.3 GiB of the node, pinned: 16 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 58 % (bound by h2d).
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=35
    ;;
"2 x 141 GB")
    # GPU: 130.7 of 132.0 usable GiB = weights 38.3, gradients 38.3 (bf16), activations
    # 18.6, logits or a layer's largest tensors 0.8, optimizer state 31.2, slots and upcast 3.5.
    # bf16 gradients: fp32 ones would take 76.6 GiB.
    # Host: 135.7 GiB of the node, pinned: 33 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 99 % (bound by d2h).
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=35
    ;;
"4 x 141 GB")
    # GPU: 130.6 of 132.0 usable GiB = weights 38.3, gradients 38.3 (bf16), activations
    # 18.6, logits or a layer's largest tensors 0.8, optimizer state 31.7, slots and upcast 2.9.
    # bf16 gradients: fp32 ones would take 76.6 GiB.
    # Host: 69.4 GiB of the node, pinned: 66 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 96 % (bound by dram).
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=35
    ;;
"8 x 141 GB")
    # GPU: 120.0 of 132.0 usable GiB = weights 38.3, gradients 38.3 (bf16), activations
    # 18.6, logits or a layer's largest tensors 0.8, optimizer state 23.9, slots and upcast 0.0.
    # bf16 gradients: fp32 ones would take 76.6 GiB.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=none
    ;;
*)
    IMPOSSIBLE="there is no plan for it; GPUS is 1, 2, 4 or 8 (of one node) and GPU_GB is 40, 80 or 141"
    ;;
esac
# end plans (written by examples/plan_cells.py)
fi

source "$(dirname "$0")/launch.sh"
