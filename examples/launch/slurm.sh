#!/bin/bash
# Trains on several hosts under Slurm, one process per host, and queues itself again until it is done.
#
#   sbatch examples/launch/slurm.sh CONFIG [section.key=value ...]
#
#SBATCH --job-name=poss
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

config=${1:?want a config, such as configs/llama3-8b-instruct/poss3.yaml}
export PATH="$PWD/.venv/bin:$PATH"
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# Else JAX gives a process of Slurm one GPU.
JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
export JAX_LOCAL_DEVICE_IDS

summary=$(srun --kill-on-bad-exit=1 poss-train --config "$config" "${@:2}")
echo "$summary"
if [[ $summary == *'"stopped_at"'* ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
