#!/bin/bash
# Installs Debian's SLURM for tests/slurm. Run it once, as root, on a machine where apt may install packages:
#   sudo tests/slurm/install.sh
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# The package starts services of its own; the tests start theirs from a configuration of their own.
apt-get install -q -y --no-install-recommends slurmctld slurmd slurm-client munge
for service in slurmctld slurmd munge; do
    systemctl disable --now "$service" 2>/dev/null || true
done
