#!/bin/bash
# Boots a private systemd as PID 1 of new namespaces, on a copy-on-write view of /, with nothing wanted but box.target.
# usage: boot_systemd.sh ROOT PATH…     ROOT: an empty folder; every PATH is visible inside under its own name.
# Its own /tmp and /run are vital: systemd-tmpfiles would empty those of the host.
set -euo pipefail
export ROOT=$1
shift
exec unshare --fork --kill-child --pid --mount --uts --ipc --cgroup bash -euo pipefail -c '
mount --make-rprivate /
mount -t tmpfs tmpfs "$ROOT"
mkdir "$ROOT"/{upper,work,view}
V=$ROOT/view
mount -t overlay overlay -o "lowerdir=/,upperdir=$ROOT/upper,workdir=$ROOT/work" "$V"
mount -t proc proc "$V/proc"
mount -t sysfs sysfs "$V/sys"
mount -t tmpfs tmpfs "$V/sys/fs/cgroup"
mkdir "$V/sys/fs/cgroup/systemd"
mount -t cgroup -o none,name=systemd cgroup "$V/sys/fs/cgroup/systemd"
mount -t tmpfs -o mode=755 tmpfs "$V/run"
mount -t tmpfs -o mode=1777 tmpfs "$V/tmp"
mount --rbind /dev "$V/dev"
for path in "$@"; do
  mkdir -p "$V$path"
  mount --bind "$path" "$V$path"
done
rm -rf "$V"/etc/systemd/system/*
printf "[Unit]\nDescription=box\nDefaultDependencies=no\n" > "$V/etc/systemd/system/box.target"
export container=box
exec chroot "$V" /lib/systemd/systemd --system --log-target=console --show-status=no --unit=box.target' boot_systemd "$@"
