# Sourced by the sbatch scripts: trains, and queues the job again when it was stopped before its end.
# The first argument is a model script, the others are added to its flags; both start styles read START.
if [ $# -eq 0 ]; then
    echo "name a model script: sbatch [options] $0 examples/llama2_7b.sh [flags]" >&2
    exit 2
fi
MODEL_SCRIPT=$1
shift
export SAVE=${SAVE:-checkpoints/$(basename "$MODEL_SCRIPT" .sh)}

bash "$MODEL_SCRIPT" "$@"
code=$?

# SAVE/status says how the run ended: finished, resumable (stopped on request, with a checkpoint) or failed. The exit
# code alone does not: torchrun turns every code but 0 into 1.
if [ $code -eq 0 ] && grep -q '"status": "resumable"' "$SAVE/status" 2>/dev/null; then
    echo "stopped before its end: job $SLURM_JOB_ID is queued again"
    scontrol requeue "$SLURM_JOB_ID"
    # The controller ends this script.
    sleep 60
fi
exit $code
