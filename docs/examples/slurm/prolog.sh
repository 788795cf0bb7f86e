#!/bin/bash
# Prolog= of slurm.conf: mounts the dataset for the job's user at MOUNTS/USER. A user's jobs on a node, such as the tasks
# of an array, share this mount and its cache; epilog.sh unmounts after the last one.
#
# A Prolog that fails drains its node, so this one logs what is wrong and ends with 0.
. "${SPIDERFS_SLURM_CONF:-/etc/spiderfs/slurm.conf}"
point=$MOUNTS/$SLURM_JOB_USER

as_user() { # the hook of a training run talks to a mount of its own user alone
  if [ "$(id -un)" = "$SLURM_JOB_USER" ]; then "$@"; else runuser -u "$SLURM_JOB_USER" -- "$@"; fi
}

prepare() {
  mkdir -p "$STATE/$SLURM_JOB_UID" "$MOUNTS" "$CACHE" || return
  exec 9>"$STATE/$SLURM_JOB_UID.lock"
  flock 9
  : >"$STATE/$SLURM_JOB_UID/$SLURM_JOB_ID"
  as_user spiderfs status "$point" >/dev/null 2>&1 && return
  # Its daemon may have been killed.
  as_user spiderfs umount --lazy "$point" >/dev/null 2>&1
  install -d -o "$SLURM_JOB_UID" -m 700 "$point" "$CACHE/$SLURM_JOB_USER" || return
  # The daemon outlives this script, and must not keep its lock.
  as_user spiderfs mount "$SOURCE" "$point" -o "$OPTIONS,cache_dir=$CACHE/$SLURM_JOB_USER" 9>&-
}

said=$(prepare 2>&1) || logger --tag spiderfs "job $SLURM_JOB_ID has no mount at $point: $said"
exit 0
