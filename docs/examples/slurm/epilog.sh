#!/bin/bash
# Epilog= of slurm.conf: unmounts what prolog.sh mounted, after the user's last job on this node. The cache stays for the
# next one. An Epilog that fails drains its node, so this one logs what is wrong and ends with 0.
. "${SPIDERFS_SLURM_CONF:-/etc/spiderfs/slurm.conf}"
point=$MOUNTS/$SLURM_JOB_USER

as_user() {
  if [ "$(id -un)" = "$SLURM_JOB_USER" ]; then "$@"; else runuser -u "$SLURM_JOB_USER" -- "$@"; fi
}

clean_up() {
  exec 9>"$STATE/$SLURM_JOB_UID.lock"
  flock 9
  rm -f "$STATE/$SLURM_JOB_UID/$SLURM_JOB_ID"
  [ -z "$(ls -A "$STATE/$SLURM_JOB_UID")" ] || return 0
  # A process that outlives its job keeps the mount in use.
  as_user spiderfs umount "$point" || as_user spiderfs umount --lazy "$point"
}

said=$(clean_up 2>&1) || logger --tag spiderfs "job $SLURM_JOB_ID left a mount at $point: $said"
exit 0
