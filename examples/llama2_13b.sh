#!/bin/bash
# A model of 13B parameters in the shape of Llama-2.
#   GPUS=4 GPU_GB=80 DATA=my_text_document TOKENIZER=folder SAVE=checkpoints/run examples/llama2_13b.sh [more flags]
# GPUS: of one node, 1, 2, 4 or 8; GPU_GB: 40, 80 or 141. Without DATA it trains on mock data. Under SLURM:
#   sbatch --gpus-per-node=4 --export=ALL,GPU_GB=80 examples/slurm/torchrun.sbatch examples/llama2_13b.sh
# Tests shrink the sizes; a plan below holds for the sizes as they are.
set -euo pipefail
REPOSITORY=$(cd "$(dirname "$0")/.." && pwd)
NAME=llama2-13b
GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-1}}
GPU_GB=${GPU_GB:-80}
SEQ_LENGTH=${SEQ_LENGTH:-4096}
VOCAB_SIZE=${VOCAB_SIZE:-32000}

MODEL=(
    --num-layers "${NUM_LAYERS:-40}" --hidden-size "${HIDDEN_SIZE:-5120}" --ffn-hidden-size "${FFN_HIDDEN_SIZE:-13824}"
    --num-attention-heads "${NUM_HEADS:-40}"
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
)

# A plan of one's own: give TENSOR, RECOMPUTE (full or none), GRADIENTS (bf16 or fp32) and BUDGET_GIB (GiB or none).
if [ -z "${BUDGET_GIB:-}" ]; then
# begin plans (written by examples/plan_cells.py)
case "$GPUS x $GPU_GB GB" in
"1 x 40 GB")
    IMPOSSIBLE="bf16 weights 24.2 and gradients 24.2 GiB exceed the usable 37.0 GiB before any optimizer state"
    ;;
"2 x 40 GB")
    # GPU: 35.5 of 37.0 usable GiB = weights 12.1, gradients 12.1 (bf16), activations
    # 1.1, logits or a layer's largest tensors 0.4, optimizer state 6.7, slots and upcast 3.1.
    # Full recomputation: activations would take 14.3 GiB otherwise.
    # bf16 gradients: fp32 ones would take 24.2 GiB.
    # Host: 123.9 GiB of the node, pinned: 11 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 75 % (bound by h2d).
    TENSOR=2 RECOMPUTE=full GRADIENTS=bf16 BUDGET_GIB=10
    ;;
"4 x 40 GB")
    # GPU: 35.7 of 37.0 usable GiB = weights 12.1, gradients 12.1 (bf16), activations
    # 1.1, logits or a layer's largest tensors 0.4, optimizer state 8.0, slots and upcast 2.0.
    # Full recomputation: activations would take 14.3 GiB otherwise.
    # bf16 gradients: fp32 ones would take 24.2 GiB.
    # Host: 93.3 GiB of the node, pinned: 27 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 100 % (bound by d2h).
    TENSOR=2 RECOMPUTE=full GRADIENTS=bf16 BUDGET_GIB=10
    ;;
"8 x 40 GB")
    # GPU: 35.5 of 37.0 usable GiB = weights 12.1, gradients 12.1 (bf16), activations
    # 1.1, logits or a layer's largest tensors 0.4, optimizer state 8.8, slots and upcast 1.0.
    # Full recomputation: activations would take 14.3 GiB otherwise.
    # bf16 gradients: fp32 ones would take 24.2 GiB.
    # Host: 53.4 GiB of the node, pinned: 59 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 100 % (bound by dram).
    TENSOR=2 RECOMPUTE=full GRADIENTS=bf16 BUDGET_GIB=10
    ;;
"1 x 80 GB")
    # GPU: 72.8 of 75.0 usable GiB = weights 24.2, gradients 24.2 (bf16), activations
    # 2.3, logits or a layer's largest tensors 0.5, optimizer state 17.9, slots and upcast 3.6.
    # Full recomputation: activations would take 28.5 GiB otherwise.
    # bf16 gradients: fp32 ones would take 48.5 GiB.
    # Host: 117.7 GiB of the node, pinned: 15 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 75 % (bound by dram).
    TENSOR=1 RECOMPUTE=full GRADIENTS=bf16 BUDGET_GIB=22
    ;;
