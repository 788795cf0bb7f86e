#!/bin/bash
# Prints the option that joins the caches of a job's nodes, each of which runs nginx (docs/howto/cluster.md).
#   SPIDERFS_OPTIONS=immutable,allow_other,$(docs/examples/slurm/peers.sh) sbatch job.sbatch python train.py
set -euo pipefail
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
echo "peers=$(sed 's|.*|http://&:8443|' <<<"$nodes" | paste -sd +)"