"2 x 80 GB")
    # GPU: 72.5 of 75.0 usable GiB = weights 24.2, gradients 24.2 (bf16), activations
    # 2.3, logits or a layer's largest tensors 0.5, optimizer state 18.2, slots and upcast 3.1.
    # Full recomputation: activations would take 28.5 GiB otherwise.
    # bf16 gradients: fp32 ones would take 48.5 GiB.
    # Host: 91.4 GiB of the node, pinned: 30 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 92 % (bound by d2h).
    TENSOR=1 RECOMPUTE=full GRADIENTS=bf16 BUDGET_GIB=22
    ;;
"4 x 80 GB")
    # GPU: 73.0 of 75.0 usable GiB = weights 24.2, gradients 24.2 (bf16), activations
    # 2.3, logits or a layer's largest tensors 0.5, optimizer state 20.2, slots and upcast 1.5.
    # Full recomputation: activations would take 28.5 GiB otherwise.
    # bf16 gradients: fp32 ones would take 48.5 GiB.
    # Host: 50.2 GiB of the node, pinned: 66 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 54 % (bound by cpu).
    TENSOR=1 RECOMPUTE=full GRADIENTS=bf16 BUDGET_GIB=22
    ;;
"8 x 80 GB")
    # GPU: 66.4 of 75.0 usable GiB = weights 24.2, gradients 24.2 (bf16), activations
    # 2.3, logits or a layer's largest tensors 0.5, optimizer state 15.2, slots and upcast 0.0.
    # Full recomputation: activations would take 28.5 GiB otherwise.
    # bf16 gradients: fp32 ones would take 48.5 GiB.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=full GRADIENTS=bf16 BUDGET_GIB=none
    ;;
"1 x 141 GB")
    # GPU: 130.4 of 132.0 usable GiB = weights 24.2, gradients 24.2 (bf16), activations
    # 28.5, logits or a layer's largest tensors 0.8, optimizer state 49.0, slots and upcast 3.6.
    # bf16 gradients: fp32 ones would take 48.5 GiB.
    # Host: 87.7 GiB of the node, pinned: 41 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 58 % (bound by dram).
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=53
    ;;
"2 x 141 GB")
    # GPU: 130.0 of 132.0 usable GiB = weights 24.2, gradients 24.2 (bf16), activations
    # 28.5, logits or a layer's largest tensors 0.8, optimizer state 49.2, slots and upcast 3.1.
    # bf16 gradients: fp32 ones would take 48.5 GiB.
    # Host: 24.0 GiB of the node, pinned: 81 % of the state stay on the GPU; of the rest the
    # planner expects the GPU to update 100 % (bound by d2h).
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=53
    ;;
"4 x 141 GB")
    # GPU: 108.1 of 132.0 usable GiB = weights 24.2, gradients 24.2 (bf16), activations
    # 28.5, logits or a layer's largest tensors 0.8, optimizer state 30.3, slots and upcast 0.0.
    # bf16 gradients: fp32 ones would take 48.5 GiB.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=none GRADIENTS=bf16 BUDGET_GIB=none
    ;;
"8 x 141 GB")
    # GPU: 117.2 of 132.0 usable GiB = weights 24.2, gradients 48.5 (fp32), activations
    # 28.5, logits or a layer's largest tensors 0.8, optimizer state 15.2, slots and upcast 0.0.
    # All state fits beside them: offload is not needed and would gain nothing.
    TENSOR=1 RECOMPUTE=none GRADIENTS=fp32 BUDGET_GIB=none
    ;;
*)
    IMPOSSIBLE="there is no plan for it; GPUS is 1, 2, 4 or 8 (of one node) and GPU_GB is 40, 80 or 141"
    ;;
esac
# end plans (written by examples/plan_cells.py)
fi

source "$(dirname "$0")/launch.sh"
